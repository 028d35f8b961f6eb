"""Equations that sum over sharded dimensions: found, and rewritten to return a part for each device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from mmnnx import _compat
from mmnnx.mpmd.hoist.sharding_propagation import Axes, Known, dims_of
from mmnnx.mpmd.ir.dataflow import is_zero
from mmnnx.mpmd.ir.equations import Equation, Var, is_var

Sizes = Mapping[Any, int]  # of the axes of a mesh


class CannotHoist(Exception):
    """A sum that cannot be taken after the loop.

    The message says why, if XLA may reduce it there; `of` is the value that is in the way, if it is one.
    """

    def __init__(self, why: str = "", of: Var | None = None):
        super().__init__(why)
        self.of = of


# For axes, the number of parts, and which dimension of which variable operand is divided.
Contraction = tuple[Axes, int, dict[int, int]]


def sharded_contractions(
    e: Equation, known: Known, maker: Mapping[Var, Equation], sizes: Sizes
) -> list[Contraction]:
    """The sharded dimensions that an equation sums over.

    Raises:
      CannotHoist: for one that the axis does not divide.
    """
    number = {n: k for k, n in enumerate(n for n, a in enumerate(e.invars) if is_var(a))}
    if e.name == "dot_general":
        (left, right), _ = e.eqn.params["dimension_numbers"]
        pairs = [{0: i, 1: j} for i, j in zip(left, right)]
    elif e.name == "reduce_sum":
        pairs = [{0: i} for i in e.eqn.params["axes"]]
    elif e.name == "scatter-add" and is_zero(e.invars[0], maker):
        numbers = e.eqn.params["dimension_numbers"]
        rows = [i for i in range(e.invars[2].aval.ndim) if i not in numbers.update_window_dims]
        # Batching dimensions are not summed over: each row of the updates goes to a row of its own.
        pairs = [{1: n, 2: i} for n, i in enumerate(rows) if n not in numbers.scatter_indices_batching_dims]
    else:
        pairs = []
    found: list[Contraction] = []
    for pair in pairs:
        axes = next((d for n, i in pair.items() if (d := dims_of(e.invars[n], known)[i])), ())
        # Where operands are divided otherwise, an axis may be that of two dimensions: it is the first one's.
        axes = tuple(axis for axis in axes if not any(axis in own for own, *_ in found))
        if any(axis in own for axis in axes for own in dims_of(e.outvars[0], known)):
            continue  # each device makes its own part of the result, and has no use for a part of the sum
        count = math.prod(sizes.get(axis, 1) for axis in axes)
        size = e.invars[min(pair)].aval.shape[pair[min(pair)]]
        if size % count:
            names = ", ".join(f"{axis}={sizes[axis]}" for axis in axes if sizes.get(axis, 1) > 1)
            raise CannotHoist(f"the {size} values that it sums up do not divide over {names}")
        if count > 1 and all(is_var(e.invars[n]) for n in pair):
            found.append((axes, count, {number[n]: i for n, i in pair.items()}))
    return sorted(found, key=lambda split: str(split[0]))


def over_parts(e: Equation, splits: Sequence[Contraction]) -> Any:
    """An equation as a function whose result has one entry for each part of the dimensions it sums over."""

    def laid(x: Any, number: int) -> Any:
        """An operand with its divided dimensions as (part, rest), the parts in front."""
        mine = [(dims[number], count) for _, count, dims in splits if number in dims]
        at = dict(mine)
        shape: list[int] = []
        where: dict[int, int] = {}
        for i, size in enumerate(x.shape):
            where[i] = len(shape)
            shape += [at[i], size // at[i]] if i in at else [size]
        return jnp.moveaxis(x.reshape(shape), [where[i] for i, _ in mine], range(len(mine)))

    def parted(*xs: Any) -> Any:
        fun = as_function(e)
        for _, _, dims in reversed(splits):
            fun = jax.vmap(fun, [0 if n in dims else None for n in range(len(xs))])
        return fun(*(laid(x, n) for n, x in enumerate(xs)))

    return parted


def is_float(e: Equation) -> bool:
    return all(jnp.issubdtype(a.aval.dtype, jnp.floating) for a in (e.invars[0], e.outvars[0]))


def as_function(e: Equation) -> Any:
    """An equation of one result as a function of its variables, each operand one of its own."""
    fresh = [jex.Var(a.aval) if is_var(a) else a for a in e.invars]
    out = jex.Var(e.outvars[0].aval)
    closed = _compat.close_jaxpr(
        [a for a in fresh if is_var(a)], [out], [e.eqn.replace(invars=fresh, outvars=[out])]
    )
    return lambda *xs: jex.jaxpr_as_fun(closed)(*xs)[0]
