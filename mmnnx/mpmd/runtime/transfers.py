"""Arrays between meshes, in one process and between processes. To start a copy waits for nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mmnnx import _compat
from mmnnx.mpmd.distributed import transport
from mmnnx.mpmd.distributed.processes import absent_array, holders, is_here
from mmnnx.mpmd.ir.shardings import mesh_of, same_shape, transferred
from mmnnx.mpmd.runtime.collective_order import taking_turns

Way = tuple[NamedSharding, NamedSharding, Any]  # (sharding, that of the copy on another mesh, type)


def sender(ways: Sequence[Way]) -> Callable[..., Any]:
    """The function that copies arrays of one mesh to another, in one go where it can.

    Equal layouts are copied shard by shard; to a mesh of another shape goes a replicated array, from as many
    of its copies as are needed. What has another layout gets it first, by a program where it is.
    (`jax.device_put` with another layout would block until the array is ready.)

    It takes and returns as many arrays as there are `ways`. Between processes what the giver's returns means
    nothing, and the taker's does not look at what it is given.
    """
    together = [n for n, way in enumerate(ways) if _goes_with_others(*way)]
    if len(together) == len(ways):
        return _batch(ways)
    batch = _batch([ways[n] for n in together]) if together else lambda: ()
    alone = {n: _one(*way) for n, way in enumerate(ways) if n not in together}

    def send(*arrays: jax.Array) -> Sequence[Any]:
        made = dict(zip(together, batch(*(arrays[n] for n in together)) or ()))  # the giver has none
        return [alone[n](array) if n in alone else made.get(n) for n, array in enumerate(arrays)]

    return send


def _goes_with_others(source: NamedSharding, target: NamedSharding, aval: Any) -> bool:
    """Whether arrays of a mesh are copied by one call that takes several."""
    if not same_shape(mesh_of(source), mesh_of(target)) or _is_key(aval.dtype) or 0 in aval.shape:
        return False
    if not source.is_equivalent_to(transferred(target, mesh_of(source)), len(aval.shape)):
        return False
    givers, takers = holders(source), holders(target)
    if givers | takers == {jax.process_index()}:
        return True
    return len(givers) == len(takers) == 1 and not transport.goes_by_device_put(source, target)


def _batch(ways: Sequence[Way]) -> Callable[..., Any]:
    """What copies arrays that go with others."""
    targets = [target for _, target, _ in ways]
    (giver,), (taker,) = (holders(s) for s in ways[0][:2])
    if giver == taker:
        return lambda *arrays: _compat.copy_to(arrays, targets)
    if giver == jax.process_index():
        return lambda *arrays: transport.send(taker, arrays)
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=t) for _, t, aval in ways]
    return lambda *_: transport.receive(giver, types)


def _one(source: NamedSharding, target: NamedSharding, aval: Any) -> Callable[[jax.Array], Any]:
    """What copies arrays one by one."""
    alike = same_shape(mesh_of(source), mesh_of(target))
    if not alike and not target.is_fully_replicated:
        send = _one(source, NamedSharding(target.mesh, PartitionSpec()), aval)
        return lambda array: _resharded(send(array), target)
    leaves = transferred(target, mesh_of(source)) if alike else NamedSharding(source.mesh, PartitionSpec())
    if not source.is_equivalent_to(leaves, len(aval.shape)):
        send = _one(leaves, target, aval)
        return lambda array: send(_resharded(array, leaves))
    if holders(source) | holders(target) != {jax.process_index()}:
        return lambda array: _between(array, source, target)
    if _is_key(aval.dtype):
        return lambda array: jax.device_put(array, target)  # typed PRNG keys
    return lambda array: spread(array, target)


def _is_key(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def spread(array: jax.Array, target: NamedSharding) -> jax.Array:
    """A replicated array on another mesh, made of copies of its shards; shards already there are shared."""
    shards = {s.device: s.data for s in array.addressable_shards}
    spare, here = list(shards.values()), jax.process_index()
    parts = [
        shards[d] if d in shards else jax.device_put(spare[n % len(spare)], d)
        for n, d in enumerate(target.mesh.devices.flat)
        if d.process_index == here
    ]
    return jax.make_array_from_single_device_arrays(array.shape, target, parts, dtype=array.dtype)


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
            # The caller may use up its array before another process has fetched it: a copy is handed over.
            x = jnp.copy(x) if x.addressable_shards else x
            x, target = _alike(x, mesh_of(sharding))
            x = _between(x, cast(NamedSharding, x.sharding), target)
        return jax.device_put(x, sharding) if here else absent_array(x.shape, x.dtype, sharding)
    aval = jax.typeof(x)
    if not here:
        return absent_array(aval.shape, aval.dtype, sharding)
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        words = put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    whole = np.asarray(x, aval.dtype)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _alike(x: jax.Array, mesh: Mesh) -> tuple[jax.Array, NamedSharding]:
    """An array and the sharding of a copy of it on another mesh, shard by shard.

    One that is sharded over a mesh of another shape is replicated first, where it is.
    """
    own = cast(NamedSharding, x.sharding)
    if not x.is_fully_replicated and own.mesh.devices.shape != mesh.devices.shape:
        x = _resharded(x, NamedSharding(own.mesh, PartitionSpec()))
    if x.is_fully_replicated:
        return x, NamedSharding(mesh, PartitionSpec())
    return x, transferred(own, mesh)


def _resharded(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same array in another layout on its mesh, by a program there (`jax.device_put` would wait)."""
    return _resharder(sharding)(x) if x.addressable_shards else absent_array(x.shape, x.dtype, sharding)


