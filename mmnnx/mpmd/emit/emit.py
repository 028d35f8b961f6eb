"""The program of a function: of those that its partitions make, the first that fits the memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

from jax.sharding import Mesh

from mmnnx.mpmd.emit.build import build_program
from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.frontend.record import Leaf, Record
from mmnnx.mpmd.ir.equations import Flat, Var, is_var
from mmnnx.mpmd.ir.listing import Names, plan_text, timetables_text
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.verify import check_callbacks
from mmnnx.mpmd.partition.partition import Partition
from mmnnx.mpmd.schedule.dispatch_order import CannotBeOrdered


def emit(function: Function, partitions: Iterable[Partition]) -> tuple[Partition, Program]:
    """The first partition whose program fits the memory that its loops are given, and the program, verified.

    Raises:
      ValueError: if none fits, with the one that comes closest, or none can be ordered; for callbacks that
        cannot keep their order.
      VerificationError: if the program does not hold together.
    """
    partition, program = _first_that_fits(_orderable(function, partitions))
    program.verify()
    check_callbacks(program)
    names = function.meshes.names()
    function.dump.write("partition", functools.partial(plan_text, partition.plan, names))
    function.dump.write("schedule", lambda _: timetables_text(partition.plan))
    function.dump.write("emit", functools.partial(_text, program, names))
    return partition, program


def _text(program: Program, mesh_names: dict[Mesh, str], names: Names) -> str:
    """A program, and which variable each of its buffers holds."""
    buffers = [f"%{n} = {names.of(v)} on {mesh_names[mesh]}" for n, (v, mesh) in enumerate(program.values)]
    return "\n".join([str(program), "buffers:", *buffers])


def _program(function: Function, partition: Partition) -> Program:
    """The program of a partition, with what messages and the printed program call its arguments."""
    flat, record, meshes = partition.flat, function.record, function.meshes
    inputs = dict(zip(flat.invars, function.shardings.homes)) | {v: None for v, _ in flat.constants}
    successors = {
        flat.invars[leaf.updates]: v
        for leaf, v in zip(record.results, flat.outvars)
        if leaf is not None and leaf.updates is not None and is_var(v) and function.donated[leaf.updates]
    }
    program = build_program(
        partition.plan, inputs, partition.results, meshes.names(), meshes.moving, successors
    )
    names = dict(zip(flat.invars, record.names()))
    parameters = _parameters(flat, record)
    notes = tuple(
        f"the sum that updates {parameters.get(v, names[v])} is reduced over its mesh in every microbatch: "
        f"{why}"
        for v, why in partition.not_hoisted.items()
    )
    arguments = {buffer: names.get(v, "a constant") for buffer, (v, _) in program.inputs.items()}
    updates = {
        v: str(parameters.get(state, names[state]))
        for v, state in partition.follows.items()
        if state in names
    }
    return dataclasses.replace(program, notes=notes, arguments=arguments, updates=updates)


def _parameters(flat: Flat, record: Record) -> dict[Var, Leaf]:
    """For arguments that are the state of an optimizer, the parameters that they belong to: those whose path
    theirs ends with, and of several the one of the longest."""
    leaves = [(v, leaf) for v, leaf in zip(flat.invars, record.inputs) if leaf is not None]
    by_path = {leaf.within: leaf for _, leaf in leaves if not leaf.is_optimizer_state and leaf.within}
    found = {}
    for v, leaf in leaves:
        ends = (leaf.path[n:] for n in range(len(leaf.path)))
        if leaf.is_optimizer_state and (own := next((e for e in ends if e in by_path), None)) is not None:
            found[v] = by_path[own]
    return found


def _orderable(function: Function, partitions: Iterable[Partition]) -> Iterator[tuple[Partition, Program]]:
    """The partitions whose fragments can run in the order of their schedule, and their programs.

    Raises:
      ValueError: if none can, with what keeps the first.
    """
    refused, found = None, False
    for partition in partitions:
        try:
            program = _program(function, partition)
        except CannotBeOrdered as error:
            if refused is not None and str(refused) == str(error):
                break  # the same loop in the same order: it has no other schedule
            refused = refused or error
            continue
        found = True
        yield partition, program
    if refused is not None and not found:
        raise refused


def _first_that_fits(choices: Iterable[tuple[Partition, Program]]) -> tuple[Partition, Program]:
    closest: list[tuple[int, str]] = []
    for partition, program in choices:
        specs = [plan.loop.spec for plan in partition.plan.loops]
        limits = [spec.memory_limit for spec in specs if spec.memory_limit is not None]
        if not limits:
            return partition, program
        mesh, peak = max(program.simulate().peak_bytes.items(), key=lambda item: item[1])
        if peak <= min(limits):
            return partition, program
        names = ", ".join(repr(loop.schedule) for loop in program.loops)
        closest.append((peak, f"{mesh} holds {peak:,} bytes under {names}"))
    raise ValueError(
        f"microbatch: memory_limit={min(limits):,} bytes for one TaskMesh is too little: {min(closest)[1]}. "
        "Take smaller or fewer microbatches, remat=True, more stages, or donate state that is updated"
    )
