"""Arrays over meshes of several processes: each process does its part."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from mmnnx.mpmd.distributed import transport
from mmnnx.mpmd.distributed.processes import absent_array, is_here


def from_host(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """The array of a value that every process has."""
    if not is_here(sharding):
        return absent_array(x.shape, x.dtype, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def copy_across(array: jax.Array, source: NamedSharding, target: NamedSharding) -> jax.Array:
    """The part that this process has in a copy between meshes of several processes.

    Each shard goes straight from a process that has it to the one that needs it.
    """
    if transport.goes_by_device_put(source, target):
        return transport.device_put(array, target)
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    if 0 in array.shape and not is_key:  # no byte would ever come
        return from_host(np.zeros(array.shape, array.dtype), target)
    if is_key:
        words = copy_across(jax.random.key_data(array), source, target)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    here, shards = jax.process_index(), {s.device: s.data for s in array.addressable_shards}
    shape = target.shard_shape(array.shape)
    sends: dict[int, list[jax.Array]] = {}
    needs: dict[int, list[jax.Device]] = {}
    parts: dict[jax.Device, jax.Array] = {}
    for sender, receiver in _pairs(source, target):
        if sender.process_index == here != receiver.process_index:
            sends.setdefault(receiver.process_index, []).append(shards[sender])
        elif sender.process_index != here == receiver.process_index:
            needs.setdefault(sender.process_index, []).append(receiver)
        elif sender.process_index == here:
            parts[receiver] = (
                shards[sender] if sender == receiver else jax.device_put(shards[sender], receiver)
            )
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
    senders, receivers = list(source.mesh.devices.flat), list(target.mesh.devices.flat)
    if source.mesh.devices.shape == target.mesh.devices.shape:
        return list(zip(senders, receivers))

    def nearest(n: int, receiver: jax.Device) -> jax.Device:
        own = [d for d in senders if d.process_index == receiver.process_index] or senders
        return receiver if receiver in senders else own[n % len(own)]

    return [(nearest(n, d), d) for n, d in enumerate(receivers)]
