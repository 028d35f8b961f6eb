"""Ctrl-C and SIGTERM end a run after a step, and every process of it after the same one."""

from __future__ import annotations

import itertools
import signal
import sys
import time
from types import FrameType
from typing import Any

import jax

from mmnnx import _compat

_numbers = itertools.count()
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK = 0.5  # seconds between two looks at whether another process was asked
_POLL = 0.02  # seconds between two looks at how far the others are


class Stop:
    """Whether a run was asked to stop, by Ctrl-C or SIGTERM, in this process or in any other of it.

    Inside, the first signal is only noted; a second one does what it would do without (Ctrl-C raises
    KeyboardInterrupt, SIGTERM ends the process). Every process must make it, and ask it in every step. The
    answer costs a look at a flag, and twice a second one at the key-value store of `jax.distributed`.

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
        self._last: int | None = None  # the step to stop after, once the processes have agreed on it
        self._looked = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        if jax.distributed.is_initialized() and self._last is None:
            self._say("last", sys.maxsize)  # whoever is asked from now on runs to the end, as this one has

    def __call__(self, step: int) -> bool:
        """Whether to stop after this step.

        Once a process is asked, every process waits here until all have said how far they are; the furthest
        one's step is the last.

        Args:
          step: its number, which grows from call to call and is the same for the same step everywhere.
        """
        several = jax.distributed.is_initialized()
        if self._last is None and self._is_asked(several):
            self._last = self._agree(step) if several else step
        return self._last is not None and step >= self._last

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _is_asked(self, several: bool) -> bool:
        if self.signal is None and several and time.monotonic() >= self._looked + _LOOK:
            self._looked = time.monotonic()
            for _, number in _compat.key_value_store().key_value_dir_get(f"{self._key}/signal/"):
                self.signal = signal.Signals(int(number))
        return self.signal is not None

    def _agree(self, step: int) -> int:
        assert self.signal is not None
        self._say("signal", self.signal)
        self._say("last", step)
        while True:
            said = _compat.key_value_store().key_value_dir_get(f"{self._key}/last/")
            if len(said) == _compat.own_process()[1]:
                return max(int(last) for _, last in said)
            time.sleep(_POLL)  # where a second signal gets through

    def _say(self, what: str, number: int) -> None:
        key = f"{self._key}/{what}/{_compat.own_process()[0]}"
        _compat.key_value_store().key_value_set(key, str(int(number)))
