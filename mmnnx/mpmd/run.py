"""The loop that dispatches a program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mmnnx import _compat
from mmnnx.mpmd.compile import Compiled
from mmnnx.mpmd.position import at, move
from mmnnx.mpmd.processes import elsewhere, is_here
from mmnnx.mpmd.profile import Step, measure
from mmnnx.mpmd.program import Call, Program
from mmnnx.mpmd.transfer import sender


def runner(
    compiled: Compiled, name: str, numbers: Sequence[int]
) -> Callable[[list[jax.Array]], list[list[jax.Array]]]:
    """The function that runs a compiled program: from the arrays of its input slots to those of each result.

    It empties the list that it is given.

    Nothing in it waits for a device; everything that is decided per program is decided here, once.

    Args:
      compiled: the program.
      name: of the function that it was made of, for messages.
      numbers: of its instructions in the program as it prints.
    """
    program = compiled.program
    mine, steps = _steps(compiled)
    given, size = tuple(program.inputs), len(program.values)
    there = (s for held in program.outputs for s in held if not _is_local(program, s))
    away = {s: _absent(compiled, s) for s in there}

    def results(slots: list[Any]) -> list[list[jax.Array]]:
        return [[away[s] if s in away else slots[s] for s in held] for held in program.outputs]

    calls = itertools.count(1)

    def words(call: int, step: int) -> str:
        if step >= len(steps):
            return f"the end of call {call} of {name}"
        return f"instruction {numbers[mine[step]]} of call {call} of {name}: " + program.describe(
            program.instructions[mine[step]]
        )

    @functools.cache
    def annotated() -> list[Step]:
        """The steps, each under the name that a trace of jax.profiler shows."""
        named: list[Step] = []
        for number, (execute, inputs, outputs, frees) in zip(mine, steps):
            words = program.describe(program.instructions[number])
            named.append((_annotated(words, execute), inputs, outputs, frees))
        return named

    def run(arrays: list[jax.Array]) -> list[list[jax.Array]]:
        move(functools.partial(words, next(calls)))
        slots: list[Any] = [None] * size
        for s in reversed(given):
            slots[s] = arrays.pop()  # from here on the program alone decides how long they are kept
        named = annotated() if _compat.is_traced() else steps
        for at[0], (execute, inputs, outputs, frees) in enumerate(named):  # where it is, others may ask
            for s, result in zip(outputs, execute(*[slots[s] for s in inputs])):
                slots[s] = result
            for s in frees:
                slots[s] = None
        at[0] = len(steps)
        return results(slots)

    return run


def measurer(compiled: Compiled) -> Callable[[list[jax.Array]], list[list[jax.Array]]]:
    """As `runner`, of a program in one process that is measured while it runs."""
    program, (_, steps) = compiled.program, _steps(compiled)

    def run(arrays: list[jax.Array]) -> list[list[jax.Array]]:
        slots = measure(program, steps, arrays)
        return [[slots[s] for s in held] for held in program.outputs]

    return run


def _steps(compiled: Compiled) -> tuple[list[int], list[Step]]:
    """What this process does, with the numbers of the instructions."""
    program, shardings = compiled.program, compiled.shardings
    steps: list[Step] = []
    numbers: list[int] = []
    for number, i in enumerate(program.instructions):
        if not any(_is_local(program, s) for s in (*i.inputs, *i.outputs)):
            continue  # for other processes
        numbers.append(number)
        if isinstance(i, Call):
            e = compiled.executables[i.fragment]
            inputs, outputs = tuple(i.inputs[n] for n in e.inputs), tuple(i.outputs[n] for n in e.outputs)
            steps.append((e.call, inputs, outputs, i.frees))
        else:
            (s,), (t,) = i.inputs, i.outputs
            send = _listed(sender(shardings[s], shardings[t], program.values[s][0].aval))
            if _is_local(program, s):
                steps.append((send, (s,), (t,) if _is_local(program, t) else (), i.frees))
            else:
                steps.append((functools.partial(send, _absent(compiled, s)), (), (t,), i.frees))
    return numbers, steps


def _is_local(program: Program, slot: int) -> bool:
    return is_here(program.values[slot][1])


def _absent(compiled: Compiled, slot: int) -> jax.Array:
    """An array that stands for one in other processes."""
    aval = compiled.program.values[slot][0].aval
    return elsewhere(aval.shape, aval.dtype, compiled.shardings[slot])


def _annotated(name: str, execute: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arrays: jax.Array) -> Any:
        with jax.profiler.TraceAnnotation(name):
            return execute(*arrays)

    return run


def _listed(send: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], list[jax.Array]]:
    return lambda array: [send(array)]