@functools.lru_cache(maxsize=256)
def _resharder(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    program = jax.jit(lambda x: (x,), out_shardings=(sharding,))
    run = taking_turns(program, sharding)
    return lambda x: run(x)[0]


def _between(array: jax.Array, source: NamedSharding, target: NamedSharding) -> jax.Array:
    """The part that this process has in a copy between meshes of several processes.

    Each shard goes straight from a process that has it to the one that needs it.
    """
    if transport.goes_by_device_put(source, target):
        return transport.device_put(array, target)
    if 0 in array.shape and not _is_key(array.dtype):  # no byte would ever come
        return put(np.zeros(array.shape, array.dtype), target)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = _between(jax.random.key_data(array), source, target)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    here, shards = jax.process_index(), {s.device: s.data for s in array.addressable_shards}
    shape = target.shard_shape(array.shape)
    sends: dict[int, list[jax.Array]] = {}
    needs: dict[int, list[jax.Device]] = {}
    parts: dict[jax.Device, jax.Array] = {}
    for giver, taker in _pairs(source, target):
        if giver.process_index == here != taker.process_index:
            sends.setdefault(taker.process_index, []).append(shards[giver])
        elif giver.process_index != here == taker.process_index:
            needs.setdefault(giver.process_index, []).append(taker)
        elif giver.process_index == here:
            parts[taker] = shards[giver] if giver == taker else jax.device_put(shards[giver], taker)
    for process, arrays in sends.items():
        transport.send(process, arrays)
    for process, devices in needs.items():
        types = [jax.ShapeDtypeStruct(shape, array.dtype, sharding=SingleDeviceSharding(d)) for d in devices]
        parts |= dict(zip(devices, transport.receive(process, types)))
    local = [parts[d] for d in target.mesh.devices.flat if d in parts]
    return jax.make_array_from_single_device_arrays(array.shape, target, local, dtype=array.dtype)


@functools.lru_cache(maxsize=4096)
def _pairs(source: NamedSharding, target: NamedSharding) -> list[tuple[jax.Device, jax.Device]]:
    """For each device of the target, the one that has its shard: the same place of an equal mesh, or for
    replicated arrays the device itself, else one of its process, else any in turn."""
    givers, takers = list(source.mesh.devices.flat), list(target.mesh.devices.flat)
    if source.mesh.devices.shape == target.mesh.devices.shape:
        return list(zip(givers, takers))

    def nearest(n: int, taker: jax.Device) -> jax.Device:
        own = [d for d in givers if d.process_index == taker.process_index] or givers
        return taker if taker in givers else own[n % len(own)]

    return [(nearest(n, d), d) for n, d in enumerate(takers)]
