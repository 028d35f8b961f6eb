"""Logical axis names in modules: on weights when they are made, on activations where they are computed."""

from __future__ import annotations

import math
from types import EllipsisType
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from mmnnx.sharding.logical import constrain_on, to_spec
from mmnnx.sharding.task_scope import current_task, scope_mesh, splitting

FREE = PartitionSpec.UNCONSTRAINED


def named(init: nnx.Initializer, *axes: str | tuple[str, ...] | None) -> nnx.Initializer:
    """`init`, recording the logical names of the axes of the Variable it makes.

    Eager sharding is off because the names are not those of any mesh: Flax would otherwise look them up in
    whatever mesh is current when the model is built.

    Args:
      init: an initialiser, called with (key, shape, dtype).
      *axes: a name, a tuple of names or None for each dimension; without any, `init` itself is returned.

    Example:
      >>> init = named(nnx.initializers.lecun_normal(), "embed", "mlp")
      >>> layer = nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0))
      >>> layer.kernel.get_metadata("out_sharding")
      ('embed', 'mlp')
    """
    return nnx.with_partitioning(init, axes, eager_sharding=False) if axes else init


def constrain(x: jax.Array, *names: Any) -> jax.Array:
    """`x` with its dimensions sharded by the rules of the enclosing task; `x` itself outside of tasks.

    A dimension is left to XLA if neither the rules nor the mesh of the task know its name, or if its mesh
    axes do not divide its size (eight key-value heads over sixteen devices): replication would undo the
    sharding that XLA propagates. A name whose mesh axes an earlier dimension has taken is replicated.

    Args:
      x: an array.
      *names: for each dimension a logical name, None (not sharded) or `PartitionSpec.UNCONSTRAINED` (left to
        XLA). One `...` stands for any number of dimensions left to XLA.

    Raises:
      ValueError: another number of names than `x` has dimensions, or a rule that names an axis that the mesh
        lacks.

    Example:
      >>> constrain(jax.numpy.ones((2, 3, 8)), "batch", ..., "mlp").shape
      (2, 3, 8)
    """
    names = _fill(names, x.ndim)
    task = current_task()
    if task is None or not splitting.get():
        return x
    mesh = scope_mesh(task)
    known = {name for name, _ in task.axis_rules}.union(mesh.axis_names)
    names = tuple(FREE if isinstance(name, str) and name not in known else name for name in names)
    entries = [
        entry if x.shape[dim] % _parts(entry, mesh) == 0 else FREE
        for dim, entry in enumerate(to_spec(names, task, mesh))
    ]
    if not any(isinstance(name, str) for name in names) or all(entry is FREE for entry in entries):
        return x
    return constrain_on(mesh, x, entries)


def _fill(names: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    gaps = [i for i, name in enumerate(names) if isinstance(name, EllipsisType)]
    missing = ndim - len(names) + len(gaps)
    if len(gaps) > 1 or missing < 0 or (missing and not gaps):
        raise ValueError(
            f"{len(names)} names {names} for an array of {ndim} dimensions: give one for each, or one `...` "
            "for those that are left to XLA"
        )
    at = gaps[0] if gaps else ndim
    return (*names[:at], *[FREE] * missing, *names[at + 1 :])


def _parts(entry: Any, mesh: jax.sharding.Mesh) -> int:
    """The number of parts that an entry of a spec divides its dimension into."""
    if entry is None or entry is FREE:
        return 1
    return math.prod(mesh.shape[axis] for axis in ((entry,) if isinstance(entry, str) else entry))
