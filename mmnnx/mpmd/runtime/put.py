"""Arguments and results with another sharding, on other devices or of other processes."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.mpmd.distributed.processes import absent_array, is_here
from mmnnx.mpmd.ir.shardings import mesh_of, transferred
from mmnnx.mpmd.runtime.across_processes import copy_across, from_host
from mmnnx.mpmd.runtime.reshard import reshard


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """An argument or result with another sharding.

    In several processes what has a NamedSharding is one array of them all; of anything else (NumPy, numbers,
    arrays that JAX put on its default device) each process has the same value.
    """
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    here = is_here(sharding)
    if isinstance(x, jax.Array) and x.committed and isinstance(x.sharding, NamedSharding):
        if x.sharding.device_set != sharding.device_set:
            # The caller may use up its array before another process has fetched it: a copy is sent.
            x = jnp.copy(x) if x.addressable_shards else x
            x, target = _before_copy(x, mesh_of(sharding))
            x = copy_across(x, cast(NamedSharding, x.sharding), target)
        return jax.device_put(x, sharding) if here else absent_array(x.shape, x.dtype, sharding)
    aval = jax.typeof(x)
    if not here:
        return absent_array(aval.shape, aval.dtype, sharding)
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        words = put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return from_host(np.asarray(x, aval.dtype), sharding)


def _before_copy(x: jax.Array, mesh: Mesh) -> tuple[jax.Array, NamedSharding]:
    """An array and the sharding of a copy of it on another mesh, shard by shard.

    One that is sharded over a mesh of another shape is replicated first, where it is.
    """
    own = cast(NamedSharding, x.sharding)
    if not x.is_fully_replicated and own.mesh.devices.shape != mesh.devices.shape:
        x = reshard(x, NamedSharding(own.mesh, PartitionSpec()))
    if x.is_fully_replicated:
        return x, NamedSharding(mesh, PartitionSpec())
    return x, transferred(own, mesh)


def own_copy(x: Any) -> Any:
    """The same array in a buffer of its own; what this process has no part of, as it is."""
    if not (isinstance(x, jax.Array) and x.committed):
        return jnp.copy(x)
    if x.is_fully_addressable:  # no program is compiled for its shape, as it would be by jnp.copy
        return jax.device_put(x, x.sharding, may_alias=False)
    return jnp.copy(x) if x.sharding.addressable_devices else x
