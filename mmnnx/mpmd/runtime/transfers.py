"""Transfers: arrays copied from one mesh to another. To start a copy waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.distributed import transport
from mmnnx.mpmd.distributed.processes import holders
from mmnnx.mpmd.ir.shardings import mesh_of, same_shape, transferred
from mmnnx.mpmd.runtime.across_processes import copy_across
from mmnnx.mpmd.runtime.reshard import reshard

Way = tuple[NamedSharding, NamedSharding, Any]  # (sharding, that of the copy on another mesh, aval)


def sender(ways: Sequence[Way]) -> Callable[..., Any]:
    """The function that copies arrays of one mesh to another, in one go where it can.

    Equal layouts are copied shard by shard; to a mesh of another shape goes a replicated array, from as many
    of its copies as are needed. What has another layout gets it first, by a program where it is.
    (`jax.device_put` with another layout would block until the array is ready.)

    It takes and returns as many arrays as there are `ways`. Between processes, the sender returns nothing of
    use, and the receiver does not look at what it is given.
    """
    together = [n for n, way in enumerate(ways) if _is_batched(*way)]
    if len(together) == len(ways):
        return _batched_copy(ways)
    batch = _batched_copy([ways[n] for n in together]) if together else lambda: ()
    alone = {n: _single_copy(*way) for n, way in enumerate(ways) if n not in together}

    def send(*arrays: jax.Array) -> Sequence[Any]:
        made = dict(zip(together, batch(*(arrays[n] for n in together)) or ()))  # a sender gets nothing back
        return [alone[n](array) if n in alone else made.get(n) for n, array in enumerate(arrays)]

    return send


def _is_batched(source: NamedSharding, target: NamedSharding, aval: Any) -> bool:
    """Whether such arrays are copied several by one call."""
    if not same_shape(mesh_of(source), mesh_of(target)) or _is_key(aval.dtype) or 0 in aval.shape:
        return False
    if not source.is_equivalent_to(transferred(target, mesh_of(source)), len(aval.shape)):
        return False
    senders, receivers = holders(source), holders(target)
    if senders | receivers == {jax.process_index()}:
        return True
    return len(senders) == len(receivers) == 1 and not transport.goes_by_device_put(source, target)


def _batched_copy(ways: Sequence[Way]) -> Callable[..., Any]:
    """What copies several arrays by one call."""
    targets = [target for _, target, _ in ways]
    (from_process,), (to_process,) = (holders(s) for s in ways[0][:2])
    if from_process == to_process:
        return lambda *arrays: _compat.copy_to(arrays, targets)
    if from_process == jax.process_index():
        return lambda *arrays: transport.send(to_process, arrays)
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=t) for _, t, aval in ways]
    return lambda *_: transport.receive(from_process, types)


def _single_copy(source: NamedSharding, target: NamedSharding, aval: Any) -> Callable[[jax.Array], Any]:
    """What copies one array."""
    same = same_shape(mesh_of(source), mesh_of(target))
    if not same and not target.is_fully_replicated:
        send = _single_copy(source, NamedSharding(target.mesh, PartitionSpec()), aval)
        return lambda array: reshard(send(array), target)
    layout = transferred(target, mesh_of(source)) if same else NamedSharding(source.mesh, PartitionSpec())
    if not source.is_equivalent_to(layout, len(aval.shape)):
        send = _single_copy(layout, target, aval)
        return lambda array: send(reshard(array, layout))
    if holders(source) | holders(target) != {jax.process_index()}:
        return lambda array: copy_across(array, source, target)
    if _is_key(aval.dtype):
        return lambda array: jax.device_put(array, target)  # typed PRNG keys
    return lambda array: spread(array, target)


def _is_key(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def spread(array: jax.Array, target: NamedSharding) -> jax.Array:
    """A replicated array on another mesh, made of copies of its shards; shards already there are shared."""
    if (part := _compat.noted_part(array, target)) is not None:
        return part
    shards = {s.device: s.data for s in array.addressable_shards}
    spare, here = list(shards.values()), jax.process_index()
    parts = [
        shards[d] if d in shards else jax.device_put(spare[n % len(spare)], d)
        for n, d in enumerate(target.mesh.devices.flat)
        if d.process_index == here
    ]
    return jax.make_array_from_single_device_arrays(array.shape, target, parts, dtype=array.dtype)
