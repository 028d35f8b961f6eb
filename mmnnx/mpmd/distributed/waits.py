"""What this process waits for from other processes: the watchdog looks at it several times a second."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

pending: dict[Any, Wait] = {}
"""What this process waits for, by keys of any kind. The watchdog alone notes that an array has come."""

_keys = itertools.count()


@dataclasses.dataclass
class Wait:
    """Something that this process waits for.

    Attributes:
      process: from which process.
      what: it in words.
      number: for an array, the how manyth that the process sends to this one; inf for anything else.
      array: that array, until it has come. No thread waits for it, which would cost a change of threads for
        each: the watchdog looks at it with each beat.
      timed: whether it may take no longer than the `timeout` of `mm.initialize`.
      beats: how long, in beats of the watchdog.
      beats_since_end: how many of them since the process ended.
    """

    process: int
    what: Callable[[], str]
    number: float
    array: jax.Array | None = None
    timed: bool = True
    beats: int = 0
    beats_since_end: int = 0

    @property
    def is_for_array(self) -> bool:
        return self.number < math.inf

    @property
    def is_over(self) -> bool:
        return self.is_for_array and self.array is None

    def poll(self) -> bool:
        """Whether the array has come, and is forgotten; so is one whose buffer another has taken over.

        Raises:
          Exception: if it never will.
        """
        array: Any = self.array  # the stubs of jax.Array do not know is_ready
        if array is None or not (array.is_deleted() or array.is_ready()):
            return False
        self.array = None
        try:
            array.block_until_ready()  # it is through; what went wrong is raised
        except Exception:
            if array.is_deleted():
                return False
            raise
        return not array.is_deleted()


def expect(call: tuple[int, int], wait: Wait) -> None:
    """This process has asked for an array, and goes on.

    Of what a process sends in a call of a program the last array is kept, until it comes: to keep all would
    take memory.

    Args:
      call: the call.
      wait: for the array.
    """
    key = wait.process, call
    if key not in pending:
        for old in [key for key, other in list(pending.items()) if other.is_over]:
            pending.pop(old, None)  # another thread may have done so
    pending[key] = wait


@contextlib.contextmanager
def waiting(process: int, what: Callable[[], str], *, timed: bool = True) -> Iterator[None]:
    """Whoever waits for another process does so in here: the watchdog ends the run if that process has ended,
    and, if it is `timed`, if it takes too long."""
    key = next(_keys)
    pending[key] = Wait(process, what, math.inf, timed=timed)
    try:
        yield
    finally:
        del pending[key]


def longest() -> Wait | None:
    """What has been waited for longest, at least a beat: an array if there is one."""
    old = [wait for wait in list(pending.values()) if wait.beats and not wait.is_over]
    return max(old, key=lambda wait: (wait.is_for_array, wait.beats), default=None)
