"""Which step comes after which: the next one, but in a while, where the host reads what was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mmnnx.mpmd.ir.instructions import Control, Instruction

Jump = Callable[[list[Any]], int]
"""From all arrays to the number of the step that comes next."""


def find_jumps(steps: Sequence[Instruction], place: Mapping[int, int]) -> dict[int, Jump]:
    """The steps that another may follow than the next one, by number.

    Args:
      steps: the (first) instruction of each.
      place: where the array of a buffer is in the list of all arrays, for those that this process has.
    """
    jumps: dict[int, Jump] = {}
    open_whiles: list[int] = []
    for n, i in enumerate(steps):
        if not isinstance(i, Control):
            continue
        if i.kind == "while":
            open_whiles.append(n)
        elif i.kind == "repeat":
            pairs = [(place[s], place[carry]) for s, carry in zip(i.inputs, i.outputs) if s in place]
            jumps[n] = _repeat(pairs, [place[s] for s in i.frees if s in place], open_whiles[-1])
        else:
            start = open_whiles.pop()
            condition = next(place[s] for s in steps[start].inputs if s in place)
            jumps[start] = _enter(condition, start, n)
    return jumps


def walk(count: int, jumps: Mapping[int, Jump], arrays: list[Any]) -> Iterator[int]:
    """The numbers of the steps, of so many, in the order in which they are done."""
    n = 0
    while n < count:
        yield n
        n = jumps[n](arrays) if n in jumps else n + 1


def _enter(condition: int, start: int, end: int) -> Jump:
    """To the body or to the end: this is where the host waits for a device."""

    def jump(arrays: list[Any]) -> int:
        goes_on = np.asarray(arrays[condition].addressable_data(0))
        return start + 1 if goes_on else end

    return jump


def _repeat(pairs: Sequence[tuple[int, int]], frees: Sequence[int], start: int) -> Jump:
    """Back to the beginning, with the carries as the iteration left them."""

    def jump(arrays: list[Any]) -> int:
        for made, carry in pairs:
            arrays[carry] = arrays[made]
        for made in frees:
            arrays[made] = None
        return start

    return jump
