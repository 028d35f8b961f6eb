"""The checks that a program passes before anything of it runs."""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Set
from typing import Any

from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.ir.instructions import Call, Control, ProgramData, Transfer
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
    """Raises VerificationError for what `Program.verify` finds."""
    _check_loops(program)
    live, meshes = set(program.inputs), [mesh for _, mesh in program.values]
    results = {s for buffers in program.outputs for s in buffers}
    entered: list[set[int]] = []  # for each while that is not over, the buffers that were there before it
    for number, i in enumerate(program.instructions):
        mesh_in: Mesh | None = None  # no mesh is checked for a while
        mesh_out: Mesh | None = None
        if isinstance(i, Call):
            mesh_in = mesh_out = i.fragment.mesh
        elif isinstance(i, Transfer):
            mesh_in, mesh_out = i.source_mesh, i.target_mesh
        for s in i.inputs:
            if s not in live:
                early = f"reads {value_text(program, s)} before it is made or after it is freed"
                raise _wrong(program, number, early + _circle(program))
            if mesh_in is not None and meshes[s] != mesh_in:
                there, here = mesh_text(program, meshes[s]), mesh_text(program, mesh_in)
                raise _wrong(
                    program, number, f"reads {value_text(program, s)}, which is on {there}, on {here}"
                )
        for s in i.outputs:
            if s in live and not isinstance(i, Control):
                raise _wrong(program, number, f"makes {value_text(program, s)} a second time")
            if mesh_out is not None and meshes[s] != mesh_out:
                here = mesh_text(program, mesh_out)
                raise _wrong(program, number, f"makes {value_text(program, s)} on {here}")
            live.add(s)
        for s in i.frees:
            if s in results and not entered:  # a carry is made again
                raise _wrong(program, number, f"frees {value_text(program, s)}, which is a result")
            if mesh_in is not None and meshes[s] not in (mesh_in, mesh_out):
                raise _wrong(program, number, f"frees {value_text(program, s)}, which is on another mesh")
            if s not in live:
                raise _wrong(program, number, f"frees {value_text(program, s)}, which is not there")
            live.remove(s)
        if isinstance(i, Control):
            _check_control(program, i, number, live, entered)
    for s in results - live:
        raise VerificationError(f"the result {value_text(program, s)} is never made")
    for s in live - results:
        raise VerificationError(f"{value_text(program, s)} is never freed")


def _wrong(program: ProgramData, number: int, what: str) -> VerificationError:
    """The error of an instruction."""
    instruction = describe(program, program.instructions[number])
    return VerificationError(f"instruction {number}, {instruction}: {what}")


def _check_control(
    program: ProgramData, i: Control, number: int, live: Set[int], entered: list[set[int]]
) -> None:
    """Checks that a while has the same buffers before each iteration, and moves none to another mesh."""
    if i.kind == "while":
        entered.append(set(live))
    for s, carry in zip(i.inputs, i.outputs):
        if program.values[s][1] != program.values[carry][1]:
            into = value_text(program, carry)
            raise _wrong(program, number, f"moves {value_text(program, s)} into {into}")
    if i.kind == "repeat" and (changed := live ^ entered[-1]):
        before, after = ("there", "gone") if min(changed) in entered[-1] else ("not there", "there")
        value = value_text(program, min(changed))
        raise _wrong(program, number, f"{value} is {before} before an iteration, {after} after it")
    if i.kind == "end":
        entered.pop()


def _check_loops(program: ProgramData) -> None:
    first = {f: alike[0] for loop in program.loops for alike in loop.fragments for f in alike}
    counts = Counter([(first.get(c.fragment), c.microbatch) for c in program.calls])
    for loop in program.loops:
        for f, *_ in loop.fragments:
            for m in range(loop.length):
                if (times := counts[f, m]) != 1:
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
