"""What `jax.debug_nans` and `jax.debug_infs` ask for: a look at the results of each compiled call.

JAX looks at those of compiled programs in their first call only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_asked() -> bool:
    """Whether results are to be looked at; mypy does not know these attributes."""
    config: Any = jax.config
    return bool(config.jax_debug_nans or config.jax_debug_infs)


def checked(execute: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """The function; it waits for its results, and raises a FloatingPointError of what must not be in them."""

    def run(*arrays: jax.Array) -> Sequence[Any]:
        config: Any = jax.config
        unwanted: dict[str, Any] = {"nan": np.isnan} if config.jax_debug_nans else {}
        unwanted |= {"inf": np.isinf} if config.jax_debug_infs else {}
        with jax.debug_nans(False), jax.debug_infs(False):
            results = execute(*arrays)
        for x in results:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                continue
            for shard in x.addressable_shards:
                for name, is_unwanted in unwanted.items():
                    if is_unwanted(np.asarray(shard.data)).any():
                        raise FloatingPointError(name)
        return results

    return run
