"""Functions over shards, and functions with their own partitioning, on the mesh of the enclosing task."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning

import mmnnx as mm

__all__ = ["custom_partitioning", "shard_map"]

# custom_partitioning is JAX's own: when a fragment is compiled, JAX gives the callbacks the mesh that the
# fragment's arrays are sharded over, which is its task's.

_MISSING: Any = inspect.Parameter.empty


def shard_map(
    f: Callable[..., Any] | None = None,
    mesh: Any = None,
    in_specs: Any = _MISSING,
    out_specs: Any = _MISSING,
    **options: Any,
) -> Any:
    """`jax.shard_map` over the mesh of the task that it is used in.

    Args:
      f: the function of one shard of each argument; without it, a decorator is returned.
      mesh: what to map over. Default: the mesh of the task this is called in, else the current MultiMesh.
      in_specs, out_specs: PartitionSpecs, or prefix trees of them, over the arguments and the result.
      **options: `axis_names` and `check_vma` of `jax.shard_map`, or `check_rep`, the earlier name of that.

    Raises:
      TypeError: without `in_specs` or `out_specs`.
      ValueError: when called, if there is neither a mesh, nor a task, nor a current MultiMesh.

    Example:
      >>> total = shard_map(lambda x: jax.lax.psum(x.sum(), "x"), in_specs=P("x"), out_specs=P())
      >>> on_two = task(total, devices=jax.devices()[:2], device_axes=("x",))
      >>> float(on_two(jnp.ones(4)))
      4.0
    """
    if in_specs is _MISSING or out_specs is _MISSING:
        raise TypeError("shard_map needs in_specs= and out_specs=")
    if "check_rep" in options:
        options["check_vma"] = options.pop("check_rep")
    return mm.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
