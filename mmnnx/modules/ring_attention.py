"""Attention of a sequence that devices have in parts: their keys and values go around.

Ring attention (Liu et al. 2023, arXiv:2310.01889). No device ever has all keys, and none has all scores.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mmnnx.modules.blockwise_attention import (
    Keys,
    Known,
    Queries,
    Scores,
    add_gradients,
    add_keys,
    finish,
    no_scores,
)
from mmnnx.modules.ring import Ring
from mmnnx.sharding.logical_shard_map import Axes, Layout, logical_shard_map

_SEQUENCE = "sequence"


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    kv_heads: Any = "kv_heads",
) -> jax.Array:
    """Scaled dot-product attention of a sequence to itself, over the devices that each have a part of it.

    A task divides the sequence by its rule for "sequence". Keys, values and segments go from device to
    device; each adds what its queries make of them to a running softmax. The backward has them go around
    once more, with their gradients. Scores are made in tiles, and none of tiles that no query sees, so that
    memory grows with the length of a part, not with its square. With a causal window, keys go no further
    than it reaches. With causal attention otherwise, the devices first exchange halves of their parts, so
    that each has an early and a late one, and all have the same to compute ("zigzag").

    Rows of the batch and key-value heads are divided as well; where the heads are fewer than the devices for
    them, each of these computes all heads. A sequence that the devices do not divide, or that one device
    has, is computed in tiles without sending anything. The products are XLA's on all platforms.

    Args:
      query: [batch, length, heads, head_dim].
      key: [batch, length, kv_heads, head_dim].
      value: the same shape.
      segment_ids: int [batch, length]: tokens see those of their own segment only.
      causal: whether query n sees the keys up to n alone.
      window: each query sees the nearest `window` keys up to its own, and, unless causal, as many from its
        own onwards.
      scale: what scores are multiplied by. Default: 1 / sqrt(head_dim).
      softcap: bound of the scores, as in `chunked_attention`.
      kv_heads: logical name of the key-value heads.

    Returns:
      [batch, length, heads, head_dim]; softmax and sums in float32.

    Example:
      >>> x = jnp.ones((2, 128, 4, 64))
      >>> ring_attention(x, x, x, causal=True).shape
      (2, 128, 4, 64)
    """
    batch, length, _, head_dim = query.shape
    by_group = query.reshape(batch, length, key.shape[2], -1, head_dim)
    how = Scores(causal, window, head_dim**-0.5 if scale is None else scale, softcap)
    segments = () if segment_ids is None else (segment_ids,)
    return _attend(how, kv_heads, by_group, key, value, segments).reshape(query.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(how: Scores, kv_heads: Any, query: Any, key: Any, value: Any, segments: Any) -> jax.Array:
    return _attend_forward(how, kv_heads, query, key, value, segments)[0]


def _attend_forward(
    how: Scores, kv_heads: Any, query: Any, key: Any, value: Any, segments: Any
) -> tuple[jax.Array, Any]:
    args = query, key, value, *segments
    layout = _layout(kv_heads, args, (query, query[..., 0]))
    y, log_total = logical_shard_map(_Forward(how), layout, *args)
    return y, (query, key, value, segments, y, log_total)


def _attend_backward(how: Scores, kv_heads: Any, saved: Any, ct: jax.Array) -> tuple[Any, ...]:
    query, key, value, segments, y, log_total = saved
    args = query, key, value, y, ct, log_total, *segments
    layout = _layout(kv_heads, args, args[:3])
    return *logical_shard_map(_Backward(how), layout, *args), None


_attend.defvjp(_attend_forward, _attend_backward)


def _layout(kv_heads: Any, operands: tuple[jax.Array, ...], results: tuple[jax.Array, ...]) -> Layout:
    dims = "batch", _SEQUENCE, kv_heads, None, None
    of = lambda arrays: tuple(dims[: x.ndim] for x in arrays)
    names = tuple(name for name in (kv_heads, _SEQUENCE, "batch") if name)
    return Layout(names, of(operands), of(results), free=("batch", *names[:-2]))


@dataclasses.dataclass(frozen=True)
class _Forward:
    """Attention of the queries of one device to all keys.

    Attributes:
      how: which scores, and how.
      axes: the mesh axes that the sequence is divided over.
    """

    how: Scores
    axes: tuple[str, ...] = ()

    def over(self, axes: Axes) -> _Forward:
        return dataclasses.replace(self, axes=axes[_SEQUENCE])

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *segments: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The attended values [batch, length, kv_heads, group, head_dim], and the logarithm of the sum of
        exp(score), [batch, length, kv_heads, group]."""
        ring = Ring.of(self.axes, query.shape[1], self.how.causal, self.how.window)
        query, key, value, *dealt = ring.deal(query, key, value, *segments)
        own = dealt[0] if dealt else None
        queries = Queries(ring.starts(ring.number), own, query)

        def add(softmax: Any, moving: Any, source: jax.Array) -> tuple[Any, Any]:
            keys = Keys(ring.starts(source), *moving)
            return add_keys(self.how, softmax, queries, keys), moving

        softmax, _ = ring.turn(add, no_scores(query), (own, key, value))
        y, log_total = finish(softmax)
        y, log_total = ring.collect(y.astype(query.dtype), jnp.moveaxis(log_total, -1, 2))
        return y, log_total


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The gradients of queries, keys and values of one device; attributes as of `_Forward`."""

    how: Scores
    axes: tuple[str, ...] = ()

    def over(self, axes: Axes) -> _Backward:
        return dataclasses.replace(self, axes=axes[_SEQUENCE])

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        y: jax.Array,
        ct: jax.Array,
        log_total: jax.Array,
        *segments: jax.Array,
    ) -> tuple[jax.Array, ...]:
        ring = Ring.of(self.axes, query.shape[1], self.how.causal, self.how.window)
        inner = jnp.einsum("...d,...d->...", y, ct, preferred_element_type=log_total.dtype)
        dtypes = query.dtype, key.dtype, value.dtype
        query, key, value, ct, log_total, inner, *dealt = ring.deal(
            query, key, value, ct, log_total, inner, *segments
        )
        own = dealt[0] if dealt else None
        queries = Queries(ring.starts(ring.number), own, query)
        known = Known(ct, *(jnp.moveaxis(x, 2, -1) for x in (log_total, inner)))

        def add(dq: Any, moving: Any, source: jax.Array) -> tuple[Any, Any]:
            *of_keys, dkv = moving
            keys = Keys(ring.starts(source), *of_keys)
            dq, dkv = add_gradients(self.how, dq, dkv, queries, known, keys)
            return dq, (*of_keys, dkv)

        dq, dk, dv = (jnp.zeros(x.shape, log_total.dtype) for x in (query, key, value))
        dq, moved = ring.turn(add, dq, (own, key, value, (dk, dv)))
        dk, dv = ring.send(moved[-1], -ring.hops)  # home
        return tuple(ring.collect(*(x.astype(dtype) for x, dtype in zip((dq, dk, dv), dtypes))))
