"""GPT-2 (Radford et al., 2019): `LM` with learned positions, LayerNorm, biases, and an MLP with GELU."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mmnnx.modules.embed import Embed
from mmnnx.modules.lm import LM, SMALL, Block, LMConfig, causal_attention, types
from mmnnx.modules.logical import constrain
from mmnnx.modules.mlp import MLP
from mmnnx.modules.norm import LayerNorm


@dataclasses.dataclass(frozen=True)
class GPT2Config(LMConfig):
    """The sizes of a `GPT2`: those of `LMConfig`, without what is about rotary positions.

    Args:
      positions: the tokens in the longest sequence.

    Raises:
      ValueError: as `LMConfig`, or for no positions.

    Example:
      >>> GPT2Config(positions=128).tied
      True
    """

    kv_heads: int = 4
    mlp: int = 512
    tied: bool = True
    norm_eps: float = 1e-5
    bias: bool = True
    positions: int = 1024

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    norm: ClassVar[Any] = LayerNorm

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions < 1:
            raise ValueError(f"positions={self.positions}: a sequence has at least one token")


class GPT2Block(Block):
    """A block of `LM` without rotary positions, with biases, and with an MLP."""

    def make_attention(self, config: LMConfig, rngs: nnx.Rngs) -> nnx.Module:
        return causal_attention(config, rngs, rotary_base=None, out_bias=config.bias)

    def make_mlp(self, config: LMConfig, rngs: nnx.Rngs) -> nnx.Module:
        zeros = nnx.initializers.zeros
        return MLP(config.width, config.mlp, bias=config.bias, out_init=zeros, rngs=rngs, **types(config))


class GPT2(LM):
    """Next-token model of the shape of GPT-2. A position beyond the last one becomes NaN.

    Raises:
      ValueError: when called with more tokens than positions.

    Example:
      >>> GPT2(GPT2Config(layers=2), rngs=nnx.Rngs(0))(jnp.zeros((1, 16), jnp.int32)).shape
      (1, 16, 256)
    """

    config: GPT2Config

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        axes: dict[str, Any] = dict(embedding_axes=(None, "embed"), embedding_init=SMALL)
        self.positions = Embed(config.positions, config.width, rngs=rngs, **axes, **types(config))

    def make_block(self, index: int, rngs: nnx.Rngs) -> nnx.Module:
        """Block number `index`."""
        return GPT2Block(self.config.of_block(index), rngs=rngs)

    def embedded(
        self, tokens: jax.Array, *, positions: jax.Array | None = None, cache: Any = None, **options: Any
    ) -> jax.Array:
        """The input of the first block, [batch, length, width]: embeddings of tokens and of positions."""
        if positions is None:
            first = None if cache is None else cache[0]
            if first is not None and self.config.scan:
                first = jax.tree.map(lambda stacked: stacked[0], first)
            count = tokens.shape[1]
            if count > self.config.positions:
                raise ValueError(
                    f"{count} tokens are more than the {self.config.positions} learned positions"
                )
            positions = jnp.arange(count) if first is None else first.positions(count)
        return constrain(self.embed(tokens) + self.positions(positions), "batch", "sequence", "embed")
