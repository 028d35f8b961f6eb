"""Ctrl-C and SIGTERM stop a run after a step, every process after the same one."""

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
_SIGNAL_POLL = 0.5  # seconds between two looks for a signal in another process
_STEP_POLL = 0.02  # seconds between two looks at the steps of the others
_SAME_SIGNAL = 1.0  # seconds in which signals count as one: systemd sends it, and a launcher forwards it


class Stop:
    """Whether a run must stop: Ctrl-C or SIGTERM came to this process or to another process of the run.

    Inside, the first signal is only recorded; one that comes more than a second later has its usual effect
    (Ctrl-C raises KeyboardInterrupt, SIGTERM ends the process). Every process must make a Stop, and call it
    in every step.

    Once a signal has come, a thread in each process publishes its last step: the run stops one step after the
    furthest of these. No process begins another step before that is known. The threads publish even while a
    process waits for another one in the middle of a step.

    Attributes:
      signal: the signal that came, to any process; None until this process knows of it.

    Raises:
      ValueError: when entered in a thread other than the main one, which alone gets signals.

    Example:
      >>> with Stop() as stop:
      ...     for step in range(3):
      ...         loss = train_step(model, optimizer, batch)
      ...         if stop(step):
      ...             break  # after the same step in every process
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._key = f"mmnnx/stop/{next(_numbers)}"
        self._passed = -1  # the last step after which this process went on
        self._last = sys.maxsize  # the step to stop after, once the processes have agreed on it
        self._lock = threading.Lock()
        self._stopping = False  # from here on this process waits for the agreement
        self._agreed, self._woken, self._over = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._agree, name="mmnnx-stop", daemon=True)
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
            if not self._stopping:
                self._passed = step
                return False
        self._agreed.wait()  # a second signal interrupts this
        return step >= self._last

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._first is None:
            self._first, self.signal = time.monotonic(), signal.Signals(number)
            self._woken.set()
        elif time.monotonic() - self._first > _SAME_SIGNAL:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    # The methods below run in the thread.

    def _agree(self) -> None:
        """Publishes the last step of this process once a signal came; without one, its end."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # without a coordinator all processes end
            while not (self._has_signal() or self._over):
                self._woken.wait(_SIGNAL_POLL)
            if self.signal is None:
                return self._publish("passed", sys.maxsize)
            with self._lock:
                self._stopping, passed = True, self._passed
            self._publish("signal", self.signal)
            self._publish("passed", passed)
            while len(steps := self._published("passed")) < _compat.own_process()[1] and not self._over:
                time.sleep(_STEP_POLL)
            self._last = max(steps) + 1
        self._agreed.set()

    def _has_signal(self) -> bool:
        if self.signal is None:
            self.signal = next(map(signal.Signals, self._published("signal")), None)
        return self.signal is not None

    def _publish(self, what: str, number: int) -> None:
        key = f"{self._key}/{what}/{_compat.own_process()[0]}"
        _compat.key_value_store().key_value_set(key, str(int(number)))

    def _published(self, what: str) -> list[int]:
        found = _compat.key_value_store().key_value_dir_get(f"{self._key}/{what}/")
        return [int(number) for _, number in found]
