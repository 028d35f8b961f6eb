"""What one process does for all, such as writing a file, while the others wait."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import jax

from mmnnx.mpmd.distributed import key_value

_numbers = itertools.count()


@contextlib.contextmanager
def done_by_first(work: str) -> Iterator[bool]:
    """Process 0 does what is inside; the others leave it when that is done, however long it takes.

    All enter, in the same order.

    Args:
      work: what it does, in words, for messages.

    Yields:
      whether this is process 0.

    Raises:
      OSError: in the other processes, if process 0 raises anything.

    Example:
      >>> with done_by_first("write a note") as first:
      ...     if first:
      ...         print("one process writes it")
      one process writes it
    """
    if jax.process_count() == 1:
        yield True
        return
    key, first = f"{work} {next(_numbers)}", jax.process_index() == 0
    failed = ""
    try:
        yield first
    except BaseException as error:
        failed = str(error) or type(error).__name__
        raise
    finally:
        if first:
            key_value.put(key, failed.encode())
    if not first and (failed := key_value.get(0, key, work=work).decode()):
        raise OSError(f"process 0: {failed}")
