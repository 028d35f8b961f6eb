"""What this process does for each instruction of a program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mmnnx.mpmd.compile.compile_program import Compiled
from mmnnx.mpmd.distributed.processes import absent_array, is_here, span_processes
from mmnnx.mpmd.ir.instructions import Call, Control, Instruction, Transfer
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.runtime.collective_order import in_collective_order
from mmnnx.mpmd.runtime.transfers import sender


class Step(NamedTuple):
    """What is done for one instruction, or for several transfers at once.

    Attributes:
      execute: takes and returns arrays.
      inputs, outputs: the buffers that it reads and fills.
      frees: the buffers that are dropped then.
    """

    execute: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]


def group_transfers(instructions: Sequence[Instruction]) -> list[list[int]]:
    """The numbers of instructions; transfers between the same two meshes that follow each other, together."""

    def way(numbered: tuple[int, Instruction]) -> Any:
        number, i = numbered
        return (i.source_mesh, i.target_mesh) if isinstance(i, Transfer) else number

    return [[n for n, _ in group] for _, group in itertools.groupby(enumerate(instructions), key=way)]


def has_part(program: Program, numbers: Sequence[int]) -> bool:
    """Whether this process has a part in instructions that are one step."""
    i = program.instructions[numbers[0]]
    return any(is_local(program, s) for s in (*i.inputs, *i.outputs))


def is_local(program: Program, buffer: int) -> bool:
    """Whether this process has a part of the array in a buffer."""
    return is_here(program.values[buffer][1])


def absent(compiled: Compiled, buffer: int) -> jax.Array:
    """An array that stands for one in other processes."""
    aval = compiled.program.values[buffer][0].aval
    return absent_array(aval.shape, aval.dtype, compiled.shardings[buffer])


def make_step(compiled: Compiled, numbers: Sequence[int], lasting: Set[int]) -> Step:
    """What this process does for a call, a while, or for transfers between the same two meshes.

    Args:
      compiled: the program.
      numbers: of the instructions.
      lasting: buffers whose arrays outlast the call of the program, in other hands.
    """
    own = [compiled.program.instructions[n] for n in numbers]
    i = own[0]
    if isinstance(i, Call):
        e = compiled.executables[i.fragment]
        inputs, outputs = tuple(i.inputs[n] for n in e.inputs), tuple(i.outputs[n] for n in e.outputs)
        return Step(in_collective_order(e.call, i.mesh), inputs, outputs, i.frees)
    if isinstance(i, Control):  # `whiles` moves what is moved
        return Step(lambda: (), (), (), () if i.kind == "repeat" else i.frees)
    return _transfer(compiled, [t for t in own if isinstance(t, Transfer)], lasting)


def _transfer(compiled: Compiled, transfers: Sequence[Transfer], lasting: Set[int]) -> Step:
    program, shardings, t = compiled.program, compiled.shardings, transfers[0]
    given, made, frees = (
        tuple(itertools.chain.from_iterable(x))
        for x in ([t.inputs for t in transfers], [t.outputs for t in transfers], [t.frees for t in transfers])
    )
    send = sender([(shardings[s], shardings[r], program.values[s][0].aval) for s, r in zip(given, made)])
    if not is_local(program, given[0]):
        return Step(functools.partial(send, *(absent(compiled, s) for s in given)), (), made, frees)
    if span_processes(t.source_mesh, t.target_mesh) and not lasting.isdisjoint(given):
        send = _sends_copies(send, [s in lasting for s in given])
    if is_local(program, made[0]):
        return Step(send, given, made, frees)
    return Step(_returns_nothing(send), given, (), frees)


def _sends_copies(send: Callable[..., Any], lasting: Sequence[bool]) -> Callable[..., Any]:
    """Sends copies of what is lasting: another call may use it up before it has been fetched."""
    return lambda *arrays: send(*(jnp.copy(a) if lasts else a for a, lasts in zip(arrays, lasting)))


def _returns_nothing(send: Callable[..., Any]) -> Callable[..., Sequence[Any]]:
    def call(*arrays: jax.Array) -> Sequence[Any]:
        send(*arrays)
        return ()

    return call
