"""Sharding constraints in logical axis names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding

import mmnnx as mm
from mmnnx.sharding.logical import autosharding
from mmnnx.sharding.task_scope import current_task, ignoring

_autosharding_around = jax.make_user_context()  # a key of JAX's caches


@contextlib.contextmanager
def logical_names(logical: bool = True) -> Iterator[None]:
    """Inside, names in sharding constraints are logical, or are not: see `multimesh_compat.jax.autoshard`."""
    token = autosharding.set(logical)
    try:
        with _autosharding_around(logical):
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
      axis_resources: a PartitionSpec, or a tuple of what one is made of (names, tuples of names, None); or a
        prefix tree of these (or of Shardings, or None: no constraint).

    Returns:
      `x`, with the same shapes, dtypes and values.

    Example:
      >>> halves = {"devices": jax.devices()[:2], "device_axes": ("x",)}
      >>> double = task(lambda x: with_sharding_constraint(2 * x, P("x", None)), **halves)
      >>> double(jnp.ones((4, 2))).shape
      (4, 2)
    """
    is_spec = lambda s: s is None or isinstance(s, PartitionSpec) or _is_names(s, x)
    specs = jax.tree.map(
        lambda s: PartitionSpec(*s) if _is_names(s, x) else s, axis_resources, is_leaf=is_spec
    )
    return mm.with_sharding_constraint(x, specs)


def in_logical_names(shardings: Any) -> bool:
    """Whether a constraint is in logical names: here, and one that is no Sharding alone.

    Example:
      >>> in_logical_names(P("x"))  # in no task
      False
    """
    logical, leaves = autosharding.get(), jax.tree.leaves(shardings)
    here = logical is not False and (logical or current_task() is not None) and not ignoring.get()
    return here and not all(isinstance(leaf, Sharding | Format) for leaf in leaves)


def _is_names(entry: Any, x: Any) -> bool:
    """Whether a tuple is a spec rather than a tree: it has a name, or is all there is for an array."""
    if type(entry) is not tuple:
        return False
    named = [e for e in entry if e is not None]
    alike = all(
        isinstance(e, str) or (type(e) is tuple and all(isinstance(n, str) for n in e)) for e in named
    )
    return alike and (any(named) or isinstance(x, jax.Array))
