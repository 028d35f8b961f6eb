"""An array in another layout on its mesh, without waiting for it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding

from mmnnx.mpmd.distributed.processes import absent_array
from mmnnx.mpmd.runtime.collective_order import in_collective_order


def reshard(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same array in another layout on its mesh, by a program there (`jax.device_put` would wait)."""
    return _resharder(sharding)(x) if x.addressable_shards else absent_array(x.shape, x.dtype, sharding)


@functools.lru_cache(maxsize=256)
def _resharder(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    program = jax.jit(lambda x: (x,), out_shardings=(sharding,))
    run = in_collective_order(program, sharding)
    return lambda x: run(x)[0]
