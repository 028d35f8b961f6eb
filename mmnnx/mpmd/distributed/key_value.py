"""Small things that processes tell each other, through the key-value store of `jax.distributed`."""

from __future__ import annotations

import functools
from typing import Any

import jax

from mmnnx import _compat
from mmnnx.mpmd.distributed.progress import waiting

_SLICE = 2.0  # seconds between two looks at whether to go on waiting, at which Ctrl-C gets through


@functools.cache
def store() -> Any:
    """The key-value store. Keys that begin with "mmnnx/" are ours."""
    return _compat.key_value_store()


def say(key: str, value: bytes) -> None:
    """Tells all processes something, once."""
    store().key_value_set_bytes(f"mmnnx/{jax.process_index()}/{key}", value)


def hear(process: int, key: str) -> bytes:
    """What a process says, or has said; it is waited for.

    Where that takes longer than the `timeout` of `mm.initialize`, all processes end.
    """
    with waiting(process, lambda: f"its {key!r}"):
        while True:
            try:
                return store().blocking_key_value_get_bytes(f"mmnnx/{process}/{key}", int(1000 * _SLICE))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
