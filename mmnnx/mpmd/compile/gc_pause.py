"""Python's garbage collector, paused while a function is traced, partitioned and compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses cyclic garbage collection.

    To trace a model, to partition it and to lower its fragments makes a million objects that are kept, and
    hardly any garbage. The collector counts what is made, and walks through all of it time and again: for a
    third of the time.

    Example:
      >>> with gc_paused():
      ...     traced = train_step.trace(model, optimizer, batch)
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
