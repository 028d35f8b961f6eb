"""Who is said to have failed, and in what words; what is waited for longest."""

from __future__ import annotations

import pytest

from mmnnx.mpmd.distributed import failure_text, waits
from mmnnx.mpmd.distributed.member import Member


def members(*waits_for):
    """Processes that wait for an array of another, or for a value of the key-value store, or for nothing."""
    found = [Member(n, f"host{n}", 100 + n, place=f"step {n}") for n in range(len(waits_for))]
    for member, waits_ in zip(found, waits_for):
        member.waits = waits_
    return found


@pytest.mark.parametrize(
    "waits_for, about, waiter",
    [
        ([(1, "x", True), None], 1, 0),
        ([(1, "x", True), (2, "y", True), None], 2, 1),  # the last of a chain
        ([(1, "x", True), (2, "y", False), None], 1, 0),  # which values of the store do not continue
        ([(1, "x", False), None], 1, 0),  # but may begin
        ([(1, "x", True), (0, "y", True)], 0, 1),  # a circle is gone through once
    ],
)
def test_who_keeps_a_process_waiting(waits_for, about, waiter):
    text = failure_text.stalled(members(*waits_for), 0, 5)
    what = waits_for[waiter][1]
    assert text.startswith(f"process {about} (host{about}, pid {100 + about}) has not sent {what}, ")
    assert f"for which process {waiter} (host{waiter}, pid {100 + waiter}) has waited 5 s" in text
    assert text.endswith(f"It was last heard of at step {about}")


def test_what_a_process_says_when_it_ends():
    zero, one = members(None, None)
    failure = failure_text.died(one)
    assert failure_text.ending(failure, one, None, "a") == f"mmnnx: {failure}. All processes end\n"
    assert failure_text.ending(failure, zero, None, "a").endswith(
        "Process 0 (host0, pid 100) ends too, at a\n"
    )
    assert ") then raised E, and ends too, at a" in failure_text.ending(failure, zero, "raised E", "a")
    both = f"{one} raised E. It was at b"
    assert ") raised the same, and ends too, at a" in failure_text.ending(both, zero, "raised E", "a")


def test_an_array_is_waited_for_before_a_value_of_the_store(monkeypatch):
    monkeypatch.setattr(waits, "pending", {})
    assert waits.longest() is None
    with waits.waiting(1, lambda: "a value"):
        (value,) = waits.pending.values()
        assert waits.longest() is None  # for less than a beat
        value.beats = 9
        assert waits.longest() is value
        waits.pending["array", 2] = waits.Wait(2, lambda: "an array", 1)
        assert waits.longest() is value  # the array has come
        waits.pending["array", 2] = array = waits.Wait(2, lambda: "an array", 2, object(), beats=1)
        assert waits.longest() is array
    assert list(waits.pending.values()) == [array]
