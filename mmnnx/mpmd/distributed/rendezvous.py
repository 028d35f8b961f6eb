"""The processes of a run meet at the coordinator's address, before JAX starts there.

Where one of several does not come, JAX ends the others (`LOG(FATAL)`) without a word about which. Therefore
process 0 listens at the coordinator's port first, the others tell it who they are, and when all are there it
stops listening and JAX's own coordinator takes the port. The connections stay: `watchdog` needs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

_RETRY = 0.05  # seconds between two tries to reach process 0


@dataclasses.dataclass
class Member:
    """A process of the run, and the connection to it where there is one.

    Attributes:
      number, host, pid: which it is.
      address: the IP address at which the others reach it; known of this process alone.
      place: where in the run it said it was.
      waits: for whom it said it waits, and for what: (process, words, whether it is an array).
      silent: how many beats ago it was heard of.
      sent: how many arrays it had handed to each process when it ended; None while it runs.
    """

    number: int
    host: str
    pid: int
    address: str = ""
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    place: str = "the start"
    waits: tuple[int, str, bool] | None = None
    silent: int = 0
    sent: dict[int, int] | None = None

    def __str__(self) -> str:
        return f"process {self.number} ({self.host}, pid {self.pid})"

    def is_gone(self) -> bool:
        """Whether it has closed the connection."""
        return self.streams is not None and self.streams[0].at_eof()

    async def hear(self) -> dict[str, Any] | None:
        """What it says next; None when it has closed the connection.

        Raises:
          ValueError: if that is nothing that a process of mmnnx says.
        """
        assert self.streams is not None
        with contextlib.suppress(OSError):
            if line := await self.streams[0].readline():
                return json.loads(line)
        return None

    def tell(self, **words: Any) -> None:
        """Says something to it, as one line of JSON."""
        if self.streams is not None and not self.streams[1].is_closing():
            self.streams[1].write(json.dumps(words).encode() + b"\n")


def myself(number: int) -> Member:
    """This process."""
    return Member(number, socket.gethostname(), os.getpid())


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of "host:port"; an IPv6 address is in brackets.

    Raises:
      ValueError: if it is not of that form.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"{address!r} is not an address of the form host:port, such as 10.0.0.1:1234")
    return host.strip("[]"), int(port)


async def host(bind: str, count: int, timeout: float) -> list[Member]:
    """Process 0 waits for the others.

    Args:
      bind: "host:port" to listen at; "[::]:port" stands for every address of this machine.
      count: how many processes there are.
      timeout: seconds to wait.

    Returns:
      All processes in order, this one first.

    Raises:
      TimeoutError: names the processes that did not come; those that came raise it too.
      ValueError: for processes that were started with another count, or one number twice.
    """
    members = {0: myself(0)}
    if count == 1:
        members[0].address = "127.0.0.1"
        return [members[0]]
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visitor = Member(-1, "", 0, streams=(reader, writer))
        try:
            said = await visitor.hear() or {}
            visitor.number, visitor.host, visitor.pid = said["process"], said["host"], said["pid"]
        except (ValueError, KeyError):  # not one of ours
            return writer.close()
        other = members.get(visitor.number)
        if said["count"] != count:
            told = f"{visitor} was started as one of {said['count']} processes"
            wrong = f"{told}, and {members[0]} as one of {count}"
        elif other is not None and not other.is_gone():
            wrong = f"process {visitor.number} was started twice: {other} and {visitor}"
        else:
            members[visitor.number] = visitor
            if not (done.done() or _missing(members, count)):
                done.set_result(None)
            return None
        visitor.tell(refused=wrong)
        return None if done.done() else done.set_exception(ValueError(wrong))

    where, port = split_address(bind)
    dual = where == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or (":" in where and where != "::") else socket.AF_INET
    listener = socket.create_server(
        ("" if where == "::" else where, port), family=family, dualstack_ipv6=dual, backlog=count
    )
    server = await asyncio.start_server(welcome, sock=listener)
    error: Exception | None = None
    try:
        await asyncio.wait_for(done, timeout)
    except TimeoutError:
        error = TimeoutError(_words(_missing(members, count), count, timeout))
    except ValueError as wrong:
        error = wrong
    finally:
        server.close()
    ordered = [members[n] for n in sorted(members)]
    if error:
        for member in ordered:
            member.tell(refused=str(error), late=isinstance(error, TimeoutError))
        raise error
    ends = [_own_end(member) for member in ordered[1:]]  # its own name may stand for loopback here
    ordered[0].address = next((end for end in ends if not _is_loopback(end)), ends[0])
    for member in ordered:
        member.tell(members=[(m.host, m.pid) for m in ordered], address=ordered[0].address)
    return ordered


async def join(address: str, number: int, count: int, timeout: float) -> list[Member]:
    """Another process reports to process 0 and waits until all are there.

    Returns:
      All processes in order; only the first has a connection.

    Raises:
      TimeoutError: if process 0 or another one did not come.
      ValueError: as `host` does.
    """
    me, (where, port) = myself(number), split_address(address)
    zero = Member(0, where, 0)

    async def report() -> dict[str, Any] | None:
        while True:
            with contextlib.suppress(OSError):
                zero.streams = await asyncio.open_connection(where, port)
                zero.tell(process=number, count=count, host=me.host, pid=me.pid)
                return await zero.hear()
            await asyncio.sleep(_RETRY)

    try:
        said = await asyncio.wait_for(report(), timeout + 2)  # process 0 knows more: it speaks first
    except asyncio.CancelledError:
        if zero.streams:
            zero.streams[1].close()
        raise
    except TimeoutError:
        raise TimeoutError(
            f"process 0 did not come in {timeout:g} s: process {number} found "
            + (f"no answer at {address}" if zero.streams else f"nobody listening at {address}")
            + ", the coordinator's address"
        ) from None
    except ValueError:
        raise ValueError(f"what listens at {address}, the coordinator's address, is not process 0") from None
    if said is None:
        raise ConnectionError(f"process 0 at {address} ended before all processes had come")
    if "refused" in said:
        raise (TimeoutError if said.get("late") else ValueError)(said["refused"])
    members = [Member(n, *who) for n, who in enumerate(said["members"])]
    members[0].streams = zero.streams
    own = _own_end(members[0])
    # Who reaches process 0 by loopback is on its machine, and is reached where that is.
    members[number].address = said["address"] if _is_loopback(own) else own
    return members


def _own_end(member: Member) -> str:
    """The IP address that this process has in its connection to another."""
    assert member.streams is not None
    return member.streams[1].get_extra_info("sockname")[0].removeprefix("::ffff:")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _missing(members: Mapping[int, Member], count: int) -> list[int]:
    return [n for n in range(count) if n not in members or members[n].is_gone()]


def _words(missing: list[int], count: int, timeout: float) -> str:
    *most, last = map(str, missing)
    who = f"processes {', '.join(most)} and {last}" if most else f"process {last}"
    return (
        f"{who} of {count} did not come in {timeout:g} s: start every process, with the same coordinator "
        "address and number of processes, and see what those that are missing printed"
    )
