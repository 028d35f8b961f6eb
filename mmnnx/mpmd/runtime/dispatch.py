"""The loop that dispatches a program."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from mmnnx import _compat
from mmnnx.mpmd.compile.compile_program import Compiled
from mmnnx.mpmd.distributed import progress
from mmnnx.mpmd.distributed.processes import absent_array, is_here, span_processes
from mmnnx.mpmd.ir.instructions import Call, Instruction, Transfer
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.runtime.collective_order import check_threads, taking_turns
from mmnnx.mpmd.runtime.profile import Step, measure
from mmnnx.mpmd.runtime.transfers import sender


def runner(
    compiled: Compiled, name: str, numbers: Sequence[int], number: int
) -> Callable[[list[jax.Array]], list[list[jax.Array]]]:
    """The function that runs a compiled program: from arrays of inputs to those of results.

    It empties the list that it is given.

    Nothing in it waits for a device, but on CPU where several processes share a mesh (`collective_order`).
    What is decided per program is decided here, once.

    Args:
      compiled: the program.
      name: of the function that it was made of, for messages.
      numbers: of its instructions in the program as it prints.
      number: that of the program, the same in all processes.

    Raises:
      ValueError: if it would wait for ever.
    """
    program = compiled.program
    check_threads(program)
    groups = _together(program.instructions)
    own = [n for n, group in enumerate(groups) if _concerns(program, group)]
    place = {s: n for n, s in enumerate(program.inputs)}  # of buffers, in a list that all arrays are kept in
    lasting = {*program.inputs, *itertools.chain.from_iterable(program.outputs)}
    steps = [_quick(_step(compiled, groups[n], lasting), place) for n in own]
    given, size = len(program.inputs), len(place)
    there = (s for held in program.outputs for s in held if not _is_local(program, s))
    away = {s: _absent(compiled, s) for s in there}

    def results(buffers: list[Any]) -> list[list[jax.Array]]:
        return [[away[s] if s in away else buffers[place[s]] for s in held] for held in program.outputs]

    calls = itertools.count(1)

    def words(call: int, step: int) -> str:
        if step >= len(groups):
            return f"the end of call {call} of {name}"
        return f"instruction {numbers[groups[step][0]]} of call {call} of {name}: {described(step)}"

    def described(step: int) -> str:
        return " and ".join(program.describe(program.instructions[n]) for n in groups[step])

    @functools.cache
    def annotated() -> list[_Quick]:
        """The steps, each under the name that a trace of jax.profiler shows."""
        return [(_annotated(described(n), step[0]), *step[1:]) for n, step in zip(own, steps)]

    def run(arrays: list[jax.Array]) -> list[list[jax.Array]]:
        call = next(calls)
        progress.enter(functools.partial(words, call))
        here = progress.current
        here.call = number, call
        buffers = arrays + [None] * (size - given)
        arrays.clear()  # from here on the program alone decides how long they are kept
        named = annotated() if _compat.is_traced() else steps
        try:
            for here.step, (execute, read, start, end, frees) in zip(
                own, named
            ):  # where it is, others may ask
                buffers[start:end] = execute(*read(buffers))
                for s in frees:
                    buffers[s] = None
        except Exception as error:
            if (what := _compat.found_by_debug_nans(error)) is not None:
                raise FloatingPointError(f"invalid value ({what}) made by {words(call, here.step)}") from None
            raise
        here.step = len(groups)
        return results(buffers)

    return run


# (function, what picks its arguments, first place of its results, place after them, places that are dropped).
_Quick = tuple[Callable[..., Sequence[Any]], Callable[[list[Any]], Sequence[Any]], int, int, tuple[int, ...]]


def _quick(step: Step, place: dict[int, int]) -> _Quick:
    """A step over places instead of buffers: its results lie side by side. Gives each of them a place."""
    execute, inputs, outputs, frees = step
    read, start = _picker([place[s] for s in inputs]), len(place)
    place.update((s, start + n) for n, s in enumerate(outputs))
    return execute, read, start, len(place), tuple(place[s] for s in frees if s in place)


def _picker(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """`operator.itemgetter` that returns a sequence for any number of places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return (lambda buffers: (buffers[places[0]],)) if places else (lambda buffers: ())


