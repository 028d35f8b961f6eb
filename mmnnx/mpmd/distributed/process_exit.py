"""How a process ends when another one has failed: at once, whatever its threads wait for."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn


class ProcessExit:
    """Ends this process without the exit handlers, some of which wait for processes that are gone.

    Attributes:
      status: its exit status.
    """

    def __init__(self) -> None:
        self.status = 1
        self._wanted, self._flushed = threading.Event(), threading.Event()
        # Started now: at exit Python starts no more threads.
        threading.Thread(target=self._flush, name="mmnnx-flush", daemon=True).start()

    def now(self) -> NoReturn:
        self._wanted.set()
        self._flushed.wait(1.0)  # another thread may hold what is to be flushed for ever
        os._exit(self.status)

    def _flush(self) -> None:
        self._wanted.wait()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        self._flushed.set()
