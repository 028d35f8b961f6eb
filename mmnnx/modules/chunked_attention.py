"""Attention over parts of the queries: not all scores are there at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def chunked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    chunks: int = 1,
    implementation: Any = None,
) -> jax.Array:
    """Scaled dot-product attention of one part of the queries after the other.

    A chunk's scores are made once more in the backward, instead of being kept: with 8 chunks an eighth of the
    memory (arXiv:2112.05682, with the queries alone in chunks).

    Args:
      query: [batch, queries, heads, head_dim].
      key: [batch, keys, kv_heads, head_dim].
      value: the same shape.
      mask: bool, broadcasting to [batch, heads, queries, keys]; True is seen.
      causal: whether query n sees the keys up to n alone.
      window: each query sees the nearest `window` keys up to its own, and, unless causal, as many from its
        own onwards.
      chunks: parts of the queries; 1 makes all scores at once.
      implementation: of `jax.nn.dot_product_attention`.

    Returns:
      [batch, queries, heads, head_dim].

    Raises:
      ValueError: if `chunks` does not divide the queries.

    Example:
      >>> x = jnp.ones((2, 64, 4, 8))
      >>> chunked_attention(x, x, x, causal=True, chunks=4).shape
      (2, 64, 4, 8)
    """
    if chunks == 1:
        sides = None if window is None else (window - 1, 0 if causal else window - 1)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=causal,
            local_window_size=sides,
            implementation=implementation,
        )
    batch, length, *by_head = query.shape
    if length % chunks:
        raise ValueError(f"{length} queries are not divisible into {chunks} chunks of the attention")
    size = length // chunks
    keys = jnp.arange(key.shape[1])
    dtypes = key.dtype, value.dtype
    # What comes back to them is a sum over chunks, and that is taken in their type.
    wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (key, value)]

    @jax.checkpoint
    def attend(query: jax.Array, mask: jax.Array | None, start: jax.Array) -> jax.Array:
        distance = start + jnp.arange(size)[:, None] - keys
        seen = mask
        for limit in _limits(distance, causal, window):
            seen = limit if seen is None else seen & limit
        key, value = (x.astype(dtype) for x, dtype in zip(wide, dtypes))
        return jax.nn.dot_product_attention(query, key, value, mask=seen, implementation=implementation)

    queries = jnp.moveaxis(query.reshape(batch, chunks, size, *by_head), 1, 0)
    starts = jnp.arange(chunks) * size
    if mask is None or mask.shape[2] == 1:
        found = jax.lax.map(lambda part: attend(part[0], mask, part[1]), (queries, starts))
    else:
        masks = jnp.moveaxis(mask.reshape(*mask.shape[:2], chunks, size, -1), 2, 0)
        found = jax.lax.map(lambda part: attend(*part), (queries, masks, starts))
    return jnp.moveaxis(found, 0, 1).reshape(batch, length, *by_head)


def _limits(distance: jax.Array, causal: bool, window: int | None) -> list[jax.Array]:
    """Which keys are near enough, by how far before a query they are: bool [1, 1, queries, keys] each."""
    limits = [distance >= 0] if causal else []
    if window is not None:
        limits.append(distance < window)
        if not causal:
            limits.append(distance > -window)
    return [limit[None, None] for limit in limits]
