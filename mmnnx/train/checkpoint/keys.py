"""What arrays are stored as: themselves, or for typed PRNG keys the words they consist of."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def is_key(dtype: Any) -> bool:
    """Whether these are typed PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def stored_as(x: Any) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype in which an array, abstract array or number is stored.

    >>> stored_as(jax.random.key(0)), stored_as(True)
    (((2,), dtype('uint32')), ((), dtype('bool')))
    """
    if not hasattr(x, "dtype"):
        return np.shape(x), np.asarray(x).dtype
    if is_key(x.dtype):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return words.shape, np.dtype(words.dtype)
    return x.shape, np.dtype(x.dtype)


def key_impl(dtype: Any) -> Any:
    """The implementation of typed PRNG keys; `jax.random.key_impl` wants keys to tell it of."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]
