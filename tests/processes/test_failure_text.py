"""Who is said to have failed, and in what words; what is waited for longest."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from mmnnx.mpmd.distributed import failure_text, progress, transport, waits
from mmnnx.mpmd.distributed import watchdog as watchdog_module
from mmnnx.mpmd.distributed.failures import STALLED
from mmnnx.mpmd.distributed.member import Member
from mmnnx.mpmd.distributed.watchdog import Watchdog


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
    itself = ""
    if waits_for[about]:
        other, value, _ = waits_for[about]
        itself = f". It waits for process {other} (host{other}, pid {100 + other}): for {value}"
    assert text.endswith(f"It was last heard of at step {about}{itself}")


def test_a_wait_for_work_is_not_timed(monkeypatch):
    """Another process may write or read a checkpoint for longer than an array may take; it may not end."""
    monkeypatch.setattr(waits, "pending", {})
    watchdog = Watchdog(0, failure_timeout=4, timeout=5)
    watchdog.members, reports = members(None, None), []
    watchdog._failures = SimpleNamespace(report=lambda about, what: reports.append((about, what)))
    with waits.waiting(1, lambda: "it to write a file", timed=False):
        (wait,) = waits.pending.values()
        for _ in range(100):
            watchdog._check(wait)
        assert not reports
        watchdog.members[1].sent = {}
        for _ in range(3):
            watchdog._check(wait)
    ended = "has ended, and process 0 (host0, pid 100) still waits for it to write a file"
    assert reports == [(1, ended)]
    reports.clear()
    watchdog.members[1].sent = None
    with waits.waiting(1, lambda: "its 'a'"):
        (wait,) = waits.pending.values()
        for _ in range(21):
            watchdog._check(wait)
    assert reports == [(0, STALLED)]


class Coming:
    """Something like an array that comes after so many looks at the clock."""

    def __init__(self, clock, beat, taken_over=False):
        self.clock, self.beat, self.taken_over, self.aval = clock, beat, taken_over, jnp.ones(3).aval

    def is_ready(self):
        return self.clock["beat"] >= self.beat

    def is_deleted(self):
        return self.taken_over

    def block_until_ready(self):
        assert self.is_ready()


def beats_until_stalled(monkeypatch, ask, heard=lambda watchdog, beat: None):
    """After how many beats process 1 of three reports that it waits too long, with a timeout of 20 beats.

    Args:
      ask: asks for what the process waits for, given the clock that arrays come by.
      heard: what is heard of process 0 at a beat.
    """
    clock = {"beat": 0}
    monkeypatch.setattr(waits, "pending", {})
    monkeypatch.setattr(watchdog_module, "BEAT", 1e-4)
    watchdog = Watchdog(1, failure_timeout=4, timeout=20e-4)
    watchdog.members = members(None, None, None)

    def beat(**_):
        clock["beat"] += 1
        heard(watchdog, clock["beat"])
        if clock["beat"] > 500:
            watchdog._all_ended.set()

    def report(about, what):
        assert (about, what) == (1, STALLED)
        watchdog._all_ended.set()

    watchdog._send_to_all, watchdog._failures = beat, SimpleNamespace(report=report)
    with contextlib.ExitStack() as asked:
        ask(clock, asked)
        asyncio.run(watchdog._beat())
    return clock["beat"]


def ask_in_calls(monkeypatch, *arrays, first=0):
    """Asks process 0 for an array in each of several calls of a program, which are dispatched at once."""
    monkeypatch.setattr(transport, "_received", Counter())
    for call, array in enumerate(arrays, first):
        monkeypatch.setattr(progress.current, "call", (1, call))
        transport._expect(0, [array])


def test_a_wait_is_late_when_nothing_has_come_for_the_timeout(monkeypatch):
    """However far the host is ahead: here it asks for the arrays of three calls, of 15 beats each."""

    def ask(clock, _):
        ask_in_calls(monkeypatch, *(Coming(clock, beat) for beat in (15, 30, 10**9)))

    assert 50 <= beats_until_stalled(monkeypatch, ask) <= 52


def test_an_array_whose_buffer_a_result_has_taken_over_tells_nothing(monkeypatch):
    def ask(clock, _):
        ask_in_calls(monkeypatch, Coming(clock, 0, taken_over=True), Coming(clock, 10**9))

    assert 20 <= beats_until_stalled(monkeypatch, ask) <= 22


def test_a_value_is_not_late_while_arrays_come(monkeypatch):
    """As where a loss is fetched that the last of many calls computes. Process 0 says what comes to all."""

    def ask(clock, asked):
        asked.enter_context(waits.waiting(2, lambda: "its 'fetch/0/0'"))
        ask_in_calls(monkeypatch, Coming(clock, 15))

    def heard(watchdog, beat):  # to one came an array at each of the first 30 beats
        watchdog.members[0].quiet = max(0, beat - 30)

    assert 35 <= beats_until_stalled(monkeypatch, ask) <= 37
    assert 50 <= beats_until_stalled(monkeypatch, ask, heard) <= 52


def test_arrays_that_have_come_are_forgotten_by_the_next_call(monkeypatch):
    monkeypatch.setattr(waits, "pending", {})
    clock = {"beat": 1}
    ask_in_calls(monkeypatch, Coming(clock, 0), Coming(clock, 9))
    for wait in waits.pending.values():
        wait.poll()
    ask_in_calls(monkeypatch, Coming(clock, 9), first=2)
    assert [call for _, call in waits.pending] == [(1, 1), (1, 2)]


def test_a_forked_copy_of_a_process_ends_without_the_others(monkeypatch):
    """It has no thread that would tell it that all have ended."""

    def end(status):
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    watchdog, shown = Watchdog(0, failure_timeout=4, timeout=5), []
    watchdog.members = [Member(0, "host0", os.getppid())]  # as who forked this process noted itself
    hook = watchdog.except_hook(lambda *raised: shown.append(raised))
    with pytest.raises(SystemExit, match="1"):
        hook(ValueError, ValueError("x"), None)
    assert len(shown) == 1
    watchdog._all_ended.set()  # else it would wait for ever, if it waited
    with pytest.raises(SystemExit, match="0"):
        watchdog.leave()


@pytest.mark.parametrize(
    "error, line",
    [
        (KeyError(), "raised KeyError"),
        (ValueError("one\ntwo"), "raised ValueError: one"),
        (ValueError("x" * 999), f"raised ValueError: {'x' * 300}"),
        (RuntimeError("INTERNAL: Traceback (most recent call last):"), "raised RuntimeError: INTERNAL: "),
    ],
)
def test_what_was_raised_in_one_line(error, line):
    assert failure_text.raised(error) == line


def test_a_callback_that_raises_gives_its_reason():
    def callback(x):
        raise OSError("the disk is full\nas ever")

    call = jax.jit(lambda x: jax.pure_callback(callback, jax.ShapeDtypeStruct((), jnp.float32), x))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        call(jnp.float32(1)).block_until_ready()
    assert failure_text.raised(caught.value).endswith(": OSError: the disk is full")


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
