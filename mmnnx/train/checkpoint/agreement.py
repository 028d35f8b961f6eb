"""What processes exchange while they save and restore a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import jax

from mmnnx import _compat
from mmnnx.train.checkpoint.errors import CheckpointError

DAY = 24 * 60 * 60 * 1000
"""Milliseconds to wait for the others to read their shards; a process that dies is noticed elsewhere."""

_numbers = itertools.count()


def exchange(text: str) -> list[str]:
    """The texts of all processes, by their numbers. Every process must call it, in the same order."""
    count, number = jax.process_count(), next(_numbers)
    if count == 1:
        return [text]
    store = _compat.key_value_store()
    store.key_value_set(f"mmnnx/checkpoint/{number}/{jax.process_index()}", text)
    return [store.blocking_key_value_get(f"mmnnx/checkpoint/{number}/{p}", DAY) for p in range(count)]


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
