"""The checks that a program passes before anything of it runs."""

from __future__ import annotations

import dataclasses
import graphlib
from collections import Counter
from collections.abc import Set
from typing import Any

from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.ir.instructions import Call, Control, Instruction, ProgramData
from mmnnx.mpmd.ir.printing import describe, mesh_text, value_text


class VerificationError(ValueError):
    """A program that would read what is not there, or keep what nobody needs.

    Example:
      >>> import dataclasses
      >>> broken = dataclasses.replace(program, instructions=program.instructions[1:])
      >>> try:
      ...     broken.verify()
      ... except VerificationError as error:
      ...     print("refused")
      refused
    """


def verify(program: ProgramData) -> None:
    """Checks that the program can run, does all there is to do, and leaves nothing behind.

    Every fragment of a loop runs once for each microbatch. Every value is made before it is read, on the
    mesh where it is read; it is dropped once, after its last use; and every value that is not a result is
    dropped. The order is one for all meshes, so processes that follow it cannot wait for each other.

    Raises:
      VerificationError: names the instruction, the microbatch and the mesh; where meshes wait for each
        other in a circle, every instruction of the circle.
    """
    _check_loops(program)
    live = dict(program.inputs)
    results = {s for buffers in program.outputs for s in buffers}
    entered: list[set[int]] = []  # for each while that is not over, the buffers that were there before it
    for number, i in enumerate(program.instructions):
        where = _Where(program, number)
        mesh_in, mesh_out = _meshes(i)
        for s in i.inputs:
            if s not in live:
                raise VerificationError(
                    f"{where}: reads {value_text(program, s)} before it is made or after it is freed"
                    + _circle(program)
                )
            if mesh_in is not None and live[s][1] != mesh_in:
                raise VerificationError(
                    f"{where}: reads {value_text(program, s)}, which is on {mesh_text(program, live[s][1])}, "
                    f"on {mesh_text(program, mesh_in)}"
                )
        for s in i.outputs:
            if s in live and not isinstance(i, Control):
                raise VerificationError(f"{where}: makes {value_text(program, s)} a second time")
            if mesh_out is not None and program.values[s][1] != mesh_out:
                raise VerificationError(
                    f"{where}: makes {value_text(program, s)} on {mesh_text(program, mesh_out)}"
                )
            live[s] = program.values[s]
        for s in i.frees:
            if s in results and not entered:  # a carry is made again
                raise VerificationError(f"{where}: frees {value_text(program, s)}, which is a result")
            if mesh_in is not None and program.values[s][1] not in (mesh_in, mesh_out):
                raise VerificationError(f"{where}: frees {value_text(program, s)}, which is on another mesh")
            if live.pop(s, None) is None:
                raise VerificationError(f"{where}: frees {value_text(program, s)}, which is not there")
        if isinstance(i, Control):
            _check_control(program, i, where, live.keys(), entered)
    for s in results - live.keys():
        raise VerificationError(f"the result {value_text(program, s)} is never made")
    for s in live.keys() - results:
        raise VerificationError(f"{value_text(program, s)} is never freed")


@dataclasses.dataclass(frozen=True)
class _Where:
    """An instruction as messages name it: put into words only if there is a message."""

    program: ProgramData
    number: int

    def __str__(self) -> str:
        return f"instruction {self.number}, {describe(self.program, self.program.instructions[self.number])}"


def _meshes(i: Instruction) -> tuple[Mesh | None, Mesh | None]:
    """The mesh that an instruction reads on, and the one that it writes on; none for a while."""
    if isinstance(i, Control):
        return None, None
    return (i.mesh, i.mesh) if isinstance(i, Call) else (i.source_mesh, i.target_mesh)


def _check_control(
    program: ProgramData, i: Control, where: _Where, live: Set[int], entered: list[set[int]]
) -> None:
    """Checks that a while has the same buffers before each iteration, and moves none to another mesh."""
    if i.kind == "while":
        entered.append(set(live))
    for s, carry in zip(i.inputs, i.outputs):
        if program.values[s][1] != program.values[carry][1]:
            raise VerificationError(
                f"{where}: moves {value_text(program, s)} into {value_text(program, carry)}"
            )
    if i.kind == "repeat" and (changed := live ^ entered[-1]):
        before, after = ("there", "gone") if min(changed) in entered[-1] else ("not there", "there")
        raise VerificationError(
            f"{where}: {value_text(program, min(changed))} is {before} before an iteration, {after} after it"
        )
    if i.kind == "end":
        entered.pop()


def _check_loops(program: ProgramData) -> None:
    counts = Counter((c.fragment, c.microbatch) for c in program.calls)
    for loop in program.loops:
        for f, *elsewhere in loop.fragments:
            for m in range(loop.length):
                times = sum(counts[g, m] for g in (f, *elsewhere))
                if times != 1:
                    wrong = "is missing" if times == 0 else f"is there {times} times"
                    raise VerificationError(
                        f"{f.name} of microbatch {m} on {mesh_text(program, f.mesh)} {wrong} "
                        f"(schedule {loop.schedule!r}, {loop.length} microbatches)"
                    )


def _circle(program: ProgramData) -> str:
    """The instructions that wait for each other if each mesh keeps its own order, in words."""
    numbered = [(n, i) for n, i in enumerate(program.instructions) if not isinstance(i, Control)]
    makes = {s: number for number, i in numbered for s in i.outputs}
    before: dict[int, list[int]] = {}
    last: dict[Mesh, int] = {}
    for number, i in numbered:
        before[number] = [makes[s] for s in i.inputs if s in makes]
        for mesh in (i.mesh,) if isinstance(i, Call) else (i.source_mesh, i.target_mesh):
            before[number] += [last[mesh]] if mesh in last else []
            last[mesh] = number
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        steps = [f"{n}, {describe(program, program.instructions[n])}" for n in error.args[1]]
        return ". Instructions wait for each other: " + " <- ".join(steps)
    return ""


def check_callbacks(program: ProgramData) -> None:
    """Refuses callbacks that are to keep an order on several meshes, which run at the same time."""
    meshes: dict[Any, dict[Mesh, None]] = {}
    for fragment in program.fragments:
        for effect in filter(_compat.is_ordered, fragment.jaxpr.effects):
            meshes.setdefault(effect, {})[fragment.mesh] = None
    for several in (found for found in meshes.values() if len(found) > 1):
        raise ValueError(
            f"callbacks with ordered=True are on {len(several)} TaskMeshes "
            f"({', '.join(program.names[mesh] for mesh in several)}), which run at the same time: leave "
            "ordered=True out, or make them all in one task"
        )
