"""Which processes have the devices of a mesh or of an array."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh, Sharding


@functools.lru_cache(maxsize=4096)
def holders(where: Mesh | Sharding) -> frozenset[int]:
    """The processes that have devices of a mesh, or of a sharding; this one, if they are only described."""
    devices = where.devices.flat if isinstance(where, Mesh) else cast(Any, where.device_set)
    return frozenset(jax.process_index() if is_described(d) else d.process_index for d in devices)


@functools.cache
def is_described(device: jax.Device) -> bool:
    """Whether a device cannot be used: `jax.experimental.topologies` describes it, to compile for it."""
    try:
        return device not in jax.devices(device.platform)
    except RuntimeError:  # there is no such platform here
        return True


def is_here(where: Mesh | Sharding) -> bool:
    """Whether this process has devices of a mesh, or of a sharding."""
    return jax.process_index() in holders(where)


def span_processes(*where: Mesh | Sharding) -> bool:
    """Whether meshes or shardings, taken together, have devices of more than one process."""
    return len(frozenset().union(*map(holders, where))) > 1


def absent_array(shape: Sequence[int], dtype: Any, sharding: Sharding) -> jax.Array:
    """An array of which this process has no part."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)
