"""The key-value store of `jax.distributed`: small values that one process puts and all can get."""

from __future__ import annotations

import functools
from typing import Any

import jax

from mmnnx import _compat
from mmnnx.mpmd.distributed.waits import waiting

_SLICE = 2.0  # seconds between two looks at whether to go on waiting, at which Ctrl-C gets through
_PIECE = 2**20
"""Bytes of the largest piece: a get begins anew after each slice, and a few MB a second may come through."""


@functools.cache
def store() -> Any:
    """The store itself. Keys that begin with "mmnnx/" are ours."""
    return _compat.key_value_store()


def put(key: str, value: bytes) -> None:
    """Puts a value of this process, once. A large one is put in pieces, the first of which says how many."""
    pieces = [value[start : start + _PIECE] for start in range(0, len(value), _PIECE)] or [b""]
    names = [key, *(f"{key}/{n}" for n in range(1, len(pieces)))]
    pieces[0] = len(pieces).to_bytes(4) + pieces[0]
    for name, piece in zip(names, pieces):
        store().key_value_set_bytes(f"mmnnx/{jax.process_index()}/{name}", piece)


def get(process: int, key: str, *, work: str = "") -> bytes:
    """The value that a process puts, or has put; it is waited for.

    Where a piece of it takes longer than the `timeout` of `mm.initialize`, all processes end.

    Args:
      process: its number.
      key: the name of the value.
      work: what the process does before it puts it, in words ("write a file"), for as long as it takes.
    """
    what = f"it to {work}" if work else f"its {key!r}"
    first = _get(process, key, what, timed=not work)
    names = [f"{key}/{n}" for n in range(1, int.from_bytes(first[:4]))]
    return b"".join([first[4:], *(_get(process, name, what, timed=True) for name in names)])


def _get(process: int, key: str, what: str, timed: bool) -> bytes:
    with waiting(process, lambda: what, timed=timed):
        while True:
            try:
                return store().blocking_key_value_get_bytes(f"mmnnx/{process}/{key}", int(1000 * _SLICE))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
