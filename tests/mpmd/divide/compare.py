"""Runs a jaxpr over pieces, and compares with what it computes over whole values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

import mmnnx.mpmd.divide.indexing  # noqa: F401  # rules of their own
from mmnnx import _compat
from mmnnx.mpmd.divide.loops import divide_jaxpr
from mmnnx.mpmd.divide.values import Cut


def assert_same_in_pieces(
    whole: Any,
    args: Sequence[jax.Array],
    given: Sequence[Cut | None],
    wanted: Sequence[Cut | None],
    tolerance: float,
) -> tuple[Any, list[Cut | None]]:
    """Compares all results of a closed jaxpr; those that are wanted in pieces come so.

    Returns:
      The equations over pieces, and how each result is divided.
    """
    divided, made = divide_jaxpr(whole, given, wanted, [f"argument {n}" for n in range(len(args))])
    pieces = [piece for x, c in zip(args, given) for piece in split(x, c)]
    results = iter(jax.jit(jex.jaxpr_as_fun(divided))(*pieces))
    for expected, c, w in zip(jax.jit(jex.jaxpr_as_fun(whole))(*args), made, wanted, strict=True):
        assert w is None or c == w
        row = [next(results) for _ in (c.sizes if c else [1])]
        found = row[0] if c is None else jnp.concatenate(row, axis=c.dim)
        if jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
            found, expected = jax.random.key_data(found), jax.random.key_data(expected)
        assert found.shape == expected.shape and found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    return _compat.open_jaxpr(divided)[2], made


def split(x: jax.Array, cut: Cut | None) -> list[jax.Array]:
    if cut is None:
        return [x]
    ends = np.cumsum(cut.sizes)
    return [lax.slice_in_dim(x, e - n, e, axis=cut.dim) for e, n in zip(ends, cut.sizes)]
