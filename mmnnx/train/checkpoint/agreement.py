"""What processes exchange while they save and restore a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import jax

from mmnnx.mpmd.distributed import key_value
from mmnnx.train.checkpoint.errors import CheckpointError

_numbers = itertools.count()


def exchange(text: str) -> list[str]:
    """The texts of all processes, by their numbers. Every process must call it, in the same order."""
    count, number = jax.process_count(), next(_numbers)
    if count == 1:
        return [text]
    key, work = f"checkpoint {number}", "save or restore a checkpoint, as every process must"
    key_value.put(key, text.encode())
    return [key_value.get(p, key, work=work).decode() for p in range(count)]


def leave(error: BaseException) -> None:
    """In place of an `exchange`: tells those who wait in it that this process will not come."""
    number = next(_numbers)
    if jax.process_count() > 1:
        left = f"left its checkpoints with {type(error).__name__}: {error}"
        key_value.put(f"checkpoint {number}", left.encode())


def check_same(doing: str) -> None:
    """Checks that all processes do the same with a checkpoint; every process must call it.

    Raises:
      ValueError: in every process, if they do not.
    """
    found = exchange(doing)
    for process, other in enumerate(found):
        if other != found[0]:
            raise ValueError(
                f"process 0 {found[0]}, and process {process} {other}: every process must save and restore "
                "the same checkpoints, in the same order"
            )


def raise_in_all(error: Exception | None, text: str, key: str) -> None:
    """Raises an error of this process; else an OSError with the text of another's, if one has any.

    Args:
      error, text: what this process has met, if anything, and in words.
      key: names the occasion. Threads of all processes call it once for each key, in any order.
    """
    if jax.process_count() > 1:
        key_value.put(key, text.encode())
        work = "write its part of a checkpoint"
        texts = [key_value.get(p, key, work=work).decode() for p in range(jax.process_count())]
        found = [f"process {process}: {other}" for process, other in enumerate(texts) if other]
        if error is None and found:
            raise OSError(found[0])
    if error is not None:
        raise error


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Inside, a CheckpointError in one process is a CheckpointError in every process."""
    failed: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        failed = error
    errors = exchange(str(failed or ""))
    if failed is not None:
        raise failed
    for process, text in enumerate(errors):
        if text:
            raise CheckpointError(f"process {process}: {text}")
