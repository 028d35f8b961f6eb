"""Arguments on the way into a program, and results on the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.mpmd.distributed.processes import absent_array, is_here
from mmnnx.mpmd.ir.shardings import is_committed
from mmnnx.mpmd.runtime.transfers import put, spread
from mmnnx.sharding.mesh import MultiMesh

Bind = Callable[[Any], jax.Array]


def binder(x: Any, target: NamedSharding) -> Bind | None:
    """How arguments that live where `x` does become arrays of the target sharding; None if they are."""
    return _binder(jax.typeof(x), x.sharding if is_committed(x) else None, target)


def settling(x: Any, later: NamedSharding, target: NamedSharding) -> Bind:
    """The same for one that lives nowhere in particular, and will live as `later` says."""
    binds = {False: binder(x, target), True: _binder(jax.typeof(x), later, target)}

    def bind(x: Any) -> jax.Array:
        found = binds[is_committed(x)]
        return x if found is None else found(x)

    return bind


def _binder(aval: Any, own: Sharding | None, target: NamedSharding) -> Bind | None:
    """A value replicated over more devices than the target's is there already: its shards are used as they
    are."""
    if own is not None and own.is_equivalent_to(target, aval.ndim):
        return None
    replicated = own is not None and own.is_fully_replicated and target.is_fully_replicated
    is_there = own is not None and replicated and own.device_set > target.device_set
    if (own is None or is_there) and not is_here(target):
        away = absent_array(aval.shape, aval.dtype, target)
        return lambda x: away
    if is_there:
        return lambda x: spread(x, target)
    return lambda x: put(x, target)


def everywhere(arrays: Sequence[jax.Array], target: NamedSharding) -> jax.Array:
    """One replicated array made of equal replicated ones, each on some of its devices.

    Nothing is copied, but to devices that no task has.
    """
    shards = {s.device: s.data for a in arrays for s in a.addressable_shards}
    for d in target.addressable_devices - shards.keys():
        shards[d] = jax.device_put(arrays[0].addressable_data(0), d)
    parts = [shards[d] for d in target.mesh.devices.flat if d in shards]
    return jax.make_array_from_single_device_arrays(arrays[0].shape, target, parts, dtype=arrays[0].dtype)


Delivery = Callable[[Sequence[Any], Sequence[jax.Array]], Any]


def deliver(
    var: Any,
    number: int | None,
    asked: NamedSharding | None,
    held: Sequence[Any],
    multimesh: MultiMesh | None,
) -> Delivery:
    """How a result of the function comes about, from the arguments and the buffers that hold it.

    Args:
      var: the result in the jaxpr.
      number: which argument it is, if it is one.
      asked: the sharding that it must have.
      held: the values of the program that hold it.
      multimesh: whose devices a value that is held on every mesh is spread over.
    """
    if var.aval.dtype == jax.dtypes.float0:  # of a derivative by integers: no array of a device's
        return lambda values, arrays: np.zeros(var.aval.shape, jax.dtypes.float0)
    if len(held) > 1:
        assert multimesh is not None  # without one, a result is held once
        target = NamedSharding(multimesh.mesh, PartitionSpec())
        return lambda values, arrays: everywhere(arrays, target)
    if held and asked is not None and not (is_here(held[0][1]) or is_here(asked)):
        away = absent_array(var.aval.shape, var.aval.dtype, asked)  # one object for all calls
        return lambda values, arrays: away
    if held:
        return lambda values, arrays: arrays[0] if arrays[0].sharding == asked else _at(asked, arrays[0])
    if number is not None:
        return lambda values, arrays: _at(asked, _array(values[number]))
    value = jnp.asarray(var.val, var.aval.dtype)
    return copied(lambda values, arrays: _at(asked, value))


def _at(sharding: NamedSharding | None, x: Any) -> Any:
    return x if sharding is None else put(x, sharding)


def _array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def copied(delivery: Delivery) -> Delivery:
    """The same result in a buffer of its own, so that to donate it takes nothing else along."""

    def copy(values: Sequence[Any], arrays: Sequence[jax.Array]) -> Any:
        return own_copy(delivery(values, arrays))

    return copy


def weakly_typed(delivery: Delivery) -> Delivery:
    """The same result with a weak type, which arrays that come from elsewhere do not have."""

    def weak(values: Sequence[Any], arrays: Sequence[jax.Array]) -> Any:
        made = delivery(values, arrays)
        return made if made.aval.weak_type else _compat.weakly_typed(made)

    return weak


def own_copy(x: Any) -> Any:
    """The same array in a buffer of its own; what this process has no part of, as it is."""
    away = isinstance(x, jax.Array) and not x.sharding.addressable_devices
    return x if away else jnp.copy(x)


def check_shared(leaves: Sequence[Any], donated: Sequence[bool], names: Sequence[str]) -> None:
    """Refuses an array that is donated as one argument and given as another as well.

    Raises:
      ValueError: names both arguments.
    """
    if len(set(map(id, leaves))) == len(leaves):
        return
    first: dict[int, int] = {}
    for n, x in enumerate(leaves):
        # What this process has no part of may be one array for several.
        if isinstance(x, jax.Array) and x.sharding.addressable_devices:
            m = first.setdefault(id(x), n)
            if m != n and (donated[m] or donated[n]):
                raise ValueError(
                    f"{names[m]} and {names[n]} are one array, and donating it would take both: "
                    "copy one of them (jnp.copy), or do not donate it"
                )
