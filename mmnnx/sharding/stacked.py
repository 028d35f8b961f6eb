"""Layers that are stacked for a scan: their Variables have a leading dimension, one entry for each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import jax
from flax import nnx


def stacked_length(node: Any) -> int | None:
    """How many layers are stacked in a module: the leading dimension that all its arrays have; None if they
    have none in common. A parameter of one dimension is a scalar of each layer, if it is not beside a larger
    one in its module, as the bias of a single layer is.

    Example:
      >>> make = nnx.vmap(lambda rngs: nnx.Linear(2, 2, rngs=rngs), axis_size=3)
      >>> stacked_length(make(nnx.Rngs(0).split(3)))
      3
    """
    if not isinstance(node, nnx.Pytree):
        return None
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(node)) if getattr(leaf, "shape", ())]
    lengths = {shape[0] for shape in shapes}
    if len(lengths) != 1 or max(lengths) == 1:
        return None
    ndims: dict[Any, set[int]] = {}  # of the parameters of each module
    for (*module, _), parameter in nnx.to_flat_state(nnx.state(node, nnx.Param)):
        ndims.setdefault(tuple(module), set()).update(x.ndim for x in jax.tree.leaves(parameter))
    scalars = [of_module for of_module in ndims.values() if 1 in of_module]
    kernels = any(max(of_module) > 2 for of_module in ndims.values())
    if scalars and (not kernels or any(len(of_module) > 1 for of_module in scalars)):
        return None
    return lengths.pop()


def even_stages(lengths: Sequence[int], sizes: Sequence[float], stages: int) -> list[int] | None:
    """The stage of each layer if several stacks, one after the other, are each divided evenly between stages
    of their own, so that the largest part is smallest; None if they cannot be.

    Args:
      lengths: number of layers in each stack.
      sizes: the size of each.
      stages: how many stages there are for all.

    Example:
      >>> even_stages([4, 2], [80, 20], 3)
      [0, 0, 1, 1, 2, 2]
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by stages so far
    for length, size in zip(lengths, sizes):
        found: dict[int, tuple[float, list[int]]] = {}
        for used, (most, counts) in best.items():
            for count in (n for n in range(1, stages - used + 1) if length % n == 0):
                option = max(most, size / count), [*counts, count]
                found[used + count] = min(found.get(used + count, (math.inf, [])), option)
        best = found
    if stages not in best:
        return None
    counts = best[stages][1]
    pairs = zip(lengths, counts, accumulate(counts, initial=0))
    return [first + layer * count // length for length, count, first in pairs for layer in range(length)]
