"""The key-value store of `jax.distributed`: small values that one process puts and all can get."""

from __future__ import annotations

import functools
from typing import Any

import jax

from mmnnx import _compat
from mmnnx.mpmd.distributed.waits import waiting

_SLICE = 2.0  # seconds between two looks at whether to go on waiting, at which Ctrl-C gets through


@functools.cache
def store() -> Any:
    """The store itself. Keys that begin with "mmnnx/" are ours."""
    return _compat.key_value_store()


def put(key: str, value: bytes) -> None:
    """Puts a value of this process, once."""
    store().key_value_set_bytes(f"mmnnx/{jax.process_index()}/{key}", value)


def get(process: int, key: str) -> bytes:
    """The value that a process puts, or has put; it is waited for.

    Where that takes longer than the `timeout` of `mm.initialize`, all processes end.
    """
    with waiting(process, lambda: f"its {key!r}"):
        while True:
            try:
                return store().blocking_key_value_get_bytes(f"mmnnx/{process}/{key}", int(1000 * _SLICE))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
