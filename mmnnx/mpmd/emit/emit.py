"""The program of a function: of those that its partitions make, the first that fits the memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

from jax.sharding import Mesh

from mmnnx.mpmd.emit.build import build_program
from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.frontend.record import Leaf, Record
from mmnnx.mpmd.ir.equations import is_var
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
    number = {v: n for n, v in enumerate(flat.invars)}
    notes = tuple(
        f"the sum that updates {_parameter(record, number[v])} is reduced over its mesh in every microbatch: "
        f"{why}"
        for v, why in partition.not_hoisted.items()
    )
    names = dict(zip(flat.invars, record.names()))
    arguments = {buffer: names.get(v, "a constant") for buffer, (v, _) in program.inputs.items()}
    updates = {
        v: str(_parameter(record, number[state]) or names[state])
        for v, state in partition.follows.items()
        if state in number
    }
    return dataclasses.replace(program, notes=notes, arguments=arguments, updates=updates)


def _parameter(record: Record, number: int) -> Leaf | None:
    """An argument; the parameter that it belongs to, if it is the state of an optimizer."""
    leaf = record.inputs[number]
    if leaf is None or not leaf.is_optimizer_state:
        return leaf
    parameters = (x for x in record.inputs if x is not None and not x.is_optimizer_state and x.within)
    return next((x for x in parameters if leaf.path[-len(x.within) :] == x.within), leaf)


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
