"""Arrays between meshes, in one process. Starting a copy does not wait for the array to be computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from mmnnx import _compat


def sender(source: NamedSharding, target: NamedSharding, dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """The function that copies arrays of one sharding to another mesh.

    Equal layouts are copied shard by shard; a replicated array goes to a mesh of another size from as many
    of its copies as are needed. (`jax.device_put` with another layout would block until the array is ready.)
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return lambda array: jax.device_put(array, target)  # typed PRNG keys
    if source.mesh.devices.shape == target.mesh.devices.shape:
        return lambda array: _compat.copy_to(array, target)
    return lambda array: spread(array, target)


def spread(array: jax.Array, target: NamedSharding) -> jax.Array:
    """A replicated array on another mesh, made of copies of its shards; shards already there are shared."""
    shards = {s.device: s.data for s in array.addressable_shards}
    spare = list(shards.values())
    parts = [
        shards[d] if d in shards else jax.device_put(spare[n % len(spare)], d)
        for n, d in enumerate(target.mesh.devices.flat)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, target, parts, dtype=array.dtype)
