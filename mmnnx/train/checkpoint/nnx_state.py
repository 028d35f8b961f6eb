"""The state of NNX objects as arrays by path, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmnnx.sharding.path_filter import path_text
from mmnnx.train.checkpoint.errors import Path


def arrays_of(nodes: Mapping[str, Any]) -> dict[Path, Any]:
    """The arrays, abstract arrays and numbers in the state of NNX objects.

    Returns:
      Them by path; the first key is the name of the object.

    Raises:
      TypeError: for anything but NNX objects, and for state that is not an array or a number.
      ValueError: for two paths that are written the same way, or no state at all.

    Example:
      >>> list(arrays_of({"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}))
      [('model', 'bias'), ('model', 'kernel')]
    """
    found: dict[Path, Any] = {}
    files: dict[str, Path] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(_trees(nodes)):
        keys = _keys(path)
        if not isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | bool | int | float):
            raise TypeError(f"{path_text(keys)} is {type(x).__name__}; checkpoints hold arrays and numbers")
        if (name := ".".join(keys)) in files:  # what orbax calls it on disk
            raise ValueError(f"the paths {keys} and {files[name]} are both {name} on disk: rename one")
        files[name] = keys
        found[keys] = x
    if not found:
        raise ValueError(f"there is no state in {', '.join(nodes) or 'nothing'}")
    return found


def set_arrays(nodes: Mapping[str, Any], arrays: Mapping[Path, Any]) -> None:
    """Sets the state of NNX objects; state that is not in `arrays` stays as it is."""

    def chosen(path: tuple[Any, ...], x: Any) -> Any:
        return arrays.get(_keys(path), x)

    trees = jax.tree_util.tree_map_with_path(chosen, _trees(nodes))
    for name, node in nodes.items():
        nnx.update(node, trees[name])


def _keys(path: tuple[Any, ...]) -> Path:
    """The keys of a path as text; one with a slash in it is two."""
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))


def _trees(nodes: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(nodes, Mapping):
        raise TypeError(
            f'NNX objects are given by name, as in {{"model": model}}, not {type(nodes).__name__}'
        )
    for name, node in nodes.items():
        if not nnx.graph.is_graph_node(node) or isinstance(node, nnx.Variable):
            raise TypeError(
                f"{name!r} must be an NNX object (a Module, Optimizer, Rngs, ...), not "
                f"{type(node).__name__}. One that holds any pytree: nnx.Dict(state=nnx.Variable(pytree))"
            )
    return {name: nnx.to_pure_dict(nnx.state(node), _as_kept) for name, node in nodes.items()}


def _as_kept(x: Any) -> Any:
    """The raw value of a Variable, without its hooks for reading."""
    return x.get_raw_value() if isinstance(x, nnx.Variable) else x
