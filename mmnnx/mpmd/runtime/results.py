"""Results on the way out of a program: how each is made of what the program, or the caller, has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.mpmd.distributed.processes import absent_array, is_here
from mmnnx.mpmd.ir.equations import is_var
from mmnnx.mpmd.ir.fragments import PlacedVar
from mmnnx.mpmd.ir.shardings import is_committed, transferred
from mmnnx.mpmd.runtime.bound_program import BoundProgram
from mmnnx.mpmd.runtime.put import own_copy, put
from mmnnx.sharding.mesh import MultiMesh

Delivery = Callable[[Sequence[Any], Sequence[jax.Array]], Any]
"""From arguments and constants, and the arrays of the program that hold a result, to the result."""


def as_made(values: Sequence[Any], arrays: Sequence[jax.Array]) -> jax.Array:
    """A result that is an array of the program, as it is."""
    return arrays[0]


def deliver_results(bound: BoundProgram) -> list[Delivery]:
    """How each result of a function comes about."""
    number = bound.number
    deliveries: list[Delivery] = []
    used: set[Any] = set()
    shardings = dict(enumerate(bound.in_shardings))  # by the numbers of arguments; constants have none
    outvars, types = bound.flat.outvars, bound.traced.jaxpr.out_avals
    for leaf, v, requested, values, aval in zip(
        bound.record.results, outvars, bound.out_shardings, bound.results, types
    ):
        argument = number.get(v) if is_var(v) else None
        decided = bound.fixed.get(values[0]) if values and argument is None else None
        given = None if argument is None else shardings.get(argument)
        delivery = _deliver(v, argument, requested, given, values, decided, bound.multimesh)
        if requested is None and values and (own := bound.explicit.get(values[0][1])) is not None:
            delivery = _on_mesh(own, delivery)
        # Two results, or a result and an argument that it is not the state of, never share a buffer.
        foreign = argument is not None and (leaf is None or leaf.updates != argument)
        delivery = _copied(delivery) if foreign or (is_var(v) and v in used) else delivery
        deliveries.append(_weakly_typed(delivery) if aval.weak_type else delivery)
        used.update([v] if is_var(v) else [])
    return deliveries


def result_shardings(bound: BoundProgram, buffers: Mapping[int, NamedSharding]) -> list[Sharding | None]:
    """Where each result is: as asked, as its buffer, or as the argument that it is; None for anywhere."""
    given = dict(zip(bound.flat.invars, bound.in_shardings))
    found: list[Sharding | None] = []
    for v, requested, held in zip(bound.flat.outvars, bound.out_shardings, bound.program.outputs):
        if len(held) > 1 and bound.multimesh is not None:
            found.append(NamedSharding(bound.multimesh.mesh, PartitionSpec()))
        else:
            own = given.get(v) if is_var(v) else None
            found.append(requested or (buffers[held[0]] if held else own))
    return found


def _deliver(
    var: Any,
    number: int | None,
    requested: NamedSharding | None,
    given: NamedSharding | None,
    placed: Sequence[PlacedVar],
    decided: NamedSharding | None,
    multimesh: MultiMesh | None,
) -> Delivery:
    """How a result of the function comes about.

    Args:
      var: the result in the jaxpr.
      number: which argument or constant it is, if it is one.
      requested: the sharding that it must have.
      given: the sharding that the argument has, or is given.
      placed: the values of the program that hold it.
      decided: the sharding that the first of them is made with, if that is decided.
      multimesh: whose devices a value that is kept on every mesh is spread over.
    """
    if var.aval.dtype == jax.dtypes.float0:  # of a derivative by integers: no array of a device's
        return lambda values, arrays: np.zeros(var.aval.shape, jax.dtypes.float0)
    if len(placed) > 1:
        assert multimesh is not None  # without one, a result is kept on one mesh
        target = NamedSharding(multimesh.mesh, PartitionSpec())
        return lambda values, arrays: _everywhere(arrays, target)
    if placed and requested is not None and not (is_here(placed[0][1]) or is_here(requested)):
        absent = absent_array(var.aval.shape, var.aval.dtype, requested)  # one object for all calls
        return lambda values, arrays: absent
    if placed and requested in (None, decided):
        return as_made
    if placed:
        return lambda values, arrays: (
            arrays[0] if arrays[0].sharding == requested else _at(requested, arrays[0])
        )
    if number is not None:
        if requested is None and given is not None:
            return lambda values, arrays: _given(given, values[number])
        return lambda values, arrays: _at(requested, _array(values[number]))
    constant = jnp.asarray(var.val, var.aval.dtype)
    return _copied(lambda values, arrays: _at(requested, constant))


def _on_mesh(mesh: Mesh, delivery: Delivery) -> Delivery:
    """The same result on a mesh of the same devices, sharded as it is."""

    def moved(values: Sequence[Any], arrays: Sequence[jax.Array]) -> Any:
        made = delivery(values, arrays)
        named = isinstance(made.sharding, NamedSharding)  # as far as JAX can say how XLA sharded it
        return put(made, transferred(made.sharding, mesh)) if named else made

    return moved


def _everywhere(arrays: Sequence[jax.Array], target: NamedSharding) -> jax.Array:
    """One replicated array made of equal replicated ones, each on some of its devices.

    Nothing is copied, but to devices that no task has.
    """
    shards = {s.device: s.data for a in arrays for s in a.addressable_shards}
    for d in target.addressable_devices - shards.keys():
        shards[d] = jax.device_put(arrays[0].addressable_data(0), d)
    parts = [shards[d] for d in target.mesh.devices.flat if d in shards]
    whole = jax.make_array_from_single_device_arrays(arrays[0].shape, target, parts, dtype=arrays[0].dtype)
    _compat.note_parts(whole, arrays)
    return whole


def _at(sharding: NamedSharding | None, x: Any) -> Any:
    return x if sharding is None else put(x, sharding)


def _given(sharding: NamedSharding, x: Any) -> Any:
    """An argument that is returned, where `in_shardings` wants it if it was nowhere yet."""
    if is_committed(x):
        return x
    return put(x, sharding) if is_here(sharding) else absent_array(jnp.shape(x), jnp.result_type(x), sharding)


def _array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _copied(delivery: Delivery) -> Delivery:
    """The same result in a buffer of its own, so that to donate it takes nothing else along."""

    def copy(values: Sequence[Any], arrays: Sequence[jax.Array]) -> Any:
        return own_copy(delivery(values, arrays))

    return copy


def _weakly_typed(delivery: Delivery) -> Delivery:
    """The same result with a weak type, which arrays that come from elsewhere do not have."""

    def weak(values: Sequence[Any], arrays: Sequence[jax.Array]) -> Any:
        made = delivery(values, arrays)
        return made if made.aval.weak_type else _compat.weakly_typed(made)

    return weak
