"""What `mm.jit` refuses as in_shardings and out_shardings before there are any arguments."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.mpmd.frontend.graph import is_node
from mmnnx.sharding.mesh import MultiMesh
from mmnnx.sharding.placement import TaskSharding
from mmnnx.sharding.task import Task


def check_shardings(name: str, shardings: Any, graph: bool, graph_updates: bool) -> None:
    """Refuses what is no sharding, and prefixes of another mode than the function's.

    Args:
      name: what messages call them.
      shardings: a prefix tree of shardings.
      graph, graph_updates: the mode.

    Raises:
      TypeError: for what is no sharding.
      ValueError: for a prefix that this mode does not take.
    """
    _check_dicts(name, shardings)
    for keys, entry in jax.tree_util.tree_flatten_with_path(shardings, is_leaf=_is_entry)[0]:
        where = name + jax.tree_util.keystr(keys)
        _check_mode(where, entry, graph, graph_updates)
        made_by_prefix = is_node(entry) or isinstance(entry, _compat.TREE_STATE)
        for leaf in jax.tree.leaves(entry, is_leaf=_is_sharding) if made_by_prefix else [entry]:
            if not isinstance(leaf, _SHARDINGS) or (made_by_prefix and isinstance(leaf, nnx.StateSharding)):
                raise TypeError(f"{where} has {leaf!r}, which is no NamedSharding or PartitionSpec")


def _check_mode(where: str, entry: Any, graph: bool, graph_updates: bool) -> None:
    if isinstance(entry, nnx.Variable):
        raise ValueError(
            f"{where} is a {type(entry).__name__}: give a sharding for all of the Variable, not a Variable "
            "that holds one"
        )
    if is_node(entry) and graph:
        raise ValueError(
            f"{where} is a {type(entry).__name__}. Graph nodes are not allowed as prefixes in graph mode: "
            "use mm.TaskSharding or nnx.StateSharding, which place state by its paths; or nnx.prefix, with "
            "graph=True for graph_updates=False, and with graph=False for graph=False"
        )
    if isinstance(entry, _compat.TREE_STATE) and (graph_updates or not graph):
        raise ValueError(
            f"{where} was made by nnx.prefix with graph=True, which is for graph=True and "
            "graph_updates=False: give these to mm.jit, or use mm.TaskSharding, which any mode takes"
        )
    by_filters = isinstance(entry, nnx.StateSharding) and not isinstance(entry, TaskSharding)
    if by_filters and not (graph and graph_updates):
        raise ValueError(
            f"{where}: without graph=True and graph_updates=True, shardings cannot contain `StateSharding` "
            f"objects, as in nnx.jit. Use nnx.prefix(model, {{filter: sharding}}, graph={graph}), or "
            "mm.TaskSharding, which any mode takes"
        )


_SHARDINGS = (Sharding, PartitionSpec, nnx.StateSharding)


def _is_sharding(x: Any) -> bool:
    return isinstance(x, _SHARDINGS)


def _is_entry(x: Any) -> bool:
    return is_node(x) or isinstance(x, _compat.TREE_STATE) or _is_sharding(x)


def _check_dicts(name: str, entry: Any) -> None:
    """Refuses tasks and meshes, and rules that are in no TaskSharding, whose keys JAX could not sort."""
    if isinstance(entry, Task | MultiMesh | Mesh | str):
        raise TypeError(
            f"{name}= has {entry!r}, which is no sharding: mm.TaskSharding({{...: task}}) places state on "
            "the mesh of a task, and a PartitionSpec names axes of the MultiMesh"
        )
    if isinstance(entry, dict) and any(key is ... or callable(key) for key in entry):
        raise TypeError(f"{name}= has a dict from filters to tasks: wrap it in mm.TaskSharding")
    inner = entry.values() if isinstance(entry, dict) else entry if type(entry) in (tuple, list) else ()
    for each in inner:
        _check_dicts(name, each)
