"""Attention by a kernel for TPUs, which never has all scores in memory, for the backward either."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mmnnx import _compat
from mmnnx.modules.blockwise_attention import Scores
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

    The kernels of the backward read what that of the forward made. They have no derivatives: for second ones
    use another implementation.

    Over the devices of a task rows of the batch and key-value heads are divided. Devices that have parts of a
    sequence exchange them: each gets all of it, for some of the rows or heads (DeepSpeed-Ulysses,
    arXiv:2309.14509). Where these heads are fewer than the devices, each of them computes all heads.

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
    how = Scores(causal, window, head_dim**-0.5 if scale is None else scale, softcap)
    segments = () if segment_ids is None else (segment_ids,)
    return _attend(how, kv_heads, by_group, key, value, segments).reshape(query.shape)


# -------------------------------------------------------------------------------- over the devices of a task


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(how: Scores, kv_heads: Any, query: Any, key: Any, value: Any, segments: Any) -> jax.Array:
    args = query, key, value, *segments
    return logical_shard_map(_Attend(how), _layout(kv_heads, args, args[:1]), *args)[0]


def _attend_forward(
    how: Scores, kv_heads: Any, query: Any, key: Any, value: Any, segments: Any
) -> tuple[jax.Array, Any]:
    args = query, key, value, *segments
    layout = _layout(kv_heads, args, (query, query[..., 0]))
    y, log_total = logical_shard_map(_Forward(how), layout, *args)
    return y, (query, key, value, segments, y, log_total)


def _attend_backward(how: Scores, kv_heads: Any, saved: Any, ct: jax.Array) -> tuple[Any, ...]:
    query, key, value, segments, y, log_total = saved
    args = query, key, value, y, log_total, ct, *segments
    return *logical_shard_map(_Backward(how), _layout(kv_heads, args, args[:3]), *args), None


_attend.defvjp(_attend_forward, _attend_backward)


def _layout(kv_heads: Any, operands: tuple[jax.Array, ...], results: tuple[jax.Array, ...]) -> Layout:
    dims = "batch", "sequence", kv_heads, None, None
    of = lambda arrays: tuple(dims[: x.ndim] for x in arrays)
    names = tuple(name for name in (kv_heads, "batch") if name)
    return Layout(names, of(operands), of(results), free=names[::-1])


# --------------------------------------------------------------------------------------------- on one device


@dataclasses.dataclass(frozen=True)
class _Attend:
    """Attention of queries [batch, length, kv_heads, group, head_dim]."""

    how: Scores

    def __call__(self, *args: jax.Array) -> tuple[jax.Array]:
        return (_by_platform(partial(by_kernel, self.how), partial(with_all_scores, self.how), *args),)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The same, and what a kernel of the backward reads: the logarithm of the sum of exp(score), [batch,
    length, kv_heads, group]."""

    how: Scores

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, jax.Array]:
        def default(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
            return with_all_scores(self.how, *args), jnp.zeros(args[0].shape[:-1], jnp.float32)

        return _by_platform(partial(by_kernel_with_log_total, self.how), default, *args)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The gradients of queries, keys and values; by these, what the forward made, and the gradient of it."""

    how: Scores

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        def default(
            query: Any, key: Any, value: Any, y: Any, log_total: Any, ct: Any, *segments: Any
        ) -> tuple[jax.Array, ...]:
            of = lambda *args: with_all_scores(self.how, *args, *segments)
            return jax.vjp(of, query, key, value)[1](ct)

        return _by_platform(partial(gradients_by_kernel, self.how), default, *args)


def _by_platform(kernel: Callable[..., Any], default: Callable[..., Any], *args: jax.Array) -> Any:
    if args[0].shape[1] % 128:
        return default(*args)
    return lax.platform_dependent(*args, tpu=kernel, default=default)


def with_all_scores(
    how: Scores, query: jax.Array, key: jax.Array, value: jax.Array, *segments: jax.Array
) -> jax.Array:
    """Attention, with all scores at once."""
    batch, length, kv_heads, group, head_dim = query.shape
    found = chunked_attention(
        query.reshape(batch, length, kv_heads * group, head_dim),
        key,
        value,
        segment_mask(segments[0]) if segments else None,
        **dataclasses.asdict(how),
    )
    return found.reshape(query.shape)


# ------------------------------------------------------------------------------------------------- by kernels


def by_kernel(
    how: Scores,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *segments: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Attention by the kernel, for a length that 128 divides."""
    attend = _kernel(how, query.shape, interpret)
    found = jax.vmap(attend)(*_operands(how, query, key, value), *_ids(segments))
    return found.swapaxes(1, 2).reshape(query.shape).astype(query.dtype)


def by_kernel_with_log_total(
    how: Scores,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *segments: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The same, and what `gradients_by_kernel` reads."""
    attend = _kernel(how, query.shape, interpret, save_residuals=True)
    found, (log_total,) = jax.vmap(attend)(*_operands(how, query, key, value), *_ids(segments))
    y, log_total = (x.swapaxes(1, 2) for x in (found, log_total))
    return y.reshape(query.shape).astype(query.dtype), log_total.reshape(query.shape[:-1])


def gradients_by_kernel(
    how: Scores,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    y: jax.Array,
    log_total: jax.Array,
    ct: jax.Array,
    *segments: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Those of queries, keys and values, by what the kernel of the forward made."""
    attend = _kernel(how, query.shape, interpret)
    of_one = lambda *args: _compat.splash_attention_gradients(attend, *args)
    made = _by_head(y), _by_head(log_total), _by_head(ct)
    dq, dk, dv = jax.vmap(of_one)(*_operands(how, query, key, value), *made, *_ids(segments))
    dq = (dq * how.scale).swapaxes(1, 2).reshape(query.shape)
    return dq, dk.swapaxes(1, 2), dv.swapaxes(1, 2)


def _kernel(
    how: Scores, shape: tuple[int, ...], interpret: bool, *, save_residuals: bool = False
) -> Callable[..., Any]:
    masks = importlib.import_module(f"{_KERNELS}.splash_attention_mask")
    kernels = importlib.import_module(f"{_KERNELS}.splash_attention_kernel")
    _, length, kv_heads, group, _ = shape
    block = next(size for size in (512, 256, 128) if length % size == 0)
    own: Any = masks.FullMask((length, length))
    if how.window is not None:
        ahead = 0 if how.causal else how.window - 1
        own = masks.LocalMask((length, length), (how.window - 1, ahead), 0)
    elif how.causal:
        own = masks.CausalMask((length, length))
    made: Callable[..., Any] = kernels.make_splash_mha(
        mask=masks.MultiHeadMask([own] * (kv_heads * group)),
        block_sizes=kernels.BlockSizes(
            **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), block),
            **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), block),
            **dict.fromkeys(("block_q_dq", "block_kv_dq"), block),
        ),
        save_residuals=save_residuals,
        attn_logits_soft_cap=how.softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    return made


def _operands(how: Scores, query: jax.Array, key: jax.Array, value: jax.Array) -> list[jax.Array]:
    return [_by_head(query * how.scale), key.swapaxes(1, 2), value.swapaxes(1, 2)]


def _by_head(x: jax.Array) -> jax.Array:
    """[batch, length, kv_heads, group, ...] as [batch, heads, length, ...]."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:]).swapaxes(1, 2)


def _ids(segments: tuple[jax.Array, ...]) -> list[Any]:
    kernels = importlib.import_module(f"{_KERNELS}.splash_attention_kernel")
    return [kernels.SegmentIds(ids, ids) for ids in segments]
