"""Sharding constraints in logical axis names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

import mmnnx as mm
from mmnnx.sharding.logical import autosharding

_autosharding_around = jax.make_user_context()  # a key of JAX's caches


@contextlib.contextmanager
def autoshard(autoshard: bool = True) -> Iterator[None]:
    """Whether names in sharding constraints are logical: then names without a mesh axis mean replication.

    Without this context they are logical inside tasks and in functions given to `parallelize`, nowhere else.

    Example:
      >>> with autoshard(False):
      ...     y = with_sharding_constraint(x, P("x"))  # as jax.lax.with_sharding_constraint
    """
    token = autosharding.set(autoshard)
    try:
        with _autosharding_around(autoshard):
            yield
    finally:
        autosharding.reset(token)


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Constrains how the arrays of `x` are sharded, in logical axis names.

    Inside a task, names are translated by its `logical_axes`; axes of its mesh stand for themselves; other
    names mean replication. In a function given to `parallelize`, or within `autoshard`, a constraint outside
    of tasks is one in each task that reads the value (in the task that made it, if none reads it). Of what no
    task has to do with, names are axes of the program's mesh. Elsewhere it is
    `jax.lax.with_sharding_constraint`.

    Args:
      x: an array or a pytree of arrays.
      axis_resources: a PartitionSpec, or a prefix tree of them (or of Shardings, or None: no constraint).

    Returns:
      `x`, with the same shapes, dtypes and values.

    Example:
      >>> double = task(lambda x: with_sharding_constraint(2 * x, P("x", None)), mesh=mesh)
    """
    return mm.with_sharding_constraint(x, axis_resources)
