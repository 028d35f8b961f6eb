"""Prefix trees of shardings: which entry is for which part of the arguments or results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.frontend.graph import all_paths, is_node

_ANEW = "call nnx.prefix with an object like this one, and with all that share state at once"


def entries(prefix: Any, tree: Any, name: str) -> list[tuple[str, Any, Any]]:
    """Each entry of a prefix tree: where it is, the entry, and the subtree that it is for.

    Where the prefix has what `nnx.prefix` made, there is an entry for each Variable.

    Raises:
      ValueError: if `prefix` does not describe the tree.
    """
    try:
        found = _up_to(prefix, tree, is_node)
    except ValueError as error:
        raise ValueError(f"{name} {_mismatch(prefix, tree) or f'is no prefix: {error}'}") from None
    pairs: list[tuple[str, Any, Any]] = []
    shared: set[int] = set()
    for keys, entry, subtree in found:
        if isinstance(entry, _compat.TREE_STATE):
            pairs += _of_graph(name + keys, entry.state, subtree, shared)
        elif is_node(entry):
            pairs += _of_pytree(name + keys, entry, subtree)
        else:
            pairs.append((name + keys, entry, subtree))
    return pairs


def _up_to(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[str, Any, Any]]:
    """(keys, leaf, subtree) of each leaf of a prefix tree.

    Leaves are also None, and what `nnx.prefix` made in graph mode.
    """
    leaf = lambda x: x is None or isinstance(x, _compat.TREE_STATE) or is_leaf(x)
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten_with_path(prefix, is_leaf=leaf)
    subtrees = treedef.flatten_up_to(tree)
    return [(jax.tree_util.keystr(keys), x, subtree) for (keys, x), subtree in zip(leaves, subtrees)]


def _of_pytree(where: str, prefix: Any, node: Any) -> list[tuple[str, Any, Any]]:
    """The same for a module of shardings, which `nnx.prefix` makes in tree mode."""
    try:
        pairs = _up_to(prefix, node, lambda x: False)
    except ValueError:
        raise ValueError(
            f"{where} is no prefix of this {type(node).__name__}: nnx.prefix made it for one with other "
            "Variables or other static attributes"
        ) from None
    return [(where + keys, entry, value) for keys, entry, value in pairs]


def _of_graph(where: str, state: Any, node: Any, shared: set[int]) -> list[tuple[str, Any, Any]]:
    """The same for shardings by state path, which `nnx.prefix` makes in graph mode.

    Args:
      shared: ids of the Variables in the objects before: of several objects that `nnx.prefix` was given
        together, only the first has a sharding for what they share. Learns those in this one.
    """
    shardings = dict(nnx.to_flat_state(state)) if isinstance(state, nnx.State) else {(): state}
    pairs = []
    for value, paths in all_paths(node):
        path = next((path for path in paths if path in shardings), None)
        if path is not None:
            pairs.append((".".join((where, *map(str, path))), shardings.pop(path), value))
        elif id(value) not in shared:
            raise ValueError(f"{where} has no sharding for {'.'.join(map(str, paths[0]))}: {_ANEW}")
        shared.add(id(value))
    if shardings:
        other = ".".join(map(str, next(iter(shardings))))
        raise ValueError(f"{where} has a sharding for {other}, which is not there: {_ANEW}")
    return pairs


def _mismatch(prefix: Any, tree: Any) -> str | None:
    """Which entry of a tuple of shardings does not describe its argument, if that is what is wrong."""
    if not isinstance(prefix, (tuple, list)) or not isinstance(tree, (tuple, list)):
        return None
    if len(prefix) != len(tree):
        return f"has {len(prefix)} entries, and there are {len(tree)} positional arguments or results"
    for n, (entry, subtree) in enumerate(zip(prefix, tree)):
        try:
            _up_to(entry, subtree, is_node)
        except ValueError:
            shapes = jax.tree.map(lambda x: jax.typeof(x) if isinstance(x, jax.Array) else x, subtree)
            return f"describes argument or result {n} as {jax.tree.structure(entry)}, and it is {shapes}"
    return None
