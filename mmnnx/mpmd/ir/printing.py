"""How a program prints: instructions, buffers and meshes in words. (`listing` has what comes before.)"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.ir.instructions import Call, Control, Instruction, ProgramData, Transfer


def describe(program: ProgramData, i: Instruction) -> str:
    """One instruction in words."""
    batch = "" if i.microbatch is None else f" [microbatch {i.microbatch}]"
    if isinstance(i, Call):
        return f"{i.name}{batch} on {mesh_text(program, i.mesh)}"
    if isinstance(i, Control):
        return _control(program, i)
    return f"send {_type(program, i.inputs[0])}{batch} {i.source} -> {i.target}, {i.nbytes:,} bytes"


def _control(program: ProgramData, i: Control) -> str:
    if i.kind == "while":
        meshes = ", ".join(mesh_text(program, program.values[s][1]) for s in i.inputs)
        return f"while {_buffers(i.inputs)} of {meshes}"
    return "back to the while" if i.kind == "repeat" else "end of the while"


def program_text(program: ProgramData) -> str:
    """A program as it prints: its meshes, a line for each instruction, its arguments, and notes."""
    lines = [f"Program: {program.counts}"]
    lines += [
        f"  {loop}: [microbatch n] stands for {loop.per_call}n to {loop.per_call}n + {loop.per_call - 1}, of "
        f"{loop.length * loop.per_call}"
        for loop in program.loops
        if loop.per_call > 1
    ]
    used = {mesh for _, mesh in program.values}
    for mesh, name in program.names.items():
        if mesh not in used:
            continue
        lines.append(f"  {name}: devices {[d.id for d in mesh.devices.flat]}, {dict(mesh.shape)}")
    for number, i in enumerate(program.instructions):
        line = f"{number:5d}  {describe(program, i)}"
        if isinstance(i, Call):
            line += f": reads {_buffers(i.inputs)}; writes {_buffers(i.outputs)}"
        elif isinstance(i, Control) and i.kind == "repeat":
            line += ": " + ", ".join(f"%{s} -> %{carry}" for s, carry in zip(i.inputs, i.outputs))
        elif isinstance(i, Transfer):
            line += f": %{i.inputs[0]} -> %{i.outputs[0]}"
        lines.append(line + (f"; frees {_buffers(i.frees)}" if i.frees else ""))
    for mesh, name in program.names.items():
        given = [f"%{s} {path}" for s, path in program.arguments.items() if program.values[s][1] == mesh]
        lines += _wrapped(f"  {name} is given ", given)
    return "\n".join([*lines, *(f"  note: {note}" for note in program.notes)])


def _buffers(buffers: Sequence[int]) -> str:
    return ", ".join(f"%{s}" for s in buffers) or "nothing"


def _type(program: ProgramData, buffer: int) -> str:
    aval = program.values[buffer][0].aval
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def value_text(program: ProgramData, buffer: int) -> str:
    what = ", ".join(
        [_type(program, buffer), *([program.arguments[buffer]] if buffer in program.arguments else [])]
    )
    return f"%{buffer} ({what}) of {mesh_text(program, program.values[buffer][1])}"


def mesh_text(program: ProgramData, mesh: Mesh) -> str:
    return f"{program.names.get(mesh, 'mesh')} (devices {[d.id for d in mesh.devices.flat]})"


def _wrapped(intro: str, items: Sequence[str]) -> list[str]:
    """Lines of at most 110 characters, none of which ends within an item."""
    whole = ", ".join(item.replace(" ", "\xa0") for item in items)
    lines = textwrap.wrap(whole, 110 - len(intro), break_long_words=False, break_on_hyphens=False)
    starts = [intro, *(" " * len(intro) for _ in lines[1:])]
    return [start + line.replace("\xa0", " ") for start, line in zip(starts, lines)]
