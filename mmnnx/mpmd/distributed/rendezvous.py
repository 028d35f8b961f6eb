"""Rendezvous: the processes of a run meet at the coordinator's address, before JAX starts there.

Where one of several does not come, JAX ends the others (`LOG(FATAL)`) without a word about which. Therefore
process 0 listens at the coordinator's port first, the others tell it who they are, and when all are there it
stops listening and JAX's own coordinator takes the port. The connections stay: `watchdog` needs them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

from mmnnx.mpmd.distributed.member import Member, this_process

_RETRY = 0.05  # seconds between two tries to reach process 0
_LONGEST = 2**24  # bytes of a line: one of them names all hosts, and 900 are more than asyncio's 64 KiB


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of "host:port"; an IPv6 address is in brackets.

    Raises:
      ValueError: if it is not of that form.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
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
    members = {0: this_process(0)}
    if count == 1:
        members[0].address = "127.0.0.1"
        return [members[0]]
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visitor = Member(-1, "", 0, streams=(reader, writer))
        try:
            said = await visitor.receive() or {}
            visitor.number, visitor.host, visitor.pid = said["process"], said["host"], said["pid"]
            other, its_count = members.get(visitor.number), said["count"]
        except (ValueError, KeyError, TypeError):  # not one of ours
            return writer.close()
        if its_count != count:
            told = f"{visitor} was started as one of {its_count} processes"
            wrong = f"{told}, and {members[0]} as one of {count}"
        elif other is not None and not other.is_gone():
            wrong = f"process {visitor.number} was started twice: {other} and {visitor}"
        else:
            members[visitor.number] = visitor
            if not (done.done() or _missing(members, count)):
                done.set_result(None)
            return None
        visitor.send(refused=wrong)
        return None if done.done() else done.set_exception(ValueError(wrong))

    where, port = split_address(bind)
    dual = where == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or (":" in where and where != "::") else socket.AF_INET
    listener = socket.create_server(
        ("" if where == "::" else where, port), family=family, dualstack_ipv6=dual, backlog=count
    )
    server = await asyncio.start_server(welcome, sock=listener, limit=_LONGEST)
    error: Exception | None = None
    try:
        await asyncio.wait_for(done, timeout)
    except TimeoutError:
        error = TimeoutError(_missing_text(_missing(members, count), count, timeout))
    except ValueError as wrong:
        error = wrong
    finally:
        server.close()
    ordered = [members[n] for n in sorted(members)]
    if error:
        for member in ordered:
            member.send(refused=str(error), late=isinstance(error, TimeoutError))
        raise error
    ends = [_own_end(member) for member in ordered[1:]]  # its own name may stand for loopback here
    ordered[0].address = next((end for end in ends if not _is_loopback(end)), ends[0])
    for member in ordered:
        member.send(members=[(m.host, m.pid) for m in ordered], address=ordered[0].address)
    return ordered


async def join(address: str, number: int, count: int, timeout: float) -> list[Member]:
    """Another process reports to process 0 and waits until all are there.

    Returns:
      All processes in order; only the first has a connection.

    Raises:
      TimeoutError: if process 0 or another one did not come.
      ValueError: as `host` does.
    """
    me, (where, port) = this_process(number), split_address(address)
    zero = Member(0, where, 0)
    found = f"nobody listening at {address}"

    async def report() -> dict[str, Any] | None:
        nonlocal found
        while True:
            try:
                zero.streams = await asyncio.open_connection(where, port, limit=_LONGEST)
                found = f"no answer at {address}"
                zero.send(process=number, count=count, host=me.host, pid=me.pid)
                return await zero.receive()
            except socket.gaierror as error:  # it may have no name yet, as where hosts start together
                found = f"no address of {where} ({error.strerror}), of {address}"
            except OSError:
                pass
            await asyncio.sleep(_RETRY)

    try:
        said = await asyncio.wait_for(report(), timeout + 2)  # process 0 knows more: it speaks first
    except asyncio.CancelledError:
        if zero.streams:
            zero.streams[1].close()
        raise
    except TimeoutError:
        raise TimeoutError(
            f"process 0 did not come in {timeout:g} s: process {number} found {found}, the coordinator's "
            "address"
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


def _missing_text(missing: list[int], count: int, timeout: float) -> str:
    *most, last = map(str, missing)
    who = f"processes {', '.join(most)} and {last}" if most else f"process {last}"
    return (
        f"{who} of {count} did not come in {timeout:g} s: start every process, with the same coordinator "
        "address and number of processes, and see what those that are missing printed"
    )
