"""The part of an array that each device holds, and arrays made of parts in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from mmnnx.sharding.divided_array import DividedArray, PiecewiseSharding
from mmnnx.sharding.division import starts

Bounds = tuple[tuple[int, int], ...]
"""A part of an array: where it starts and stops in each dimension."""


def held_parts(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Bounds]:
    """The part of an array that each device of this process holds; of one in pieces, by (piece, device)."""
    if isinstance(sharding, PiecewiseSharding):
        dim, pieces = sharding.dim, sharding.pieces(shape)
        firsts = starts([piece[dim] for _, piece in pieces])
        return {
            (n, device): (*part[:dim], (first + part[dim][0], first + part[dim][1]), *part[dim + 1 :])
            for n, ((own, piece), first) in enumerate(zip(pieces, firsts))
            for device, part in held_parts(own, piece).items()
        }
    regions = sharding.addressable_devices_indices_map(shape)
    return {
        device: tuple(s.indices(size)[:2] for s, size in zip(region or (), shape))
        for device, region in regions.items()
    }


def array_of_parts(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: Sharding,
    hosts: Mapping[Bounds, np.ndarray],
    wrap: Callable[[jax.Array], jax.Array] = lambda data: data,
) -> jax.Array:
    """An array of its parts in host memory, each put on the devices that hold it.

    Args:
      shape, dtype: of the array.
      sharding: where it goes.
      hosts: the values of `held_parts`, and what is in them.
      wrap: what is made of the data on each device: PRNG keys, for instance.
    """
    kind = sharding.memory_kind
    put = lambda part, device: wrap(
        jax.device_put(hosts[part], SingleDeviceSharding(device, memory_kind=kind))
    )
    held = held_parts(sharding, shape)
    if isinstance(sharding, PiecewiseSharding):
        rows: list[list[jax.Array]] = [[] for _ in sharding.pieces(shape)]
        for (n, device), part in held.items():
            rows[n].append(put(part, device))
        pieces = [
            jax.make_array_from_single_device_arrays(piece, own, row, dtype=dtype)
            for (own, piece), row in zip(sharding.pieces(shape), rows)
        ]
        return DividedArray(pieces, sharding)
    parts = [put(part, device) for device, part in held.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)


def held_row(x: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """`x[index]` in host memory, from the devices that hold it: no device holds more than before.

    Args:
      x: an array all of whose shards are in this process.
      index: into its first dimensions.
    """
    if isinstance(x, DividedArray) and x.dim < len(index):
        at = index[x.dim]
        for piece in x.pieces:
            if at < piece.shape[x.dim]:
                return held_row(piece, (*index[: x.dim], at, *index[x.dim + 1 :]))
            at -= piece.shape[x.dim]
    if isinstance(x, DividedArray):
        return np.concatenate([held_row(piece, index) for piece in x.pieces], axis=x.dim - len(index))
    out = np.empty(x.shape[len(index) :], x.dtype)
    for shard in x.addressable_shards:
        bounds = [s.indices(size)[:2] for s, size in zip(shard.index, x.shape)]
        if shard.replica_id == 0 and all(a <= n < b for n, (a, b) in zip(index, bounds)):
            data = shard.data
            for n, (a, _) in zip(index, bounds):
                data = jax.lax.dynamic_index_in_dim(data, n - a, keepdims=False)
            out[tuple(slice(*b) for b in bounds[len(index) :])] = data
    return out
