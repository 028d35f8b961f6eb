"""The loop that dispatches a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mmnnx.mpmd.compile import Compiled
from mmnnx.mpmd.profile import is_measured, measure
from mmnnx.mpmd.program import Call
from mmnnx.mpmd.transfer import sender


def runner(compiled: Compiled) -> Callable[[list[jax.Array]], list[list[jax.Array]]]:
    """The function that runs a compiled program: from the arrays of its input slots to those of each result.

    It empties the list that it is given.

    Nothing in it waits for a device; everything that is decided per program is decided here, once.
    """
    program, shardings = compiled.program, compiled.shardings
    steps = []
    for i in program.instructions:
        if isinstance(i, Call):
            e = compiled.executables[i.fragment]
            inputs, outputs = tuple(i.inputs[n] for n in e.inputs), tuple(i.outputs[n] for n in e.outputs)
            steps.append((e.call, inputs, outputs, i.frees))
        else:
            dtype = program.values[i.inputs[0]][0].aval.dtype
            send = sender(shardings[i.inputs[0]], shardings[i.outputs[0]], dtype)
            steps.append((_listed(send), i.inputs, i.outputs, i.frees))
    given, size = tuple(program.inputs), len(program.values)

    def results(slots: list[Any]) -> list[list[jax.Array]]:
        return [[slots[s] for s in held] for held in program.outputs]

    def run(arrays: list[jax.Array]) -> list[list[jax.Array]]:
        if is_measured():
            return results(measure(program, steps, arrays))
        slots: list[Any] = [None] * size
        for s in reversed(given):
            slots[s] = arrays.pop()  # from here on the program alone decides how long they are kept
        for execute, inputs, outputs, frees in steps:
            for s, result in zip(outputs, execute(*[slots[s] for s in inputs])):
                slots[s] = result
            for s in frees:
                slots[s] = None
        return results(slots)

    return run


def _listed(send: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], list[jax.Array]]:
    return lambda array: [send(array)]
