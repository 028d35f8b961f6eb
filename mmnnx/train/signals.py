"""Ctrl-C and SIGTERM end a run after a step, and every process of it after the same one."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import jax

from mmnnx import _compat

_numbers = itertools.count()
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK = 0.5  # seconds between two looks at whether another process was asked
_POLL = 0.02  # seconds between two looks at how far the others are
_ONCE = 1.0  # seconds in which signals are one: systemd asks every process, and a launcher passes it on


class Stop:
    """Whether a run was asked to stop, by Ctrl-C or SIGTERM, in this process or in any other of it.

    Inside, the first signal is only noted; one that comes more than a second later does what it would do
    without (Ctrl-C raises KeyboardInterrupt, SIGTERM ends the process). Every process must make it, and ask
    it in every step.

    Once a process is asked, a thread in each says how far it is: the step after that of the furthest one is
    the last. No process takes another step before that is known, and none has to for it to be: one that
    waits for another in the middle of a step is spoken for by its thread.

    Attributes:
      signal: what asked, in whichever process; None until this process knows of it.

    Raises:
      ValueError: when entered in a thread other than the main one, which alone gets signals.

    Example:
      >>> with Stop() as stop:
      ...     for step in range(steps):
      ...         train_step(model, optimizer, batch)
      ...         if stop(step):
      ...             break  # after the same step in every process
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._key = f"mmnnx/stop/{next(_numbers)}"
        self._passed = -1  # the last step after which this process went on
        self._last = sys.maxsize  # the step to stop after, once the processes have agreed on it
        self._lock = threading.Lock()
        self._asked = False  # from here on this process goes no further than the others
        self._agreed, self._woken, self._over = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._speak, name="mmnnx-stop", daemon=True)
        self._before: dict[signal.Signals, Any] = {}
        self._first: float | None = None  # when a signal came to this process

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        if jax.distributed.is_initialized():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self._over = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()

    def __call__(self, step: int) -> bool:
        """Whether to stop after this step.

        Args:
          step: its number, from 0 or more, which grows from call to call and is the same for the same step
            everywhere.
        """
        if not jax.distributed.is_initialized():
            return self.signal is not None
        with self._lock:
            if not self._asked:
                self._passed = step
                return False
        self._agreed.wait()  # where a second signal gets through
        return step >= self._last

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._first is None:
            self._first, self.signal = time.monotonic(), signal.Signals(number)
            self._woken.set()
        elif time.monotonic() - self._first > _ONCE:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    # What follows runs in the thread.

    def _speak(self) -> None:
        """Says how far this process is once one is asked, or at its end that it needs no waiting for."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # without a coordinator all processes end
            while not (self._is_asked() or self._over):
                self._woken.wait(_LOOK)
            if self.signal is None:
                return self._say("passed", sys.maxsize)
            with self._lock:
                self._asked, passed = True, self._passed
            self._say("signal", self.signal)
            self._say("passed", passed)
            while len(said := self._said("passed")) < _compat.own_process()[1] and not self._over:
                time.sleep(_POLL)
            self._last = max(said) + 1
        self._agreed.set()

    def _is_asked(self) -> bool:
        if self.signal is None:
            self.signal = next(map(signal.Signals, self._said("signal")), None)
        return self.signal is not None

    def _say(self, what: str, number: int) -> None:
        key = f"{self._key}/{what}/{_compat.own_process()[0]}"
        _compat.key_value_store().key_value_set(key, str(int(number)))

    def _said(self, what: str) -> list[int]:
        found = _compat.key_value_store().key_value_dir_get(f"{self._key}/{what}/")
        return [int(number) for _, number in found]
