"""A process of the run, and the connection to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import socket
from typing import Any


@dataclasses.dataclass
class Member:
    """A process of the run, and the connection to it where there is one.

    Attributes:
      number, host, pid: which it is.
      address: the IP address at which the others reach it; known of this process alone.
      streams: the connection.
      place: where in the run it said it was.
      waits: for whom it said it waits, and for what: (process, words, whether it is an array).
      silent: how many beats ago it was heard of.
      quiet: how many beats ago an array last came to it; process 0 says it of all processes together.
      sent: how many arrays it had sent to each process when it ended; None while it runs.
    """

    number: int
    host: str
    pid: int
    address: str = ""
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    place: str = "the start"
    waits: tuple[int, str, bool] | None = None
    silent: int = 0
    quiet: float = math.inf
    sent: dict[int, int] | None = None

    def __str__(self) -> str:
        return f"process {self.number} ({self.host}, pid {self.pid})"

    def is_gone(self) -> bool:
        """Whether it has closed the connection."""
        return self.streams is not None and self.streams[0].at_eof()

    async def receive(self) -> dict[str, Any] | None:
        """The next message from it; None when it has closed the connection.

        Raises:
          ValueError: if that is not JSON.
        """
        assert self.streams is not None
        with contextlib.suppress(OSError):
            if line := await self.streams[0].readline():
                return json.loads(line)
        return None

    def send(self, **message: Any) -> None:
        """Sends it a message, one line of JSON; nothing where there is no connection."""
        if self.streams is not None and not self.streams[1].is_closing():
            self.streams[1].write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Closes the connection, if there is one: Python would, at exit, when it no longer can."""
        if self.streams is not None:
            self.streams[1].close()


def this_process(number: int) -> Member:
    return Member(number, socket.gethostname(), os.getpid())
