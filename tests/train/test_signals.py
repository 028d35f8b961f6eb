"""Ctrl-C and SIGTERM end a run after a step, every process of it after the same one."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest

from mmnnx.train.signals import Stop
from tests.processes.harness import finish, start


@pytest.fixture(autouse=True)
def ctrl_c():
    """Raises KeyboardInterrupt, also where a shell started the tests in the background and has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_step_is_finished_first(number):
    with Stop() as stop:
        assert not stop(0) and stop.signal is None
        send(number)
        assert stop.signal is number  # noted, and nothing was raised
        assert stop(1)
        assert stop(2)


def test_nothing_is_caught_outside():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Stop():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, as `Stop` reads it."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_second_signal_interrupts_at_once(clock):
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        send(signal.SIGINT)
        assert stop.signal is signal.SIGINT
        clock[0] += 1.1
        send(signal.SIGINT)


def test_a_signal_that_comes_twice_is_one(clock):
    """systemd sends SIGTERM to every process of a service, and the launcher passes its own on."""
    with Stop() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            send(number)
            clock[0] += 0.3
        assert stop.signal is signal.SIGTERM and stop(1)
        clock[0] += 0.3
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_thread_gets_no_signals_and_says_so():
    errors = []

    def enter():
        try:
            Stop().__enter__()
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


@pytest.mark.slow
def test_all_processes_stop_after_the_same_step():
    """Those that were not asked too, though each is elsewhere; one that has ended holds nobody up."""
    results = finish(start("stop.py", 3, 1), timeout=60)
    steps = []
    for status, printed in results:
        assert status == 0, printed
        steps.append(re.findall(r"SIG\w+ after step \d+", printed))
    assert len(steps[0]) == 1 and steps[0][0].startswith("SIGTERM after")
    assert steps[0] == steps[1] == steps[2]
    assert all("second run: to the end" in printed for _, printed in results)
