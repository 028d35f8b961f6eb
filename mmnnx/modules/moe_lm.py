"""A decoder-only language model whose feed-forward layers are mixtures of experts: one config, one file."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mmnnx.modules.cross_entropy import mean_cross_entropy
from mmnnx.modules.lm import LM, Block, LMConfig, types
from mmnnx.modules.moe import MoE, MoEAux
from mmnnx.modules.presets import MOE_PRESETS
from mmnnx.modules.stack import apply_layers


@dataclasses.dataclass(frozen=True)
class MoELMConfig(LMConfig):
    """The sizes of a `MoELM`: those of `LMConfig`, and of its experts.

    Args:
      experts, top_k, capacity_factor, normalize: as in `MoE`; `mlp` is the size of an expert, and of a dense
        layer.
      every: block number `every` (counted from 1) and each multiple of it have experts; the others are dense.
      load_balancing: weight in the loss of the sum over blocks of their load-balancing losses.
      router_z: that of their router z-losses.

    `preset` knows "mixtral-8x7b", "deepseek-v3-like", "moe-62b" and "tiny-moe".

    Raises:
      ValueError: as `LMConfig`; `every` outside 1 to layers, or above 1 where blocks are scanned.

    Example:
      >>> MoELMConfig.preset("mixtral-8x7b", layers=2).experts
      8
    """

    experts: int = 8
    top_k: int = 2
    capacity_factor: float | None = None
    normalize: bool = True
    every: int = 1
    load_balancing: float = 0.01
    router_z: float = 0.001

    presets: ClassVar[dict[str, dict[str, Any]]] = MOE_PRESETS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.every <= self.layers:
            raise ValueError(
                f"every={self.every} leaves no experts in {self.layers} blocks: use 1 to {self.layers}"
            )
        if self.scan and self.every > 1:
            raise ValueError(f"scan stacks blocks of one kind, and every={self.every} makes two: use every=1")


class MoEBlock(Block):
    """A block of `LM` with experts or a dense layer, which sums up the `MoEAux` of routers.

    It maps ([batch, length, width], `MoEAux`) to the same, and adds that of its own router.
    """

    def __init__(self, config: MoELMConfig, *, sparse: bool, rngs: nnx.Rngs):
        self.sparse = sparse
        super().__init__(config, rngs=rngs)

    def make_mlp(self, config: Any, rngs: nnx.Rngs) -> nnx.Module:
        if not self.sparse:
            return super().make_mlp(config, rngs)
        sizes = (config.width, config.mlp, config.experts, config.top_k)
        return MoE(
            *sizes,
            capacity_factor=config.capacity_factor,
            normalize=config.normalize,
            out_init=nnx.initializers.zeros,
            rngs=rngs,
            **types(config),
        )

    def __call__(self, x: Any, *, cache: Any = None, **options: Any) -> Any:
        """(x, aux) to the same; with a cache, (that, the next cache). `options` are those of `Block`."""
        x, aux = x
        x, cache = self.attend(x, cache, **options)
        y = self.mlp(self.mlp_norm(x))
        if self.sparse:
            y, own = y
            aux = jax.tree.map(jnp.add, aux, own)
        return (x + y, aux) if cache is None else ((x + y, aux), cache)


class MoELM(LM):
    """`LM` with experts (Mixtral's shape, arXiv:2401.04088, where every block has them and none is dropped).

    The router losses of each block are sent with the activations: two scalars at each boundary of stages.
    They are computed over the tokens of one call, not row by row: under `mm.microbatch` the mean of the
    microbatches' losses is not quite that of the whole batch. With a `capacity_factor` a token's experts may
    depend on the tokens before it in its row, and on later ones whose earlier choices take a slot: decoding
    with a cache then differs from the full forward. Generate without one.

    Example:
      >>> model = MoELM(MoELMConfig(layers=2), rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((1, 16), jnp.int32)).shape
      (1, 16, 256)
      >>> model.routed(jnp.zeros((1, 16), jnp.int32))[1].fraction.shape
      (8,)
    """

    config: MoELMConfig

    def make_block(self, index: int, rngs: nnx.Rngs) -> nnx.Module:
        """Block number `index`."""
        sparse = (index + 1) % self.config.every == 0
        return MoEBlock(self.config.of_block(index), sparse=sparse, rngs=rngs)

    def routed(self, tokens: jax.Array, *, cache: Any = None, **options: Any) -> Any:
        """The output of the last block, [batch, length, width], and the sum over blocks of their `MoEAux`.

        With a cache, (that, the next cache). `options` are those of `Block`.
        """
        x = self.embedded(tokens, cache=cache, **options)
        zero = jnp.zeros(())
        carried = (x, MoEAux(zero, zero, jnp.zeros(self.config.experts), zero))
        if self.config.scan:
            return self.blocks(carried, cache=cache, **options)
        return apply_layers(self.blocks, carried, cache=cache, remat=self.config.remat, **options)

    def hidden(self, tokens: jax.Array, *, cache: Any = None, **options: Any) -> Any:
        """The output of the last block: [batch, length, width]; with a cache, (that, the next cache)."""
        if cache is None:
            return self.routed(tokens, **options)[0]
        (x, _), cache = self.routed(tokens, cache=cache, **options)
        return x, cache

    def loss_of_labels(
        self, tokens: jax.Array, labels: jax.Array, weights: jax.Array | None, **options: Any
    ) -> jax.Array:
        """Cross-entropy, and the weighted losses of the routers.

        The latter count padding as well, and are times the sum of `weights`.
        """
        x, aux = self.routed(tokens, **options)
        loss = mean_cross_entropy(self.logits, x, labels, self.config.loss_chunks, weights)
        routers = self.config.load_balancing * aux.load_balancing + self.config.router_z * aux.router_z
        return loss + routers * (1.0 if weights is None else weights.sum())
