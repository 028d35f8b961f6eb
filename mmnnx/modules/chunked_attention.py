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
    scale: float | None = None,
    softcap: float | None = None,
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
      scale: what scores are multiplied by. Default: 1 / sqrt(head_dim).
      softcap: scores are bounded by it: `softcap * tanh(score / softcap)`, as in Gemma 2 (arXiv:2408.00118).
      chunks: parts of the queries; 1 makes all scores at once. The last part may be shorter.
      implementation: of `jax.nn.dot_product_attention`.

    Returns:
      [batch, queries, heads, head_dim].

    Raises:
      ValueError: if an implementation other than "xla" is asked for a softcap.

    Example:
      >>> x = jnp.ones((2, 64, 4, 8))
      >>> chunked_attention(x, x, x, causal=True, chunks=4).shape
      (2, 64, 4, 8)
    """
    if softcap is not None and implementation not in (None, "xla"):
        raise ValueError(f'implementation={implementation!r} knows no softcap: use None or "xla"')
    batch, length, *by_head = query.shape
    if chunks == 1 and softcap is None:
        sides = None if window is None else (window - 1, 0 if causal else window - 1)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=scale,
            is_causal=causal,
            local_window_size=sides,
            implementation=implementation,
        )
    if chunks == 1 and softcap is not None:
        distance = jnp.arange(length)[:, None] - jnp.arange(key.shape[1])
        mask = _seen(mask, _limits(distance, causal, window))
        return softcap_attention(query, key, value, mask, scale=scale, softcap=softcap)
    size = -(-length // chunks)
    chunks = -(-length // size)
    if (missing := chunks * size - length) > 0:  # queries whose results are dropped
        query = jnp.pad(query, ((0, 0), (0, missing), (0, 0), (0, 0)))
        if mask is not None and mask.shape[2] != 1:
            mask = jnp.pad(mask, ((0, 0), (0, 0), (0, missing), (0, 0)), constant_values=True)
    keys = jnp.arange(key.shape[1])
    dtypes = key.dtype, value.dtype
    # What comes back to them is a sum over chunks, and that is taken in their type.
    wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (key, value)]

    @jax.checkpoint
    def attend(query: jax.Array, mask: jax.Array | None, start: jax.Array) -> jax.Array:
        distance = start + jnp.arange(size)[:, None] - keys
        seen = _seen(mask, _limits(distance, causal, window))
        key, value = (x.astype(dtype) for x, dtype in zip(wide, dtypes))
        if softcap is not None:
            return softcap_attention(query, key, value, seen, scale=scale, softcap=softcap)
        return jax.nn.dot_product_attention(
            query, key, value, mask=seen, scale=scale, implementation=implementation
        )

    queries = jnp.moveaxis(query.reshape(batch, chunks, size, *by_head), 1, 0)
    starts = jnp.arange(chunks) * size
    if mask is None or mask.shape[2] == 1:
        found = jax.lax.map(lambda part: attend(part[0], mask, part[1]), (queries, starts))
    else:
        masks = jnp.moveaxis(mask.reshape(*mask.shape[:2], chunks, size, -1), 2, 0)
        found = jax.lax.map(lambda part: attend(*part), (queries, masks, starts))
    return jnp.moveaxis(found, 0, 1).reshape(batch, chunks * size, *by_head)[:, :length]


def softcap_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    scale: float | None,
    softcap: float,
) -> jax.Array:
    """Attention with bounded scores, which `jax.nn.dot_product_attention` does not have; scores in float32.

    The arguments are those of `chunked_attention`.
    """
    batch, length, heads, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    grouped = query.reshape(batch, length, key.shape[2], -1, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, preferred_element_type=jnp.float32) * scale
    scores = softcap * jnp.tanh(scores / softcap)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (mask.shape[0], heads, *mask.shape[2:]))
        mask = mask.reshape(mask.shape[0], key.shape[2], -1, *mask.shape[2:])
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, value).reshape(batch, length, heads, -1)


def _seen(mask: jax.Array | None, limits: list[jax.Array]) -> jax.Array | None:
    for limit in limits:
        mask = limit if mask is None else mask & limit
    return mask


def _limits(distance: jax.Array, causal: bool, window: int | None) -> list[jax.Array]:
    """Which keys are near enough, by how far before a query they are: bool [1, 1, queries, keys] each."""
    limits = [distance >= 0] if causal else []
    if window is not None:
        limits.append(distance < window)
        if not causal:
            limits.append(distance > -window)
    return [limit[None, None] for limit in limits]
