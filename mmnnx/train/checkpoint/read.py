"""Reads arrays from a checkpoint: each device reads the part that it will hold."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils.epath import Path as FilePath
from jax.sharding import Sharding

from mmnnx import _compat
from mmnnx.sharding.divided_array import DividedArray
from mmnnx.sharding.held_parts import Bounds, array_of_parts, held_parts
from mmnnx.sharding.path_filter import path_text
from mmnnx.train.checkpoint.errors import DamagedError, Path
from mmnnx.train.checkpoint.keys import is_key, key_impl, stored_as
from mmnnx.train.checkpoint.paths import kvstore

IN_FLIGHT = 32 * 2**20
"""At most so many bytes are being read at one time by one process."""


@dataclass(frozen=True)
class Target:
    """An array to restore.

    Attributes:
      like: an array or number of its shape and dtype, concrete or abstract.
      sharding: where it goes; None for a NumPy array or a number.
      weak_type: whether the saved array had a weak type, as `jnp.array(0.5)` has.
    """

    like: Any
    sharding: Sharding | None
    weak_type: bool = False


@dataclass(frozen=True)
class Source:
    """Where the values of one array are stored.

    Attributes:
      pieces: (path, row, count): `count` rows of a stored array, beginning at `row`; all of it if `row` is
        None.
      stacked: whether the rows of all pieces are stacked to the array; else it is one row, or all of one
        stored array.
    """

    pieces: tuple[tuple[Path, int | None, int], ...]
    stacked: bool = False


def open_arrays(state: FilePath, paths: Iterable[Path]) -> dict[Path, Any]:
    """Opens stored arrays in the folder `state`; reads only their metadata.

    Raises:
      DamagedError: for an array that cannot be read, or is missing.
    """
    context = ts.Context()
    opening = {
        path: ts.open(
            {
                "driver": "zarr3",
                "kvstore": {
                    "driver": "ocdbt",
                    "base": kvstore(state),
                    "path": ".".join(path) + "/",
                },
                "fill_missing_data_reads": False,
            },
            open=True,
            read=True,
            context=context,
        )
        for path in paths
    }
    return {path: _result(state, path, store) for path, store in opening.items()}


def read_arrays(
    state: FilePath, stores: Mapping[Path, Any], wanted: Mapping[Path, tuple[Target, Source]]
) -> dict[Path, Any]:
    """Reads arrays to where they go; only the parts that this process holds pass through its host memory.

    Raises:
      DamagedError: for an array that cannot be read, or whose checksum is wrong.
    """
    found: dict[Path, Any] = {}
    reading: deque[tuple[Path, dict[Bounds, list[tuple[Path, ts.Future]]], int]] = deque()
    flying = 0
    for path, (target, source) in wanted.items():
        bounds = _bounds(target)
        reading.append((path, {b: _start(stores, source, b) for b in bounds}, _nbytes(target, bounds)))
        flying += reading[-1][-1]
        while flying > IN_FLIGHT and len(reading) > 1:
            flying -= _finish(state, wanted, reading.popleft(), found)
    while reading:
        _finish(state, wanted, reading.popleft(), found)
    return found


def _bounds(target: Target) -> set[Bounds]:
    """The parts of a target that this process holds."""
    shape = np.shape(target.like)
    if target.sharding is None:
        return {tuple((0, size) for size in shape)}
    return set(held_parts(target.sharding, shape).values())


def _nbytes(target: Target, parts: Iterable[Bounds]) -> int:
    shape, dtype = stored_as(target.like)
    per_element = prod(shape[np.ndim(target.like) :]) * dtype.itemsize  # several numbers for a PRNG key
    return sum(prod(stop - start for start, stop in part) for part in parts) * per_element


def _start(stores: Mapping[Path, Any], source: Source, part: Bounds) -> list[tuple[Path, ts.Future]]:
    """Starts reading the pieces that a part of an array consists of."""
    inner = tuple(slice(*b) for b in part)
    if not source.stacked:
        ((path, row, _),) = source.pieces
        return [(path, _read(stores[path], inner if row is None else (row, *inner)))]
    (low, high), inner = part[0], inner[1:]
    reads, above = [], 0
    for path, row, count in source.pieces:
        first, last = max(low, above), min(high, above + count)
        if first < last:
            store, row = (stores[path][ts.newaxis], 0) if row is None else (stores[path], row)
            rows = slice(row + first - above, row + last - above)
            reads.append((path, _read(store, (rows, *inner))))
        above += count
    return reads


def _read(store: Any, region: tuple[Any, ...]) -> ts.Future:
    return (store[region] if region else store).read()


def _finish(
    state: FilePath,
    wanted: Mapping[Path, tuple[Target, Source]],
    reading: tuple[Path, dict[Bounds, list[tuple[Path, ts.Future]]], int],
    found: dict[Path, Any],
) -> int:
    """Waits for one array and places it; returns its bytes."""
    path, parts, size = reading
    hosts = {}
    for part, reads in parts.items():
        pieces = [_result(state, name, read) for name, read in reads]
        hosts[part] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    found[path] = _place(wanted[path][0], hosts)
    return size


def _place(target: Target, hosts: Mapping[Bounds, np.ndarray]) -> Any:
    """An array of the parts in host memory, as `target` says."""
    like, sharding = target.like, target.sharding
    if sharding is None:
        (host,) = hosts.values()
        if isinstance(like, np.generic):
            return host[()]
        return host if isinstance(like, np.ndarray) else type(like)(host.item())
    wrap: Any = lambda data: data
    typed: Any = _compat.weakly_typed if target.weak_type else wrap
    if is_key(like.dtype):
        wrap = functools.partial(jax.random.wrap_key_data, impl=key_impl(like.dtype))
    if isinstance(like, jax.Array) and not (like.committed or isinstance(like, DividedArray)):
        (host,) = hosts.values()
        return typed(wrap(jnp.asarray(host)))
    found = array_of_parts(like.shape, like.dtype, sharding, hosts, wrap)
    if isinstance(found, DividedArray):
        return DividedArray([typed(piece) for piece in found.pieces], found.sharding)
    return typed(found)


def _result(state: FilePath, path: Path, future: ts.Future) -> Any:
    try:
        return future.result()
    except Exception as error:  # tensorstore raises whatever its status maps to
        reason = str(error).partition(" [tensorstore_spec=")[0]  # the spec is long and says nothing new
        raise DamagedError(f"{path_text(path)} in {state} cannot be read: {reason}") from error
