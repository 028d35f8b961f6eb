"""What is said about a failure. Every sentence begins with the process that it is about."""

from __future__ import annotations

from collections.abc import Sequence

from mmnnx.mpmd.distributed.member import Member
from mmnnx.printable import printable

TRACEBACK = "Traceback (most recent call last):"


def died(member: Member) -> str:
    return f"{member} died: its connection closed. It was last heard of at {member.place}"


def silent(member: Member, failure_timeout: float) -> str:
    return (
        f"{member} has not been heard of for {failure_timeout:g} s: it was stopped, or its host or the "
        f"network is down. It was last heard of at {member.place}"
    )


def raised(error: BaseException) -> str:
    """What a process raised: the first line of the message, or the reason at the end of a traceback in it."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[0]
    if line.endswith(TRACEBACK):
        frames = [n for n, text in enumerate(lines) if text.startswith("  ")]
        line = line.removesuffix(TRACEBACK) + "".join(lines[max(frames, default=0) + 1 :][:1])
    return f"raised {type(error).__name__}{': ' if line else ''}{line[:300]}"


def stalled(members: Sequence[Member], number: int, timeout: float) -> str:
    """Who keeps a process waiting: the last of those that each wait for an array of the next.

    What is in the key-value store is waited for by programs that are dispatched already: they keep nobody
    waiting.
    """
    waiter, other = members[number], members[number]
    seen: set[int] = set()
    while other.waits and other.number not in seen and (other.waits[2] or not seen):
        seen.add(other.number)
        waiter, other = other, members[other.waits[0]]
    what = waiter.waits[1] if waiter.waits else "it"
    itself = f". It waits for {members[other.waits[0]]}: for {other.waits[1]}" if other.waits else ""
    return (
        f"{other} has not sent {what}, for which {waiter} has waited {timeout:g} s, the `timeout` of "
        f"mm.initialize. It was last heard of at {other.place}{itself}"
    )


def is_about(failure: str, member: Member) -> bool:
    return failure.startswith(str(member))


def ending(failure: str, me: Member, raised: str | None, place: str) -> str:
    """What a process prints when it ends.

    Args:
      failure: what happened.
      me: this process.
      raised: an error that ended its script, in words.
      place: where in the run it is.
    """
    if is_about(failure, me):
        end = "All processes end"
    elif raised:
        what = "raised the same" if raised in failure else f"then {raised}"
        end = f"P{str(me)[1:]} {what}, and ends too, at {place}"
    else:
        end = f"P{str(me)[1:]} ends too, at {place}"
    return printable(f"mmnnx: {failure}. {end}") + "\n"
