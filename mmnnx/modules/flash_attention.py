"""Attention by a kernel for TPUs, which never has all scores in memory, for the backward either."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
from jax import lax

from mmnnx.modules.chunked_attention import chunked_attention
from mmnnx.modules.masks import segment_mask
from mmnnx.sharding.logical_shard_map import Layout, logical_shard_map

# Imported where it is used: it brings Pallas along.
_KERNELS = "jax.experimental.pallas.ops.tpu.splash_attention"


def flash_attention(
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
    """Scaled dot-product attention of a sequence to itself, on TPUs by JAX's SplashAttention kernel.

    The kernel (FlashAttention, arXiv:2205.14135, that leaves out blocks which the mask does) is for lengths
    that 128 divides. Other lengths, and other platforms, make all scores, as `jax.nn` does.

    Over the devices of a task rows of the batch and key-value heads are divided. Where these heads are fewer
    than the devices, each of them computes all heads.

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
      [batch, length, heads, head_dim].

    Example:
      >>> x = jnp.ones((2, 128, 4, 64))
      >>> flash_attention(x, x, x, causal=True).shape
      (2, 128, 4, 64)
    """
    batch, length, _, head_dim = query.shape
    by_group = query.reshape(batch, length, key.shape[2], -1, head_dim)
    queries, keys = ("batch", None, kv_heads, None, None), ("batch", None, kv_heads, None)
    segments = () if segment_ids is None else (segment_ids,)
    layout = Layout(
        names=tuple(name for name in (kv_heads, "batch") if name),
        operands=(queries, keys, keys, *[("batch", None)] * len(segments)),
        results=(queries,),
    )
    attend = _Attend(causal, window, head_dim**-0.5 if scale is None else scale, softcap)
    (found,) = logical_shard_map(attend, layout, by_group, key, value, *segments)
    return found.reshape(query.shape)


@dataclasses.dataclass(frozen=True)
class _Attend:
    """Attention of queries [batch, length, kv_heads, group, head_dim]."""

    causal: bool
    window: int | None
    scale: float
    softcap: float | None

    def __call__(self, *args: jax.Array) -> tuple[jax.Array]:
        if args[0].shape[1] % 128:
            return (self.whole(*args),)
        return (lax.platform_dependent(*args, tpu=self.by_kernel, default=self.whole),)

    def whole(self, query: jax.Array, key: jax.Array, value: jax.Array, *segments: jax.Array) -> jax.Array:
        """With all scores at once."""
        batch, length, kv_heads, group, head_dim = query.shape
        found = chunked_attention(
            query.reshape(batch, length, kv_heads * group, head_dim),
            key,
            value,
            segment_mask(segments[0]) if segments else None,
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
        )
        return found.reshape(query.shape)

    def by_kernel(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *segments: jax.Array,
        interpret: bool = False,
    ) -> jax.Array:
        """By the kernel, for a length that 128 divides."""
        kernels, masks = (
            importlib.import_module(f"{_KERNELS}.splash_attention_{part}") for part in ("kernel", "mask")
        )
        batch, length, kv_heads, group, head_dim = query.shape
        block = next(size for size in (512, 256, 128) if length % size == 0)
        own: Any = masks.FullMask((length, length))
        if self.window is not None:
            ahead = 0 if self.causal else self.window - 1
            own = masks.LocalMask((length, length), (self.window - 1, ahead), 0)
        elif self.causal:
            own = masks.CausalMask((length, length))
        kernel = kernels.make_splash_mha(
            mask=masks.MultiHeadMask([own] * (kv_heads * group)),
            block_sizes=kernels.BlockSizes(
                **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), block),
                **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), block),
                **dict.fromkeys(("block_q_dq", "block_kv_dq"), block),
            ),
            attn_logits_soft_cap=self.softcap,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        by_head = (query * self.scale).reshape(batch, length, -1, head_dim).swapaxes(1, 2)
        ids = [kernels.SegmentIds(s, s) for s in segments]
        attend = jax.vmap(lambda q, k, v, *ids: kernel(q, k, v, *ids))
        found = attend(by_head, key.swapaxes(1, 2), value.swapaxes(1, 2), *ids)
        return found.swapaxes(1, 2).reshape(query.shape).astype(query.dtype)
