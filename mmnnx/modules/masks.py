"""Which query sees which key: bool masks that broadcast to [batch, heads, queries, keys]."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segment_mask(segment_ids: jax.Array, memory_segment_ids: jax.Array | None = None) -> jax.Array:
    """Tokens see those with their own number: [batch, 1, queries, keys] from int [batch, length] each.

    Args:
      segment_ids: of the queries.
      memory_segment_ids: of the keys. Default: those of the queries.

    Example:
      >>> segment_mask(jnp.array([[0, 0, 1]]))[0, 0].astype(int).tolist()
      [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    others = segment_ids if memory_segment_ids is None else memory_segment_ids
    return (segment_ids[:, :, None] == others[:, None, :])[:, None]


def cache_mask(positions: jax.Array, capacity: int, window: int | None = None) -> jax.Array:
    """Queries at `positions`, int [batch, queries], see the slots of a cache up to their own.

    Of these, the last `window` if one is given. [batch, 1, queries, capacity].

    Example:
      >>> cache_mask(jnp.array([[1, 2]]), 4, window=2)[0, 0].astype(int).tolist()
      [[1, 1, 0, 0], [0, 1, 1, 0]]
    """
    distance = positions[:, :, None] - jnp.arange(capacity)
    seen = distance >= 0
    return (seen if window is None else seen & (distance < window))[:, None]


def combine(query: jax.Array, key: jax.Array, *masks: jax.Array | None) -> jax.Array | None:
    """What all of the masks allow; None if all are None.

    Args:
      query: [batch, queries, heads, head_dim], for its shape.
      key: [batch, keys, kv_heads, head_dim], for its shape.
      *masks: each broadcasting to [batch, heads, queries, keys].

    Raises:
      TypeError: a mask that is not bool.
      ValueError: one of another rank, or whose sizes do not broadcast.

    Example:
      >>> query, key = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 5, 4, 8))
      >>> combine(query, key, None, jnp.ones((2, 1, 1, 5), bool), jnp.ones((1, 1, 3, 5), bool)).shape
      (2, 1, 3, 5)
    """
    shape = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
    combined = None
    for mask in masks:
        if mask is None:
            continue
        if mask.dtype != bool:
            raise TypeError(f"an attention mask is bool, True where a query sees a key, not {mask.dtype}")
        if mask.ndim != 4 or any(size not in (1, full) for size, full in zip(mask.shape, shape)):
            raise ValueError(
                f"an attention mask of shape {mask.shape} does not broadcast to {shape}, which is "
                "[batch, heads, queries, keys]: give all four dimensions, 1 where they do not differ"
            )
        combined = mask if combined is None else combined & mask
    return combined
