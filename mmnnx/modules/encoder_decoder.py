"""An encoder-decoder transformer of the shape of T5 (arXiv:1910.10683): one config, one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmnnx.modules.attention import Attention
from mmnnx.modules.embed import Embed
from mmnnx.modules.linear import Linear
from mmnnx.modules.lm import SMALL, Block, LMConfig, make_norm, types
from mmnnx.modules.logical import constrain
from mmnnx.modules.stack import apply_layers
from mmnnx.sharding.incompatible_devices import advising


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
    """The sizes of an `EncoderDecoder`.

    Args:
      vocab: tokens of source and target.
      encoder_layers, decoder_layers: blocks of each.
      width, heads, mlp, dtype, param_dtype: as in `LMConfig`.
      pad: the token that fills up sources and targets. Nothing attends to it in a source, and it counts in no
        loss.
      start: the token that a target is predicted from at first; in T5 the same as `pad`.
      tied: the embedding is the output layer too.

    Raises:
      ValueError: as `LMConfig`; no blocks, or a token outside of the vocabulary.

    Example:
      >>> EncoderDecoderConfig(width=64).decoder_layers
      4
    """

    vocab: int = 256
    encoder_layers: int = 4
    decoder_layers: int = 4
    width: int = 128
    heads: int = 4
    mlp: int = 384
    pad: int = 0
    start: int = 0
    tied: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if min(self.encoder_layers, self.decoder_layers) < 1:
            raise ValueError(
                f"{self.encoder_layers} and {self.decoder_layers} blocks: each side needs one or more"
            )
        for name in ("pad", "start"):
            if not 0 <= getattr(self, name) < self.vocab:
                raise ValueError(f"{name}={getattr(self, name)} is no token of a vocabulary of {self.vocab}")
        _ = self.block

    @property
    def block(self) -> LMConfig:
        """The same for a block of `LM`."""
        return LMConfig(
            vocab=self.vocab,
            width=self.width,
            heads=self.heads,
            kv_heads=self.heads,
            mlp=self.mlp,
            **types(self),
        )


class EncoderBlock(Block):
    """A block of `LM` whose attention goes both ways."""

    def make_attention(self, config: LMConfig, rngs: nnx.Rngs) -> nnx.Module:
        return attention(config, rngs, rotary_base=config.rotary_base)


class DecoderBlock(Block):
    """A block of `LM` with attention to the encoder's output between its two halves."""

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.cross_norm = make_norm(config, rngs)
        self.cross_attention = attention(config, rngs)

    def __call__(self, x: jax.Array, memory: jax.Array, mask: jax.Array) -> jax.Array:  # type: ignore[override]
        """[batch, length, width] to the same.

        Args:
          x: [batch, length, width].
          memory: [batch, source length, width].
          mask: bool [batch, 1, 1, source length], what of it is seen.
        """
        x, _ = self.attend(x, None)
        x = x + self.cross_attention(self.cross_norm(x), memory, mask=mask)
        return x + self.mlp(self.mlp_norm(x))


class Side(nnx.Module):
    """Blocks and the norm after them: an encoder or a decoder."""

    def __init__(self, blocks: Iterable[nnx.Module], norm: nnx.Module):
        self.blocks = nnx.List(blocks)
        self.norm = norm

    def __call__(self, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """[batch, length, width] to the same; what else is given is given to each block."""
        x = constrain(x, "batch", "sequence", "embed")
        return self.norm(apply_layers(self.blocks, x, *args, **options))


class EncoderDecoder(nnx.Module):
    """From a source and the beginning of a target to the next tokens of the target.

    As T5 1.1 it has pre-norm blocks with RMSNorm, gated feed-forward layers, no biases and one embedding for
    both sides; positions are rotary instead of T5's learned biases.
    `mm.pipeline_sharding(model, 4, ["encoder.blocks", "decoder.blocks"])` places it; the encoder's output is
    sent to each stage of the decoder. Subclasses may override `make_encoder_block` and `make_decoder_block`.

    Example:
      >>> config = EncoderDecoderConfig(encoder_layers=1, decoder_layers=1)
      >>> model = EncoderDecoder(config, rngs=nnx.Rngs(0))
      >>> model(jnp.array([[5, 7, 9, 0]]), jnp.array([[0, 3]])).shape
      (1, 2, 256)
    """

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = SMALL if config.tied else nnx.initializers.normal(0.2)
        self.embed = Embed(config.vocab, config.width, embedding_init=init, rngs=rngs, **types(config))
        encoder = [self.make_encoder_block(n, rngs) for n in range(config.encoder_layers)]
        self.encoder = Side(encoder, make_norm(config.block, rngs))
        decoder = [self.make_decoder_block(n, rngs) for n in range(config.decoder_layers)]
        self.decoder = Side(decoder, make_norm(config.block, rngs))
        if not config.tied:
            self.head = Linear(
                config.width,
                config.vocab,
                use_bias=False,
                kernel_axes=("embed", "vocab"),
                kernel_init=SMALL,
                rngs=rngs,
                **types(config),
            )

    def make_encoder_block(self, index: int, rngs: nnx.Rngs) -> nnx.Module:
        """Block number `index` of the encoder, called with (x, mask=)."""
        return EncoderBlock(self.config.block, rngs=rngs)

    def make_decoder_block(self, index: int, rngs: nnx.Rngs) -> nnx.Module:
        """Block number `index` of the decoder, called with (x, memory, mask=)."""
        return DecoderBlock(self.config.block, rngs=rngs)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """Logits, float32 [batch, target length, vocab], of what follows each token of `target`.

        Args:
          source: int [batch, source length], padded with `config.pad` anywhere.
          target: int [batch, target length], beginning with `config.start`; padding comes last.
        """
        return self.decode(self.encode(source), source, target)

    @advising
    def encode(self, source: jax.Array) -> jax.Array:
        """The encoder's output for `source`: [batch, source length, width]."""
        return self.encoder(self.embed(source), mask=self.seen(source))

    @advising
    def decode(self, memory: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        """Logits of the token after each token of `target`, from the output of `encode` for `source`."""
        x = self.decoder(self.embed(target), memory, mask=self.seen(source))
        logits = self.embed.attend(x) if self.config.tied else self.head(x)
        return constrain(logits.astype(jnp.float32), "batch", "sequence", "vocab")

    def seen(self, source: jax.Array) -> jax.Array:
        """Which tokens of `source` may be attended to: bool [batch, 1, 1, source length]."""
        return (source != self.config.pad)[:, None, None, :]

    def loss(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """Mean cross-entropy, in nats a token, of `target` from `source` and the tokens before.

        The mean is over the tokens that are not `config.pad`. Under `mm.microbatch` it is of each microbatch,
        and so the mean of these is that of the batch where each has as many.

        Args:
          source: int [batch, source length].
          target: int [batch, target length], without a start token.
        """
        start = jnp.full_like(target[:, :1], self.config.start)
        logits = self(source, jnp.concatenate([start, target[:, :-1]], axis=1))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        counts = target != self.config.pad
        return jnp.sum(losses * counts) / jnp.maximum(jnp.sum(counts), 1)


def attention(config: LMConfig, rngs: nnx.Rngs, **options: Any) -> Attention:
    """Attention without a mask of its own, whose output is zero at first."""
    zeros = nnx.initializers.zeros
    return Attention(config.width, config.heads, out_init=zeros, rngs=rngs, **options, **types(config))
