"""Where in the run this process is, and what it waits for: for messages to those who wait for it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

at: list[Any] = [0, lambda _: "the start", (0, 0)]
"""Where it is: the number of a step, what puts it into words, and (program, call), the last that it ran."""

handed: collections.Counter[int] = collections.Counter()
"""How many arrays it has handed to each other process."""

waits: dict[Any, Wait] = {}
"""What it waits for, by keys that mean nothing. That an array has come, the watch alone says."""

_numbers = itertools.count()


def move(words: Callable[[int], str]) -> None:
    """This process comes to another part of the run; `words` of an instruction's number say where it is."""
    at[:2] = 0, words


def sign(process: int, count: int) -> int:
    """A number by which an array for a process is asked for here, the `count`-th that it gets from this one.

    In all processes it is the same if they run the same step of the same call: what another call sends is not
    taken for it, but waited for in vain.
    """
    return hash((process, count, at[0], at[2])) & (2**63 - 1)


def place() -> str:
    """Where in the run this process is, in words."""
    return at[1](at[0])


@dataclasses.dataclass
class Wait:
    """Something that this process waits for.

    Attributes:
      process: from which process.
      what: it in words.
      number: of the array that it is, counted as `handed` counts; inf for anything else.
      array: that array, until it has come. Nobody waits for it in a thread, which would cost a change of
        threads for each: the watch looks at it with each beat.
      beats: how long, in beats of the watch, and how much of that since the process ended.
    """

    process: int
    what: Callable[[], str]
    number: float
    array: jax.Array | None = None
    beats: int = 0
    beats_since_end: int = 0

    @property
    def is_over(self) -> bool:
        return self.array is None and self.number < math.inf


@contextlib.contextmanager
def waiting(process: int, what: Callable[[], str]) -> Iterator[None]:
    """Whoever waits for another process does so in here: if it takes too long, the watch ends the run."""
    key = next(_numbers)
    waits[key] = Wait(process, what, math.inf)
    try:
        yield
    finally:
        del waits[key]
