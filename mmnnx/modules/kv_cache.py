"""Keys and values of the tokens that attention has seen, as a plain pytree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The keys and values that one attention layer decodes with.

    Rows are filled from the front, and what lies at `length` or beyond has no meaning: nothing attends to it,
    and the next tokens are written over it. So prompts of several lengths are padded on the right, and after
    the prefill `with_length` says how many tokens of each row count.

    It holds no Variables: a call takes one and returns the next, which lives where it is computed.

    Attributes:
      key: [batch, capacity, kv_heads, head_dim].
      value: [batch, capacity, kv_heads, head_dim].
      length: int32, how many tokens each row holds: a scalar, or [batch] where rows differ.

    Example:
      >>> cache = KVCache.zeros(2, 16, 4, 8)
      >>> cache = cache.append(jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 4, 8)))
      >>> cache.with_length(jnp.array([5, 3])).positions(1).tolist()
      [[5], [3]]
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array

    @classmethod
    def zeros(
        cls, batch: int, capacity: int, kv_heads: int, head_dim: int, dtype: Any = jnp.float32
    ) -> KVCache:
        """An empty cache for `capacity` tokens in each of `batch` rows."""
        shape = (batch, capacity, kv_heads, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

    @property
    def capacity(self) -> int:
        """For how many tokens there is room in a row."""
        return self.key.shape[1]

    def positions(self, tokens: int) -> jax.Array:
        """Where the next `tokens` of each row will lie: int32 [batch, tokens], counted from 0."""
        start = jnp.broadcast_to(self.length, self.key.shape[:1])
        return start[:, None] + jnp.arange(tokens, dtype=jnp.int32)

    def with_length(self, length: Any) -> KVCache:
        """The same with other lengths, an integer or int [batch]: after padding, or to take tokens back."""
        return replace(self, length=jnp.asarray(length, jnp.int32))

    def append(self, key: jax.Array, value: jax.Array) -> KVCache:
        """With the keys and values of the next tokens, [batch, tokens, kv_heads, head_dim], at `positions`.

        They are kept in the cache's dtype; those beyond the capacity are not written. The length counts them
        all the same, so that it can tell that there were too many.

        Raises:
          ValueError: other shapes, or more tokens than the capacity.
        """
        batch, tokens, *rest = key.shape
        if key.shape != value.shape or (batch, *rest) != (self.key.shape[0], *self.key.shape[2:]):
            raise ValueError(
                f"keys {key.shape} and values {value.shape} do not fit a cache of {self.key.shape}: all are "
                "[batch, tokens, kv_heads, head_dim]"
            )
        if tokens > self.capacity:
            raise ValueError(f"{tokens} tokens do not fit a cache for {self.capacity}: make a larger one")
        positions = self.positions(tokens)

        @jax.vmap
        def write(old: jax.Array, row: jax.Array, new: jax.Array) -> jax.Array:
            slots = old.at[row]
            return slots.set(new.astype(old.dtype), mode="drop", indices_are_sorted=True, unique_indices=True)

        return KVCache(
            write(self.key, positions, key), write(self.value, positions, value), self.length + tokens
        )