def measurer(compiled: Compiled) -> Callable[[list[jax.Array]], list[list[jax.Array]]]:
    """As `runner`, of a program in one process that is measured while it runs."""
    program = compiled.program
    steps = [_step(compiled, [n], frozenset()) for n in range(len(program.instructions))]

    def run(arrays: list[jax.Array]) -> list[list[jax.Array]]:
        buffers = measure(program, steps, arrays)
        return [[buffers[s] for s in held] for held in program.outputs]

    return run


def _together(instructions: Sequence[Instruction]) -> list[list[int]]:
    """The numbers of instructions; transfers between the same two meshes that follow each other, together."""

    def way(numbered: tuple[int, Instruction]) -> Any:
        number, i = numbered
        return (i.source_mesh, i.target_mesh) if isinstance(i, Transfer) else number

    return [[n for n, _ in group] for _, group in itertools.groupby(enumerate(instructions), key=way)]


def _concerns(program: Program, numbers: Sequence[int]) -> bool:
    """Whether this process has a part in instructions that are one step."""
    i = program.instructions[numbers[0]]
    return any(_is_local(program, s) for s in (*i.inputs, *i.outputs))


def _step(compiled: Compiled, numbers: Sequence[int], lasting: Set[int]) -> Step:
    """What this process does for a call, or for transfers between the same two meshes.

    What is `lasting` outlasts the call of the program, in other hands.
    """
    program, shardings = compiled.program, compiled.shardings
    own = [program.instructions[n] for n in numbers]
    i = own[0]
    if isinstance(i, Call):
        e = compiled.executables[i.fragment]
        inputs, outputs = tuple(i.inputs[n] for n in e.inputs), tuple(i.outputs[n] for n in e.outputs)
        return taking_turns(e.call, i.mesh), inputs, outputs, i.frees
    given, made, frees = (
        tuple(itertools.chain.from_iterable(x))
        for x in ([i.inputs for i in own], [i.outputs for i in own], [i.frees for i in own])
    )
    send = sender([(shardings[s], shardings[t], program.values[s][0].aval) for s, t in zip(given, made)])
    if _is_local(program, given[0]):
        if span_processes(i.source_mesh, i.target_mesh) and not lasting.isdisjoint(given):
            send = _lent(send, [s in lasting for s in given])
        is_local = _is_local(program, made[0])
        return (send, given, made, frees) if is_local else (_handing(send), given, (), frees)
    return functools.partial(send, *(_absent(compiled, s) for s in given)), (), made, frees


def _lent(send: Callable[..., Any], lasting: Sequence[bool]) -> Callable[..., Any]:
    """Sends copies of what is lasting: another call may use it up before it has been fetched."""
    return lambda *arrays: send(*(jnp.copy(a) if lasts else a for a, lasts in zip(arrays, lasting)))


def _handing(send: Callable[..., Any]) -> Callable[..., Sequence[Any]]:
    def hand(*arrays: jax.Array) -> Sequence[Any]:
        send(*arrays)
        return ()

    return hand


def _is_local(program: Program, buffer: int) -> bool:
    return is_here(program.values[buffer][1])


def _absent(compiled: Compiled, buffer: int) -> jax.Array:
    """An array that stands for one in other processes."""
    aval = compiled.program.values[buffer][0].aval
    return absent_array(aval.shape, aval.dtype, compiled.shardings[buffer])


def _annotated(name: str, execute: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arrays: jax.Array) -> Any:
        with jax.profiler.TraceAnnotation(name):
            return execute(*arrays)

    return run
