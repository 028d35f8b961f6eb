"""`nnx.shard_map`, with the mesh of the task that it is used in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from mmnnx import _compat
from mmnnx.sharding.mesh import MultiMesh, current_multimesh
from mmnnx.sharding.task_scope import current_task


def shard_map(
    f: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | AbstractMesh | MultiMesh | None = None,
    in_specs: Any,
    out_specs: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **options: Any,
) -> Any:
    """`nnx.shard_map`: a function over shards, lifted to NNX objects.

    Args:
      f: the function; without it, a decorator is returned.
      mesh: what to map over. Default: the mesh of the task this is called in, else the current MultiMesh.
      in_specs, out_specs: PartitionSpecs, `nnx.StateSharding` or `TaskSharding`, or prefix trees of them.
      graph, graph_updates, **options: those of `nnx.shard_map` (`axis_names`, `check_vma`).

    Raises:
      ValueError: for a bound method, and for specs that `nnx.shard_map` does not take in this mode; when
        called, if there is neither a mesh, nor a task, nor a current MultiMesh.

    Example:
      >>> @mm.shard_map(in_specs=P("model"), out_specs=P())
      ... def total(x):
      ...     return jax.lax.psum(jnp.sum(x), "model")
    """
    graph, graph_updates = _compat.graph_modes(graph, graph_updates)
    options |= {"in_specs": in_specs, "out_specs": out_specs, "graph": graph, "graph_updates": graph_updates}
    if f is None:
        return functools.partial(shard_map, mesh=mesh, **options)
    over = functools.partial(nnx.shard_map, f, **options)
    if mesh is not None:
        return over(mesh=mesh.mesh if isinstance(mesh, MultiMesh) else mesh)
    over(mesh=None)  # refuses now what it would refuse in the call

    @functools.wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return over(mesh=_mesh_around())(*args, **kwargs)

    return mapped


def _mesh_around() -> Mesh:
    if (task := current_task()) is not None:
        return task.to_mesh()
    if (multimesh := current_multimesh()) is not None:
        return multimesh.mesh
    raise ValueError(
        "shard_map needs a mesh: give mesh=, or use it in a task or inside `with MultiMesh(...):`"
    )
