"""Each process watches the others: where one fails all end, soon, with one message each.

Every process has a connection to process 0 (`rendezvous`), by which a thread says several times a second
where in the run it is. A process that dies closes its connection; one that is stopped, or whose host is gone,
falls silent; one that raises says so; one that waits for another too long says for what. Process 0 tells all
others what happened, and each writes it to stderr and ends with status 1.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

from mmnnx.mpmd.distributed.progress import Wait, handed, place, waits
from mmnnx.mpmd.distributed.rendezvous import Member

_BEAT = 0.25  # seconds between two signs of life
_MISSED = 8  # beats after which nobody waits for a process any more
_GRACE = 0.3  # seconds in which a death explains an error that another process met because of it
_WAITS = "waits"  # a report of a process that has waited too long: for what, its beats say
_FAREWELL = 3.0  # seconds for which process 0 waits for the others to end before it

current: Watch | None = None
"""What watches the other processes, if there are any."""


class Watch:
    """The thread that watches the other processes.

    Args:
      number: of this process.
      failure_timeout: seconds of silence after which a process counts as failed. They are counted in beats of
        this one, so that nothing fails when all were asleep.
      timeout: seconds for which a thread may wait for another process.
    """

    def __init__(self, number: int, failure_timeout: float, timeout: float) -> None:
        self.number, self.failure_timeout, self.timeout = number, failure_timeout, timeout
        self.members: list[Member] = []
        self._status = 1
        self._failure: str | None = None
        self._error: tuple[str, Callable[[], None]] | None = None  # raised here: in words, and to show it
        self._over = threading.Event()  # every process has ended
        self._ending, self._flushed = threading.Event(), threading.Event()
        self._loop = asyncio.new_event_loop()
        self._tasks: asyncio.TaskGroup
        self._watching: asyncio.Task[None]
        self._thread: threading.Thread

    def start(self, meeting: Coroutine[Any, Any, list[Member]]) -> None:
        """Meets the other processes and begins to watch them.

        Raises:
          TimeoutError, ValueError, OSError: as the meeting does.
        """
        met: concurrent.futures.Future[None] = concurrent.futures.Future()

        async def run() -> None:
            try:
                self.members = await meeting
            except Exception as error:
                return met.set_exception(error)
            async with asyncio.TaskGroup() as self._tasks:
                met.set_result(None)
                for member in self.members:
                    if member.streams is not None:
                        self._tasks.create_task(self._listen(member))
                self._tasks.create_task(self._beat())

        def guarded() -> None:
            self._watching = self._loop.create_task(run())
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(self._watching)
            except Exception:
                traceback.print_exc()
                self._end()

        self._thread = threading.Thread(target=guarded, name="mmnnx-watch", daemon=True)
        self._thread.start()
        # At exit Python starts no more threads.
        threading.Thread(target=self._flush, name="mmnnx-flush", daemon=True).start()
        met.result()

    def leave(self) -> None:
        """This process has nothing more to do; waits until that is so for all, and ends the thread.

        A thread that is in JAX when Python goes away would end the process with SIGABRT.
        """

        def tell() -> None:
            self._note_end(self.number, dict(handed))
            self._tell(ended=self.number, sent=list(handed.items()))

        self._loop.call_soon_threadsafe(tell)
        try:
            self._over.wait()
            self._loop.call_soon_threadsafe(self._watching.cancel)
            self._thread.join()
        except KeyboardInterrupt:
            self._status = 130
            self._end()

    def except_hook(self, before: Callable[..., Any]) -> Callable[..., None]:
        """A `sys.excepthook` that does what `before` does and then ends all processes.

        An error that is met because another process has failed is not shown as if it were the cause.
        """

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if hasattr(sys, "ps1") or self._over.is_set():
                return before(kind, error, trace)  # an interactive session goes on
            if issubclass(kind, KeyboardInterrupt):
                self._status = 130
            said = (str(error).strip().splitlines() or [""])[0][:300]
            what = f"raised {kind.__name__}{': ' if said else ''}{said}"
            self._error = what, lambda: before(kind, error, trace)
            self._loop.call_soon_threadsafe(self._report, self.number, f"{what}. It was at {place()}")
            self._over.wait()  # the thread ends the process

        return hook

    # What follows runs in the thread.

    def _tell(self, **words: Any) -> None:
        for member in self.members:
            member.tell(**words)

    async def _listen(self, member: Member) -> None:
        while (said := await member.hear()) is not None:
            member.silent = 0
            if "place" in said:
                member.place, member.waits = said["place"], said["waits"]
            elif "ended" in said:
                self._note_end(said["ended"], dict(said["sent"]))
                if self.number == 0:
                    self._tell(**said)
            elif "about" in said:
                self._report(said["about"], said["what"])
            elif "failure" in said:
                self._show(said["failure"])
                self._end()
        if not self._over.is_set():
            await self._fail(f"{member} died: its connection closed. It was last heard of at {member.place}")

    async def _beat(self) -> None:
        me = self.members[self.number]
        while not self._over.is_set():
            me.place, me.waits = place(), self._waits()
            self._tell(place=me.place, waits=me.waits)
            await asyncio.sleep(_BEAT)
            for member in self.members:
                if member.streams is not None:
                    member.silent += 1
                if member.silent * _BEAT > self.failure_timeout:
                    await self._fail(
                        f"{member} has not been heard of for {self.failure_timeout:g} s: it was stopped, or "
                        f"its host or the network is down. It was last heard of at {member.place}"
                    )
            for wait in list(waits.values()):
                self._look(wait)
                if not wait.is_over:
                    self._check(wait)

    def _waits(self) -> tuple[int, str, bool] | None:
        """What this process waits for: (process, words, whether it is an array), arrays before words."""
        old = [wait for wait in list(waits.values()) if wait.beats and not wait.is_over]
        first = max(old, key=lambda w: (w.number < math.inf, w.beats), default=None)
        return (first.process, first.what(), first.number < math.inf) if first else None

    def _look(self, wait: Wait) -> None:
        """Notes whether an array has come, or that it never will."""
        array: Any = wait.array  # the stubs of jax.Array do not know is_ready
        if array is None or not (array.is_deleted() or array.is_ready()):
            return
        try:
            array.block_until_ready()  # it is through; what went wrong is raised
        except Exception as error:
            if not array.is_deleted():
                self._report(wait.process, f"did not deliver {wait.what()}: {error}")
        wait.array = None

    def _check(self, wait: Wait) -> None:
        wait.beats += 1
        other = self.members[wait.process]
        if other.sent is not None and wait.number > other.sent.get(self.number, 0):
            wait.beats_since_end += 1
        if wait.beats_since_end > 2:
            me = self.members[self.number]
            self._report(wait.process, f"has ended, and {me} still waits for {wait.what()}")
        elif wait.beats * _BEAT > self.timeout:
            self._report(self.number, _WAITS)

    def _note_end(self, number: int, sent: dict[int, int]) -> None:
        self.members[number].sent = sent
        if all(member.sent is not None for member in self.members):
            self._over.set()

    def _report(self, about: int, what: str) -> None:
        """Tells process 0 of what looks like a failure; it knows whether there is an earlier one."""
        if self._failure is None:
            if self.number != 0:
                self.members[0].tell(about=about, what=what)
            self._tasks.create_task(self._suspect(about, what))

    async def _suspect(self, about: int, what: str) -> None:
        await asyncio.sleep(_GRACE if self.number == 0 else self.failure_timeout)
        await self._fail(self._stall(about) if what == _WAITS else f"{self.members[about]} {what}")

    def _stall(self, number: int) -> str:
        """Who keeps a process waiting: the last of those that each wait for an array of the next.

        Words are waited for by programs that are through with their dispatch: they keep nobody waiting.
        """
        waiter, other = self.members[number], self.members[number]
        seen: set[int] = set()
        while other.waits and other.number not in seen and (other.waits[2] or not seen):
            seen.add(other.number)
            waiter, other = other, self.members[other.waits[0]]
        what = waiter.waits[1] if waiter.waits else "it"
        return (
            f"{other} has not sent {what}, for which {waiter} has waited {self.timeout:g} s, the `timeout` "
            f"of mm.initialize. It was last heard of at {other.place}"
        )

    async def _fail(self, text: str) -> None:
        """Ends all processes that this one knows, and itself last: JAX's coordinator may be in it."""
        if self._failure is None:
            self._failure = text
            self._tell(failure=text)
            self._show(text)
            for _ in range(int(_FAREWELL / 0.02)):
                if self.number != 0 or all(m.is_gone() or m.silent > _MISSED for m in self.members[1:]):
                    break
                await asyncio.sleep(0.02)
            self._end()
        await asyncio.sleep(math.inf)

    def _show(self, failure: str) -> None:
        """Says on stderr what happened, or nothing where nobody reads it any more."""
        me = str(self.members[self.number])
        if failure.startswith(me):
            end = "All processes end"
            if self._error:
                self._error[1]()
        elif self._error:
            what = "raised the same" if self._error[0] in failure else f"then {self._error[0]}"
            end = f"P{me[1:]} {what}, and ends too, at {place()}"
        else:
            end = f"P{me[1:]} ends too, at {place()}"
        with contextlib.suppress(OSError):
            os.write(2, f"mmnnx: {failure}. {end}\n".encode())

    def _end(self) -> None:
        """Ends this process without the exit handlers, of which some wait for processes that are gone."""
        self._ending.set()
        self._flushed.wait(1.0)  # another thread may hold what is to be flushed for ever
        os._exit(self._status)

    def _flush(self) -> None:
        self._ending.wait()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        self._flushed.set()
