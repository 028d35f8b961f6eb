"""What processes tell each other around a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import jax

from mmnnx import _compat
from mmnnx.train.checkpoint.errors import CheckpointError

DAY = 24 * 60 * 60 * 1000
"""Milliseconds to wait for the others to have read what is theirs; that one has died is noticed elsewhere."""

_numbers = itertools.count()


def tell_all(text: str) -> list[str]:
    """What each process says; all of them call it, in one order."""
    count, number = jax.process_count(), next(_numbers)
    if count == 1:
        return [text]
    store = _compat.key_value_store()
    store.key_value_set(f"mmnnx/checkpoint/{number}/{jax.process_index()}", text)
    return [store.blocking_key_value_get(f"mmnnx/checkpoint/{number}/{p}", DAY) for p in range(count)]


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Has every process raise a CheckpointError if what it does here fails in one of them."""
    failed: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        failed = error
    said = tell_all(str(failed or ""))
    if failed is not None:
        raise failed
    for process, text in enumerate(said):
        if text:
            raise CheckpointError(f"process {process}: {text}")
