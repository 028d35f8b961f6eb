"""What becomes of the results of the microbatches: "sum", "mean", "max", "last" or "concat"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmnnx.mpmd.frontend.batch_slices import join_slices


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The reduction of one array of the results.

    Attributes:
      name: "sum", "mean", "max", "last" or "concat".
      like: shape and dtype of the array.
    """

    name: str
    like: jax.ShapeDtypeStruct

    @property
    def fold(self) -> Fold | None:
        """How it is accumulated; None for what is stacked, and for gradients of integers, which are empty."""
        return None if self.like.dtype == jax.dtypes.float0 else _FOLDS.get(self.name)

    def init(self) -> Any:
        """The accumulator before the first microbatch, None where there is none."""
        return None if self.fold is None else self.fold.init(self.like)

    def step(self, accumulator: Any, result: jax.Array) -> tuple[Any, Any]:
        """(the accumulator after a microbatch, what of its result is stacked)."""
        if self.fold is not None:
            return self.fold.step(accumulator, result), None
        return None, None if self.like.dtype == jax.dtypes.float0 else result

    def finish(self, accumulator: Any, stack: Any, count: int, dim: int) -> Any:
        """The result of the loop, from those of `count` microbatches."""
        if self.fold is not None:
            return self.fold.finish(accumulator, self.like, count)
        if self.like.dtype == jax.dtypes.float0:
            return np.zeros(self.like.shape, self.like.dtype)
        return join_slices(stack, dim)


class Fold(NamedTuple):
    """A reduction that goes on from microbatch to microbatch.

    Attributes:
      init: from shape and dtype of a result to the accumulator before the first microbatch.
      step: from the accumulator and a result to the accumulator after it.
      finish: from the accumulator, shape and dtype of a result, and the number of microbatches to the result.
    """

    init: Callable[[Any], jax.Array]
    step: Callable[[jax.Array, jax.Array], jax.Array]
    finish: Callable[[jax.Array, Any, int], jax.Array]


def check_names(reduce: Any) -> None:
    """Refuses a prefix tree with what is not the name of a reduction.

    Raises:
      ValueError: names those there are.
    """
    for name in jax.tree.leaves(reduce):
        if name not in _NAMES:
            raise ValueError(f"microbatch: reduce={name!r} is none of {', '.join(map(repr, _NAMES))}")


def reductions(reduce: Any, results: Any) -> list[Reduction]:
    """The reduction of every array of the results.

    Args:
      reduce: a prefix tree of names.
      results: a pytree of shapes and dtypes.

    Raises:
      TypeError: for sums of random keys, and the largest of what has no order, such as complex numbers.
      ValueError: if `reduce` is no prefix of the results.
    """
    found: list[Reduction] = []

    def add(name: str, subtree: Any) -> None:
        found.extend(Reduction(name, like) for like in jax.tree.leaves(subtree))

    try:
        jax.tree.map(add, reduce, results)
    except ValueError:
        raise ValueError(
            f"microbatch: reduce={reduce!r} is no prefix of the results of fun, which are {_outline(results)}"
        ) from None
    for reduction in found:
        _check_dtype(reduction.name, reduction.like.dtype)
    return found


def _outline(results: Any) -> str:
    """What a function returns, as far as `reduce=` is likely to follow it."""
    match results:
        case dict():
            return "{" + ", ".join(f"{key!r}: {_outline(value)}" for key, value in results.items()) + "}"
        case tuple():
            return "(" + ", ".join(map(_outline, results)) + "," * (len(results) == 1) + ")"
        case list():
            return "[" + ", ".join(map(_outline, results)) + "]"
        case jax.ShapeDtypeStruct():
            return f"{results.dtype}[{','.join(map(str, results.shape))}]"
    return type(results).__name__


def _check_dtype(name: str, dtype: Any) -> None:
    numbers = {"sum": jnp.number, "mean": jnp.number, "max": jnp.integer}
    if name not in numbers or dtype == jax.dtypes.float0:
        return
    if not any(jnp.issubdtype(dtype, kind) for kind in (numbers[name], jnp.floating, jnp.bool_)):
        raise TypeError(f"microbatch: reduce={name!r} has no meaning for {dtype}")


def _sum_dtype(dtype: Any) -> Any:
    """The dtype that a sum is kept in: at least 32 bits wide, for many microbatches may be added up."""
    return _with_float32(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _with_float32(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)  # JAX promotes no float of 8 bits
    with jax.numpy_dtype_promotion("standard"):  # also where the user's own code is held to "strict"
        return jnp.promote_types(dtype, jnp.float32)


def _zeros_for_sum(like):
    return jnp.zeros_like(like, _sum_dtype(like.dtype))


def _zeros_for_mean(like):
    return jnp.zeros_like(like, _with_float32(like.dtype))


def _lowest(like):
    if like.dtype == jnp.bool_:
        return jnp.zeros_like(like)
    if jnp.issubdtype(like.dtype, jnp.floating):
        lowest = jnp.full_like(like, -jnp.inf)  # nan in a type without infinities
        return jnp.where(jnp.isnan(lowest), jnp.finfo(like.dtype).min, lowest)
    return jnp.full_like(like, jnp.iinfo(like.dtype).min)


def _add(accumulator, result):
    return accumulator + jnp.asarray(result, accumulator.dtype)


def _latest(accumulator, result):
    return result


def _narrow(accumulator, like, count):
    return accumulator.astype(like.dtype)


def _divide(accumulator, like, count):
    dtype = like.dtype if jnp.issubdtype(like.dtype, jnp.inexact) else accumulator.dtype
    return (accumulator / count).astype(dtype)


def _as_it_is(accumulator, like, count):
    return accumulator


_FOLDS = {
    "sum": Fold(_zeros_for_sum, _add, _narrow),
    "mean": Fold(_zeros_for_mean, _add, _divide),
    "max": Fold(_lowest, jnp.maximum, _as_it_is),
    "last": Fold(jnp.zeros_like, _latest, _as_it_is),
}
_NAMES = (*_FOLDS, "concat")
