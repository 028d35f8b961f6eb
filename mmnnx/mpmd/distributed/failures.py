"""Of all that looks like a failure, process 0 decides on one: all processes end with it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Sequence

from mmnnx.mpmd.distributed import failure_text, progress
from mmnnx.mpmd.distributed.member import Member
from mmnnx.mpmd.distributed.process_exit import ProcessExit

BEAT = 0.25  # seconds between two signs of life
STALLED = "stalled"  # a report about a process that has waited too long: for what, its signs of life say
_MISSED = 8  # beats after which nobody waits for a process any more
_GRACE = 0.3  # seconds in which a death explains an error that another process met because of it
_FAREWELL = 3.0  # seconds for which process 0 waits for the others to end before it


@dataclasses.dataclass
class Failures:
    """What this process knows of failures. Its methods are called in the thread of the watchdog.

    Attributes:
      number: of this process.
      members: all processes.
      failure_timeout, timeout: those of `mm.initialize`.
      tasks: what runs coroutines in the thread.
      exit: what ends this process.
      raised: an error that ended the script of this process: in words, and what prints its traceback.
      failure: what happened, once that is decided.
    """

    number: int
    members: Sequence[Member]
    failure_timeout: float
    timeout: float
    tasks: asyncio.TaskGroup
    exit: ProcessExit
    raised: tuple[str, Callable[[], None]] | None = None
    failure: str | None = None

    def report(self, about: int, what: str) -> None:
        """Tells process 0 of what looks like a failure; it knows whether there is an earlier one.

        Args:
          about: the number of the process that seems to have failed.
          what: how, in words, or `STALLED`.
        """
        if self.failure is None:
            if self.number != 0:
                self.members[0].send(about=about, what=what)
            self.tasks.create_task(self._decide_later(about, what))

    async def _decide_later(self, about: int, what: str) -> None:
        await asyncio.sleep(_GRACE if self.number == 0 else self.failure_timeout)
        if what == STALLED:
            await self.decide(failure_text.stalled(self.members, about, self.timeout))
        else:
            await self.decide(f"{self.members[about]} {what}")

    async def decide(self, failure: str) -> None:
        """Ends all processes that this one knows, and itself last: JAX's coordinator may be in it."""
        if self.failure is None:
            self.failure = failure
            for member in self.members:
                member.send(failure=failure)
            self._show(failure)
            for _ in range(int(_FAREWELL / 0.02)):
                if self.number != 0 or all(m.is_gone() or m.silent > _MISSED for m in self.members[1:]):
                    break
                await asyncio.sleep(0.02)
            self.exit.now()
        await asyncio.sleep(math.inf)

    def obey(self, failure: str) -> None:
        """Ends this process for a failure that another one decided on."""
        self._show(failure)
        self.exit.now()

    def _show(self, failure: str) -> None:
        """Says on stderr what happened, or nothing where nobody reads it any more."""
        me = self.members[self.number]
        words, show_error = self.raised or (None, lambda: None)
        if failure_text.is_about(failure, me):
            show_error()
        with contextlib.suppress(OSError):
            os.write(2, failure_text.ending(failure, me, words, str(progress.current)).encode())
