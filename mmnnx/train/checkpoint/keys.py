"""The shape and dtype that arrays are stored with; of typed PRNG keys their key data is stored."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def is_key(dtype: Any) -> bool:
    """Whether it is the dtype of typed PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def stored_as(x: Any) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype in which an array, abstract array or number is stored.

    >>> stored_as(jax.random.key(0)), stored_as(True)
    (((2,), dtype('uint32')), ((), dtype('bool')))
    """
    if not hasattr(x, "dtype"):
        return np.shape(x), np.asarray(x).dtype
    if is_key(x.dtype):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return data.shape, np.dtype(data.dtype)
    return x.shape, np.dtype(x.dtype)


def key_impl(dtype: Any) -> Any:
    """The implementation of typed PRNG keys, by their dtype; `jax.random.key_impl` needs keys."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]
