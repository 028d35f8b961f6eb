"""Attention: multi-head, grouped-query, causal, sliding window, cross, and decoding with a cache."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mmnnx.modules.chunked_attention import chunked_attention
from mmnnx.modules.flash_attention import flash_attention
from mmnnx.modules.kv_cache import KVCache
from mmnnx.modules.linear import KERNEL_INIT, Linear, Names
from mmnnx.modules.logical import constrain
from mmnnx.modules.masks import cache_mask, combine, segment_mask
from mmnnx.modules.norm import RMSNorm
from mmnnx.modules.ring_attention import ring_attention
from mmnnx.modules.rotary import Scaling, rotary

_OF_ITSELF: dict[Any, Any] = {"flash": flash_attention, "ring": ring_attention}
"""Attention of a sequence to itself without a mask, by the name of the implementation."""


class Attention(nnx.Module):
    """Scaled dot-product attention (arXiv:1706.03762) with its four projections, on `jax.nn`.

    A subclass overrides `attend`, which gets queries, keys and values by head, and the mask. ("flash" and
    "ring" do without it.)

    Args:
      width: features of input and output.
      heads: number of query heads.
      kv_heads: number of key-value heads, each for `heads / kv_heads` neighbouring query heads
        (arXiv:2305.13245). Default: `heads`.
      head_dim: features of a head. Default: `width / heads`.
      memory_width: features of what cross attention looks at. Default: `width`.
      causal: each token sees itself and those before it in the array.
      window: each token sees the nearest `window` keys up to its own, and, unless causal, as many from its
        own onwards.
      rotary_base: base of rotary positions. Default: no rotary positions.
      rotary_scaling: the scaling of their frequencies.
      qk_norm: queries and keys are normalised, by head and before rotation, by an RMSNorm (as in Qwen3); or
        the class of the norm.
      norm_epsilon: its epsilon.
      scale: what scores are multiplied by. Default: 1 / sqrt(head_dim).
      softcap: bound of the scores (see `chunked_attention`). Default: none.
      bias: whether the projections to query, key and value have biases.
      out_bias: whether the projection of the result has one.
      implementation: of `jax.nn.dot_product_attention`: None, "xla", or "cudnn" (flash attention on GPUs);
        or, for a sequence to itself, "flash", which is `flash_attention`, on TPUs, and "ring", which is
        `ring_attention`, for sequences that are divided over devices. With a `mask`, a `memory` or a cache
        these two are as None.
      chunks: parts of the queries whose scores are made one after the other (see `chunked_attention`); of
        fewer queries, as in decoding, all scores are made at once.
      query_axes: logical names of the axes of the query kernel [width, heads * head_dim]; the last also names
        the heads of activations.
      kv_axes: the same for key and value [width, kv_heads * head_dim].
      out_axes: of the kernel of the result [heads * head_dim, width].
      kernel_init: initialiser of the kernels of query, key and value.
      out_init: initialiser of the kernel of the result.
      bias_init: initialiser of the biases.
      rngs: whose `params` stream makes them.
      dtype: what is computed in (softmax in float32). Default: inferred from input and weights.
      param_dtype: dtype of the weights.

    Raises:
      ValueError: sizes that do not fit each other, a window or chunks below one, or scaling without rotary
        positions.

    Example:
      >>> attention = Attention(16, heads=4, kv_heads=2, causal=True, rotary_base=1e4, rngs=nnx.Rngs(0))
      >>> attention(jnp.ones((2, 5, 16))).shape
      (2, 5, 16)
      >>> y, cache = attention(jnp.ones((2, 5, 16)), cache=attention.init_cache(2, 8))
      >>> y, cache = attention(jnp.ones((2, 1, 16)), cache=cache)
      >>> int(cache.length)
      6
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        memory_width: int | None = None,
        causal: bool = False,
        window: int | None = None,
        rotary_base: float | None = None,
        rotary_scaling: Scaling | None = None,
        qk_norm: bool | type[nnx.Module] = False,
        norm_epsilon: float = 1e-6,
        scale: float | None = None,
        softcap: float | None = None,
        bias: bool = False,
        out_bias: bool = False,
        implementation: Literal["xla", "cudnn", "flash", "ring"] | None = None,
        chunks: int = 1,
        query_axes: Names = ("embed", "heads"),
        kv_axes: Names = ("embed", "kv_heads"),
        out_axes: Names = ("heads", "embed"),
        kernel_init: nnx.Initializer = KERNEL_INIT,
        out_init: nnx.Initializer = KERNEL_INIT,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        if min(heads, self.kv_heads) < 1:
            raise ValueError(f"heads={heads}, kv_heads={self.kv_heads}: attention has at least one of each")
        self.head_dim = width // heads if head_dim is None else head_dim
        self.memory_width = width if memory_width is None else memory_width
        self.causal, self.window = causal, window
        self.scale, self.softcap = scale, softcap
        self.implementation, self.chunks = implementation, chunks
        self.rotary_base, self.rotary_scaling = rotary_base, rotary_scaling
        self.heads_axes, self.kv_heads_axes = tuple(query_axes[-1:]), tuple(kv_axes[-1:])
        self.dtype, self.param_dtype = dtype, param_dtype
        if head_dim is None and width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads: give head_dim=")
        if heads % self.kv_heads:
            raise ValueError(f"{heads} heads are not divisible by {self.kv_heads} key-value heads")
        if rotary_base is not None and self.head_dim % 2:
            raise ValueError(f"rotary positions turn pairs of features, and a head has {self.head_dim}")
        if rotary_base is None and rotary_scaling is not None:
            raise ValueError("rotary_scaling= without rotary_base=: there are no rotary positions to scale")
        if chunks < 1:
            raise ValueError(f"chunks={chunks}: the queries are at least one part")
        if window is not None and window < 1:
            raise ValueError(
                f"a window of {window} keys leaves nothing to attend to: it counts the token's own"
            )

        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)

        def project(inputs: int, heads: int, axes: Names) -> Linear:
            options = dict(use_bias=bias, kernel_init=kernel_init, bias_init=bias_init, **types)
            return Linear(inputs, heads * self.head_dim, kernel_axes=axes, rngs=rngs, **options)

        self.query = project(width, heads, query_axes)
        self.key = project(self.memory_width, self.kv_heads, kv_axes)
        self.value = project(self.memory_width, self.kv_heads, kv_axes)
        out = dict(use_bias=out_bias, kernel_init=out_init, bias_init=bias_init, **types)
        self.out = Linear(heads * self.head_dim, width, kernel_axes=out_axes, rngs=rngs, **out)
        if qk_norm:
            norm = dict(epsilon=norm_epsilon, scale_axes=(None,), rngs=rngs, **types)
            make: Any = RMSNorm if qk_norm is True else qk_norm
            self.query_norm, self.key_norm = make(self.head_dim, **norm), make(self.head_dim, **norm)
        self.qk_norm = bool(qk_norm)

    def init_cache(self, batch: int, capacity: int, dtype: Any = None) -> KVCache:
        """An empty cache for `capacity` tokens a row, in `dtype`; default: `dtype`, else `param_dtype`."""
        dtype = dtype or self.dtype or self.param_dtype
        return KVCache.zeros(batch, capacity, self.kv_heads, self.head_dim, dtype)

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None,
        *,
        causal: bool,
        window: int | None,
    ) -> jax.Array:
        """The attended values of each query: [batch, queries, heads, head_dim].

        Args:
          query: [batch, queries, heads, head_dim], normalised and rotated, not yet scaled.
          key: [batch, keys, kv_heads, head_dim].
          value: the same shape.
          mask: bool, broadcasting to [batch, heads, queries, keys]; None where there is none. True is seen.
          causal: whether queries see no later keys; with a cache the mask says so instead.
          window: the window, as `Attention` has it; with a cache None likewise.
        """
        return chunked_attention(
            query,
            key,
            value,
            mask,
            causal=causal,
            window=window,
            scale=self.scale,
            softcap=self.softcap,
            chunks=1 if query.shape[1] < self.chunks else self.chunks,
            implementation=None if self.implementation in _OF_ITSELF else self.implementation,
        )

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        memory_segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """Attention of `x` to itself, to `memory`, or to what a cache holds and then itself.

        Args:
          x: [batch, queries, width].
          memory: [batch, keys, memory_width], for cross attention.
          mask: bool, True where a query sees a key, broadcasting to [batch, heads, queries, keys] (all four
            dimensions given); with a cache the keys are its capacity. It only takes away from what
            `causal`, `window` and segments leave.
          segment_ids: int [batch, queries]: tokens see those of their own segment only.
          memory_segment_ids: int [batch, keys], of `memory`: a token sees those of its segment's number.
          positions: int [batch, queries] or [queries], for rotary positions alone. Default: 0, 1, ..., with a
            cache from its length on.
          cache: the tokens before `x`, for a causal attention. One call may take many tokens (prefill) or one
            (decode), and gives what a call with all of them would have given at these.

        Returns:
          [batch, queries, width]; with a cache (that, the cache with `x` in it). A query that sees no key
          gets the mean of all values (but for "cudnn"). A token beyond the capacity of the cache is not
          kept, and gets NaN.

        Raises:
          ValueError: shapes that do not fit, or arguments that do not go together.
          TypeError: a mask that is not bool.
        """
        self._check(x, memory, segment_ids, memory_segment_ids, cache)
        source = x if memory is None else memory
        # XLA shards the length dimension, like the sequence around, unless the heads take its mesh axis.
        query = self._by_head(self.query(x), self.heads_axes)
        key = self._by_head(self.key(source), self.kv_heads_axes)
        value = self._by_head(self.value(source), self.kv_heads_axes)
        if self.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        places = jnp.arange(x.shape[1]) if cache is None else cache.positions(x.shape[1])
        if self.rotary_base is not None:
            positions = places if positions is None else positions
            query = rotary(query, positions, self.rotary_base, self.rotary_scaling)
            key = rotary(key, positions, self.rotary_base, self.rotary_scaling)
        of_itself = _OF_ITSELF.get(self.implementation)
        if cache is None and mask is None and memory is None and of_itself is not None:
            y = of_itself(
                query,
                key,
                value,
                segment_ids,
                causal=self.causal,
                window=self.window,
                scale=self.scale,
                softcap=self.softcap,
                kv_heads=next(iter(self.kv_heads_axes), None),
            )
        elif cache is None:
            same = None if segment_ids is None else segment_mask(segment_ids, memory_segment_ids)
            seen = combine(query, key, mask, same)
            y = self.attend(query, key, value, seen, causal=self.causal, window=self.window)
        else:
            cache = cache.append(key, value)
            key, value = cache.key.astype(query.dtype), cache.value.astype(query.dtype)
            before = cache_mask(places, cache.capacity, self.window)
            seen = combine(query, key, mask, before)
            y = self.attend(query, key, value, seen, causal=False, window=None)
            y = jnp.where((places < cache.capacity)[:, :, None, None], y, jnp.nan)
        y = self.out(constrain(y, "batch", ..., *self.heads_axes, None).reshape(*x.shape[:2], -1))
        return y if cache is None else (y, cache)

    def _by_head(self, x: jax.Array, axes: Names) -> jax.Array:
        x = x.reshape(*x.shape[:2], -1, self.head_dim)
        return constrain(x, "batch", ..., *axes, None)

    def _check(self, x: Any, memory: Any, segments: Any, memory_segments: Any, cache: Any) -> None:
        if x.ndim != 3 or (memory is not None and memory.ndim != 3):
            other = "" if memory is None else f" and {memory.shape}"
            raise ValueError(f"attention takes [batch, length, features], not {x.shape}{other}")
        inputs, name = (x, "x") if memory is None else (memory, "memory")
        if inputs.shape[-1] != self.memory_width:
            raise ValueError(
                f"keys and values are made of {self.memory_width} features, and {name} is {inputs.shape}: "
                "memory_width= says how many memory has"
            )
        if memory is not None and (self.causal or self.window or self.rotary_base is not None):
            raise ValueError(
                "causal=, window= and rotary_base= are about the order of one sequence: cross attention, to "
                "memory, is made without them"
            )
        if cache is not None and (not self.causal or segments is not None):
            raise ValueError(
                "a cache is for attention with causal=True, and without segment_ids: rows of several lengths "
                "are padded on the right (see KVCache)"
            )
        if (memory_segments is None) != (segments is None or memory is None):
            raise ValueError("cross attention with segments takes both segment_ids= and memory_segment_ids=")
        for ids, tokens, name in (
            (segments, x, "segment_ids"),
            (memory_segments, memory, "memory_segment_ids"),
        ):
            if ids is not None and ids.shape != tokens.shape[:2]:
                raise ValueError(f"{name} is [batch, length], here {tokens.shape[:2]}, not {ids.shape}")
