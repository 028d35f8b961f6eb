"""Gives each Variable arrays of its own while a function is traced.

What an array is to the function is known by its tracer: one of two Variables that hold the same tracer would
lose its home and its updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.frontend.graph import Path, arrays, arrays_with_paths, is_node


def give_own_arrays(trees: tuple[Any, Any, Any], arrived: Mapping[int, Path], plain: set[int]) -> set[int]:
    """Copies what a Variable of (args, kwargs, result) holds if it is another's too, or an argument itself.

    Variables that hold the arrays they came with keep them.

    Args:
      trees: (args, kwargs, result).
      arrived: by id, the paths that arrays had when the function was called.
      plain: ids of the arguments that are arrays.

    Returns:
      `plain`, and the ids of all that Variables hold.

    Raises:
      ValueError: for a Variable of the result that holds a reference that was made inside.
    """
    taken = set(plain)
    changed = []
    for path, value in nnx.iter_graph(trees, graph=True):
        if isinstance(value, nnx.Variable):
            if value.ref and path[0] == 2 and not arrived.keys() & set(map(id, arrays(value))):
                raise ValueError(
                    f"{'.'.join(map(str, path[1:])) or 'the result'} is a Variable with ref=True that was "
                    "made inside of mm.jit, and jax.jit returns no references: make it outside, and pass it. "
                    "mm.jit(lambda m: m, out_shardings=...)(m) moves it to where it is to live"
                )
            held = {(*path[1:], *keys): id(a) for keys, a in arrays_with_paths(value)}
            kept = all(arrived.get(a) == where for where, a in held.items())
            if path[0] < 2 and held and kept:
                taken.update(held.values())
            else:
                changed.append(value)
    for value in changed:
        tree, own = value.get_raw_value(), set(map(id, arrays(value)))
        if len(own) == len(jax.tree.leaves(tree)) and taken.isdisjoint(own):
            taken |= own
        else:
            _compat.set_values([(value, copy_taken(tree, taken))])
    return taken


def copy_taken(tree: Any, taken: set[int]) -> Any:
    """The same tree, with a copy of each array that is in `taken` or was met before; adds all to `taken`.

    NumPy's arrays become JAX's, as they are after a call.
    """

    def once(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = jnp.copy(jnp.asarray(leaf))  # traced: it can be placed
        if isinstance(leaf, jax.Array):
            leaf = jnp.copy(leaf) if id(leaf) in taken else leaf
            taken.add(id(leaf))
        return leaf

    return jax.tree.map(once, tree, is_leaf=is_node)
