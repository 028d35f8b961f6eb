"""The loop that dispatches a program."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from mmnnx import _compat
from mmnnx.mpmd.compile.compile_program import Compiled
from mmnnx.mpmd.distributed import progress
from mmnnx.mpmd.runtime import debug_nans
from mmnnx.mpmd.runtime.collective_order import check_threads
from mmnnx.mpmd.runtime.pick import picker
from mmnnx.mpmd.runtime.steps import Step, absent, group_transfers, has_part, is_local, make_step
from mmnnx.mpmd.runtime.whiles import find_jumps, walk
from mmnnx.printable import first_few


def runner(
    compiled: Compiled, name: str, numbers: Sequence[int], number: int
) -> Callable[[list[jax.Array]], Sequence[jax.Array]]:
    """The function that runs a compiled program: from arrays of inputs to those of results, in a row.

    It empties the list that it is given.

    Nothing in it waits for a device, but a while for its condition (`whiles`), and each step on CPU where
    several processes share a mesh (`collective_order`) and where results are looked at (`debug_nans`).
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
    groups = group_transfers(program.instructions)
    own = [n for n, group in enumerate(groups) if has_part(program, group)]
    place = {s: n for n, s in enumerate(program.inputs)}  # of buffers, in a list that all arrays are kept in
    lasting = program.moved({*program.inputs, *itertools.chain.from_iterable(program.outputs)})
    steps = [_over_places(make_step(compiled, groups[n], lasting), place) for n in own]
    blank: list[Any] = [None] * (len(place) - len(program.inputs))
    outputs = [*itertools.chain.from_iterable(program.outputs)]
    for s in outputs:
        if not is_local(program, s):
            place[s] = len(program.inputs) + len(blank)
            blank.append(absent(compiled, s))
    results = picker([place[s] for s in outputs])
    jumps = find_jumps([program.instructions[groups[n][0]] for n in own], place)
    calls = itertools.count(1)

    def where(call: int, step: int) -> str:
        if step >= len(groups):
            return f"the end of call {call} of {name}"
        return f"instruction {numbers[groups[step][0]]} of call {call} of {name}: {what(step)}"

    def what(step: int) -> str:
        described = Counter(program.describe(program.instructions[n]) for n in groups[step])
        texts = [text if count == 1 else f"{count} times {text}" for text, count in described.items()]
        return first_few(texts, SHOWN, " and ")

    @functools.cache
    def annotated() -> list[_PlacedStep]:
        """The steps, each under the name that a trace of jax.profiler shows."""
        return [(_annotated(what(n), step[0]), *step[1:]) for n, step in zip(own, steps)]

    def run(arrays: list[jax.Array]) -> Sequence[jax.Array]:
        call, here = next(calls), progress.current
        progress.enter(functools.partial(where, call))
        here.call = number, call
        kept = arrays + blank
        arrays.clear()  # from here on the program alone decides how long they are kept
        watched = annotated() if _compat.is_traced() else steps
        if is_checked := debug_nans.is_asked():
            watched = [(debug_nans.checked(step[0]), *step[1:]) for step in watched]
        order: Iterable[tuple[int, _PlacedStep]] = zip(own, watched)
        if jumps:
            order = ((own[n], watched[n]) for n in walk(len(own), jumps, kept))
        try:
            for step, (execute, read, start, end, frees) in order:
                here.step = step  # the watchdog looks at it; other threads set it too
                kept[start:end] = execute(*read(kept))
                for n in frees:
                    kept[n] = None
        except FloatingPointError as error:
            if not is_checked:
                raise
            raise FloatingPointError(f"invalid value ({error}) made by {where(call, step)}") from None
        here.step = len(groups)
        return results(kept)

    return run


SHOWN = 10
"""Instructions that a message names of a step that runs several: one may send thousands of arrays."""

# (function, what picks its arguments, first place of its results, place after them, places that are dropped).
_PlacedStep = tuple[
    Callable[..., Sequence[Any]], Callable[[list[Any]], Sequence[Any]], int, int, tuple[int, ...]
]


def _over_places(step: Step, place: dict[int, int]) -> _PlacedStep:
    """A step over places instead of buffers: its results lie side by side. Gives each of them a place."""
    read, start = picker([place[s] for s in step.inputs]), len(place)
    place.update((s, start + n) for n, s in enumerate(step.outputs))
    return step.execute, read, start, len(place), tuple(place[s] for s in step.frees if s in place)


def _annotated(name: str, execute: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arrays: jax.Array) -> Any:
        with jax.profiler.TraceAnnotation(name):
            return execute(*arrays)

    return run
