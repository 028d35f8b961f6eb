"""Attention tile by tile: a softmax whose scores are never all there, with its own backward.

Queries and keys are in tiles, each with the position of its first token. A tile of scores is made, used and
dropped; one that no query of it sees a key in is not made (Rabe and Staats 2021, arXiv:2112.05682;
FlashAttention, arXiv:2205.14135). `ring_attention` calls this with the keys of one device after the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_LARGEST = 512  # tokens of a tile


class Queries(NamedTuple):
    """Queries in tiles.

    Attributes:
      start: int32 [tiles], the position of the first token of each.
      segments: int [tiles, batch, size], or None.
      query: [tiles, batch, size, kv_heads, group, head_dim].
    """

    start: jax.Array
    segments: jax.Array | None
    query: jax.Array


class Keys(NamedTuple):
    """Keys and values in tiles; `start` and `segments` as of `Queries`.

    Attributes:
      key, value: [tiles, batch, size, kv_heads, head_dim].
    """

    start: jax.Array
    segments: jax.Array | None
    key: jax.Array
    value: jax.Array


class Softmax(NamedTuple):
    """What is known of a softmax after some of its scores, in float32 at least.

    Attributes:
      values: [tiles, batch, kv_heads, group, size, head_dim], the sum of values times exp(score - highest).
      highest: [tiles, batch, kv_heads, group, size], the highest score.
      total: the same shape, the sum of exp(score - highest).
    """

    values: jax.Array
    highest: jax.Array
    total: jax.Array


class Known(NamedTuple):
    """What the backward knows of the queries: from the forward, and from behind it.

    Attributes:
      ct: the cotangent of the result, as `Queries.query`.
      log_total: [tiles, batch, kv_heads, group, size], the logarithm of the sum of exp(score).
      inner: the same shape, the inner product of result and cotangent.
    """

    ct: jax.Array
    log_total: jax.Array
    inner: jax.Array


@dataclasses.dataclass(frozen=True)
class Scores:
    """How scores are made, and which there are; as in `chunked_attention`.

    Attributes:
      causal, window, scale, softcap: as there; all positions are those of the array.
    """

    causal: bool
    window: int | None
    scale: float
    softcap: float | None

    def tile(self, queries: Queries, keys: Keys) -> tuple[jax.Array, jax.Array]:
        """Scores of one tile [batch, kv_heads, group, queries, keys], and a bool that broadcasts to them, of
        which are seen."""
        query, key = queries.query, keys.key
        scores = self.scale * _product("bqhgd,bkhd->bhgqk", query, key)
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        distance = queries.start - keys.start + jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
        seen = jnp.full(distance.shape, True)
        if self.causal:
            seen &= distance >= 0
        if self.window is not None:
            seen &= distance < self.window
            if not self.causal:
                seen &= distance > -self.window
        if queries.segments is not None and keys.segments is not None:
            same = queries.segments[:, :, None] == keys.segments[:, None]
            return scores, (seen & same)[:, None, None]
        return scores, seen

    def any_seen(self, queries: Queries, keys: Keys) -> jax.Array:
        """Whether a query of one tile sees a key of another, segments apart."""
        size, first = keys.key.shape[1], keys.start - queries.start
        seen = jnp.array(True)
        if self.causal:
            seen &= first < queries.query.shape[1]
        if self.window is not None:
            seen &= first > -self.window - size + 1
            if not self.causal:
                seen &= first < self.window + queries.query.shape[1] - 1
        return seen


def tile_size(length: int) -> int:
    """Tokens of a tile, of which `length` is a multiple."""
    return next((size for size in range(_LARGEST, 127, -1) if length % size == 0), length)


def in_tiles(x: jax.Array, size: int) -> jax.Array:
    """[batch, length, ...] as [tiles, batch, size, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def from_tiles(x: jax.Array) -> jax.Array:
    """The reverse of `in_tiles`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def no_scores(query: jax.Array) -> Softmax:
    """A softmax before its first score, for `Queries.query`."""
    tiles, batch, size, *heads, head_dim = query.shape
    wide = _wide(query)
    rows = jnp.full((tiles, batch, *heads, size), jnp.finfo(wide).min, wide)
    return Softmax(jnp.zeros((*rows.shape, head_dim), wide), rows, jnp.zeros_like(rows))


def add_keys(how: Scores, softmax: Softmax, queries: Queries, keys: Keys) -> Softmax:
    """A softmax with the scores of more keys in it."""

    def add(before: Softmax, queries: Queries, keys: Keys) -> Softmax:
        scores, seen = how.tile(queries, keys)
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        highest = jnp.maximum(before.highest, scores.max(-1))
        # Where nothing was seen so far they are ones, for all that was added; a first real score makes it 0.
        weights = jnp.exp(scores - highest[..., None])
        earlier = jnp.exp(before.highest - highest)
        values = _product("bhgqk,bkhd->bhgqd", weights.astype(keys.value.dtype), keys.value)
        return Softmax(
            before.values * earlier[..., None] + values, highest, before.total * earlier + weights.sum(-1)
        )

    def of_queries(tile: tuple[Queries, Softmax]) -> Softmax:
        queries, softmax = tile

        def next_keys(before: Softmax, keys: Keys) -> tuple[Softmax, None]:
            some = how.any_seen(queries, keys)
            return lax.cond(some, lambda s: add(s, queries, keys), lambda s: s, before), None

        return lax.scan(next_keys, softmax, keys)[0]

    return lax.map(of_queries, (queries, softmax))


def finish(softmax: Softmax) -> tuple[jax.Array, jax.Array]:
    """The values that a softmax comes to, in the order of `Queries.query`, and the logarithm of the sum of
    exp(score)."""
    values = softmax.values / softmax.total[..., None]
    return jnp.moveaxis(values, -2, 2), softmax.highest + jnp.log(softmax.total)


Pair = tuple[jax.Array, jax.Array]


def add_gradients(
    how: Scores, dq: jax.Array, dkv: Pair, queries: Queries, known: Known, keys: Keys
) -> tuple[jax.Array, Pair]:
    """The gradients of queries, and of keys and values, with what these keys add to them.

    All are in float32 at least, in tiles.
    """

    def add(sums: Any, queries: Queries, known: Known, keys: Keys) -> Any:
        dq, (dk, dv) = sums
        scores, seen = how.tile(queries, keys)
        weights = jnp.where(seen, jnp.exp(scores - known.log_total[..., None]), 0)
        dv += _product("bhgqk,bqhgd->bkhd", weights.astype(known.ct.dtype), known.ct)
        dweights = _product("bqhgd,bkhd->bhgqk", known.ct, keys.value)
        dscores = weights * (dweights - known.inner[..., None]) * how.scale
        if how.softcap is not None:
            dscores *= 1 - (scores / how.softcap) ** 2
        dscores = dscores.astype(queries.query.dtype)
        dq += _product("bhgqk,bkhd->bqhgd", dscores, keys.key)
        dk += _product("bhgqk,bqhgd->bkhd", dscores, queries.query)
        return dq, (dk, dv)

    def of_keys(dq: jax.Array, tile: tuple[Keys, Pair]) -> tuple[jax.Array, Pair]:
        keys, dkv = tile

        def next_queries(dkv: Pair, tile: tuple[Queries, Known, jax.Array]) -> tuple[Pair, jax.Array]:
            queries, known, dq = tile
            some = how.any_seen(queries, keys)
            dq, dkv = lax.cond(some, lambda s: add(s, queries, known, keys), lambda s: s, (dq, dkv))
            return dkv, dq

        dkv, dq = lax.scan(next_queries, dkv, (queries, known, dq))
        return dq, dkv

    return lax.scan(of_keys, dq, (keys, dkv))


def _product(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, preferred_element_type=_wide(operands[0]))


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
