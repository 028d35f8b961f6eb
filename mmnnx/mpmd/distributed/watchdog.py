"""Each process watches the others: where one fails all end, soon, with one message each.

Every process has a connection to process 0 (`rendezvous`), by which a thread says several times a second
where in the run it is and what it waits for. A process that dies closes its connection; one that is stopped,
or whose host is gone, falls silent; one that raises says so; one that waits too long for another says for
what. Process 0 tells all others what happened, and each writes it to stderr and ends with status 1
(`failures`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

from mmnnx.mpmd.distributed import failure_text, progress, transport, waits
from mmnnx.mpmd.distributed.failures import BEAT, STALLED, Failures
from mmnnx.mpmd.distributed.member import Member
from mmnnx.mpmd.distributed.process_exit import ProcessExit


class Watchdog:
    """The thread that watches the other processes.

    Args:
      number: of this process.
      failure_timeout: seconds of silence after which a process counts as failed. They are counted in beats of
        this one, so that nothing fails when all were asleep.
      timeout: seconds for which a thread may wait for another process while no array comes to any.

    Attributes:
      members: all processes, once they have met.
    """

    def __init__(self, number: int, failure_timeout: float, timeout: float) -> None:
        self.number, self.failure_timeout, self.timeout = number, failure_timeout, timeout
        self.members: list[Member] = []
        self._exit = ProcessExit()
        self._all_ended = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._failures: Failures
        self._watching: asyncio.Task[None]
        self._thread: threading.Thread

    def start(self, meeting: Coroutine[Any, Any, list[Member]]) -> None:
        """Meets the other processes and begins to watch them.

        Raises:
          TimeoutError, ValueError, OSError: as the meeting does.
        """
        met: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            self._watching = self._loop.create_task(self._watch(meeting, met))
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(self._watching)
                for member in self.members:
                    member.close()
                self._loop.run_until_complete(asyncio.sleep(0))
            except Exception:
                traceback.print_exc()
                self._exit.now()

        self._thread = threading.Thread(target=run, name="mmnnx-watchdog", daemon=True)
        self._thread.start()
        met.result()

    def leave(self) -> None:
        """This process has nothing more to do; waits until that is so for all, and ends the thread.

        A thread that is in JAX when Python goes away would end the process with SIGABRT.
        """
        self._end_if_forked(0)

        def tell() -> None:
            self._note_end(self.number, dict(transport.sent))
            self._send_to_all(ended=self.number, sent=list(transport.sent.items()))

        self._loop.call_soon_threadsafe(tell)
        try:
            self._all_ended.wait()
            self._loop.call_soon_threadsafe(self._watching.cancel)
            self._thread.join()
        except KeyboardInterrupt:
            self._exit.status = 130
            self._exit.now()

    def except_hook(self, before: Callable[..., Any]) -> Callable[..., None]:
        """A `sys.excepthook` that does what `before` does and then ends all processes.

        An error that is met because another process has failed is not shown as if it were the cause.
        """

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if hasattr(sys, "ps1") or self._all_ended.is_set():
                return before(kind, error, trace)  # an interactive session goes on
            self._end_if_forked(1, lambda: before(kind, error, trace))
            if issubclass(kind, KeyboardInterrupt):
                self._exit.status = 130
            what = failure_text.raised(error)
            self._failures.raised = what, lambda: before(kind, error, trace)
            report = f"{what}. It was at {progress.current}"
            self._loop.call_soon_threadsafe(self._failures.report, self.number, report)
            self._all_ended.wait()  # the thread ends the process

        return hook

    def _end_if_forked(self, status: int, show_error: Callable[[], None] = lambda: None) -> None:
        """Ends a copy of this process that `os.fork` made: it has no such thread, and JAX's exit handlers
        would close there what the run of this process needs."""
        if os.getpid() != self.members[self.number].pid:
            show_error()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    # What follows runs in the thread.

    async def _watch(
        self, meeting: Coroutine[Any, Any, list[Member]], met: concurrent.futures.Future[None]
    ) -> None:
        try:
            self.members = await meeting
        except Exception as error:
            return met.set_exception(error)
        async with asyncio.TaskGroup() as tasks:
            self._failures = Failures(
                self.number, self.members, self.failure_timeout, self.timeout, tasks, self._exit
            )
            met.set_result(None)
            for member in self.members:
                if member.streams is not None:
                    tasks.create_task(self._listen(member))
            tasks.create_task(self._beat())

    def _send_to_all(self, **message: Any) -> None:
        for member in self.members:
            member.send(**message)

    async def _listen(self, member: Member) -> None:
        """Reads what a process says until it closes the connection."""
        while (message := await member.receive()) is not None:
            member.silent = 0
            if "place" in message:
                member.place, member.waits = message["place"], message["waits"]
                member.quiet = message["quiet"]
            elif "ended" in message:
                self._note_end(message["ended"], dict(message["sent"]))
                if self.number == 0:
                    self._send_to_all(**message)
            elif "about" in message:
                self._failures.report(message["about"], message["what"])
            elif "failure" in message:
                self._failures.obey(message["failure"])
        if not self._all_ended.is_set():
            await self._failures.decide(failure_text.died(member))

    async def _beat(self) -> None:
        """Says where this process is, and looks at whether others are silent or keep it waiting."""
        me = self.members[self.number]
        while not self._all_ended.is_set():
            wait = waits.longest()
            me.place = str(progress.current)
            me.waits = (wait.process, wait.what(), wait.is_for_array) if wait else None
            quiet = self._quiet() if self.number == 0 else me.quiet
            self._send_to_all(place=me.place, waits=me.waits, quiet=quiet)
            await asyncio.sleep(BEAT)
            for member in self.members:
                if member.streams is not None:
                    member.silent += 1
                if member.silent * BEAT > self.failure_timeout:
                    await self._failures.decide(failure_text.silent(member, self.failure_timeout))
            me.quiet += 1
            for wait in list(waits.pending.values()):
                self._check(wait)

    def _quiet(self) -> float:
        """How many beats ago an array last came to any process, as far as this one has heard.

        A host may be many calls ahead of its devices: as long as arrays come, what it waits for is not late.
        """
        return min(member.quiet for member in self.members)

    def _check(self, wait: waits.Wait) -> None:
        """Reports a wait that is in vain or takes too long."""
        me = self.members[self.number]
        try:
            if wait.poll():
                me.quiet = 0
        except Exception as error:
            self._failures.report(wait.process, f"did not deliver {wait.what()}: {error}")
        if wait.is_over:
            return
        wait.beats += 1
        sent = self.members[wait.process].sent
        if sent is not None and wait.number > sent.get(self.number, 0):
            wait.beats_since_end += 1
        if wait.beats_since_end > 2:
            self._failures.report(wait.process, f"has ended, and {me} still waits for {wait.what()}")
        elif wait.timed and min(wait.beats, self._quiet()) * BEAT > self.timeout:
            self._failures.report(self.number, STALLED)

    def _note_end(self, number: int, sent: dict[int, int]) -> None:
        self.members[number].sent = sent
        if all(member.sent is not None for member in self.members):
            self._all_ended.set()
