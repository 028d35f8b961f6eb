"""Gemma 2 and 3 (arXiv:2408.00118, arXiv:2503.19786): `LM` with norms on both sides and local attention."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from mmnnx.modules.lm import LM, Block, LMConfig, causal_attention, make_norm, types
from mmnnx.modules.logical import constrain
from mmnnx.modules.mlp import SwiGLU
from mmnnx.modules.norm import OffsetRMSNorm


@dataclasses.dataclass(frozen=True)
class GemmaConfig(LMConfig):
    """The sizes of a `Gemma`: those of `LMConfig`, and what is bounded and what is local.

    Args:
      local_rotary_base: base of the wavelengths in blocks with a window, whose positions are not scaled.
        Default: `rotary_base` and `rotary_scaling`, as in the others.
      attention_scale: what attention scores are multiplied by. Default: 1 / sqrt(head_dim).
      attention_softcap: bound of attention scores.
      logits_softcap: bound of logits.

    Example:
      >>> GemmaConfig(logits_softcap=30.0).tied
      True
    """

    tied: bool = True
    local_rotary_base: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    norm: ClassVar[Any] = OffsetRMSNorm

    def of_block(self, index: int) -> Self:
        """The config that block number `index` is made with: its window, and the base of its positions."""
        own = super().of_block(index)
        if own.windows[0] is not None and self.local_rotary_base is not None:
            return dataclasses.replace(own, rotary_base=self.local_rotary_base, rotary_scaling=None)
        return own


class GemmaBlock(Block):
    """A block of `LM` whose attention and GEGLU are normalised before and after."""

    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.post_attention_norm = make_norm(config, rngs)
        self.post_mlp_norm = make_norm(config, rngs)

    def make_attention(self, config: Any, rngs: nnx.Rngs) -> nnx.Module:
        norm = OffsetRMSNorm if config.qk_norm else False
        bounds = dict(scale=config.attention_scale, softcap=config.attention_softcap)
        return causal_attention(config, rngs, qk_norm=norm, **bounds)

    def make_mlp(self, config: LMConfig, rngs: nnx.Rngs) -> nnx.Module:
        zeros = nnx.initializers.zeros
        return SwiGLU(
            config.width, config.mlp, activation=nnx.gelu, out_init=zeros, rngs=rngs, **types(config)
        )

    def __call__(self, x: jax.Array, *, cache: Any = None, **options: Any) -> Any:
        """[batch, length, width] to the same; with a cache, (that, the next cache). See `Block`."""
        x, cache = self.attend(x, cache, **options)
        x = x + self.post_mlp_norm(self.mlp(self.mlp_norm(x)))
        return x if cache is None else (x, cache)

    def attend(self, x: jax.Array, cache: Any, **options: Any) -> tuple[jax.Array, Any]:
        """The first half: (`x` [batch, length, width] and what attention adds to it, the next cache)."""
        x = constrain(x, "batch", "sequence", "embed")
        y = self.attention(self.attention_norm(x), cache=cache, **options)
        y, cache = (y, None) if cache is None else y
        return x + self.post_attention_norm(y), cache


class Gemma(LM):
    """Next-token model of the shape of Gemma 2 and 3 (text).

    Example:
      >>> config = GemmaConfig(layers=2, window=(8, None), attention_softcap=50.0)
      >>> Gemma(config, rngs=nnx.Rngs(0))(jnp.zeros((1, 16), jnp.int32)).shape
      (1, 16, 256)
    """

    config: GemmaConfig

    def make_block(self, index: int, rngs: nnx.Rngs) -> nnx.Module:
        """Block number `index`."""
        return GemmaBlock(self.config.of_block(index), rngs=rngs)

    def embedded(self, tokens: jax.Array, *, cache: Any = None, **options: Any) -> jax.Array:
        """The input of the first block, [batch, length, width]: embeddings times the root of the width."""
        x = super().embedded(tokens, cache=cache, **options)
        return x * jnp.asarray(math.sqrt(self.config.width), self.config.param_dtype).astype(x.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """Logits float32 [batch, length, vocab] from what `hidden` returns."""
        logits, cap = super().logits(x), self.config.logits_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
