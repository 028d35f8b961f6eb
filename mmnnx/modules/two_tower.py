"""Two encoders side by side, of images and of text, and a contrastive loss (CLIP, arXiv:2103.00020)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmnnx.modules.embed import Embed
from mmnnx.modules.linear import Linear
from mmnnx.modules.logical import constrain, named
from mmnnx.modules.norm import LayerNorm
from mmnnx.modules.vit import ImageEncoder, ViTBlock, ViTConfig
from mmnnx.sharding.incompatible_devices import advising


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The sizes of a `TextEncoder`.

    Args:
      vocab: number of tokens; `pad` is the one that fills up a text.
      length: the longest text, in tokens.
      layers, width, heads, mlp, dtype, param_dtype: as in `ViTConfig`.

    Raises:
      ValueError: heads that do not divide the width, or a pad outside the vocabulary.

    Example:
      >>> TextConfig(length=16).layers
      4
    """

    vocab: int = 256
    length: int = 64
    layers: int = 4
    width: int = 128
    heads: int = 4
    mlp: int = 512
    pad: int = 0
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if not 0 <= self.pad < self.vocab:
            raise ValueError(f"pad={self.pad} is no token of a vocabulary of {self.vocab}")


@dataclasses.dataclass(frozen=True)
class TwoTowerConfig:
    """The sizes of a `TwoTower`.

    Args:
      image, text: of its towers.
      features: of the space in which images and texts meet.
      temperature: what similarities are divided by at first; it is learned.

    Raises:
      ValueError: a temperature below 0.01, which similarities are never divided by.

    Example:
      >>> TwoTowerConfig(text=TextConfig(length=16)).features
      128
    """

    image: ViTConfig = dataclasses.field(default_factory=ViTConfig)
    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    features: int = 128
    temperature: float = 0.07

    def __post_init__(self) -> None:
        if self.temperature < 0.01:
            raise ValueError(f"temperature={self.temperature} is below 0.01: CLIP begins at 0.07")


class TextEncoder(nnx.Module):
    """Causal transformer blocks over tokens, int [batch, length <= config.length], to [batch, width].

    The features of a text are those of its last token before padding. Subclasses may override `make_block`.

    Example:
      >>> TextEncoder(TextConfig(layers=2), rngs=nnx.Rngs(0))(jnp.array([[5, 7, 0, 0]])).shape
      (1, 128)
    """

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.types = dict(dtype=config.dtype, param_dtype=config.param_dtype)
        small = nnx.initializers.normal(0.02)
        self.embed = Embed(config.vocab, config.width, embedding_init=small, rngs=rngs, **self.types)
        positions = named(nnx.initializers.normal(0.01), None, "embed")
        shape = (config.length, config.width)
        self.positions = nnx.Param(positions(rngs.params(), shape, config.param_dtype))
        self.blocks = nnx.List(self.make_block(rngs) for _ in range(config.layers))
        self.norm = LayerNorm(config.width, rngs=rngs, **self.types)

    def make_block(self, rngs: nnx.Rngs) -> nnx.Module:
        """One block, a module from [batch, length, width] to the same, in which no token sees a later one."""
        sizes = (self.config.width, self.config.heads, self.config.mlp)
        return ViTBlock(*sizes, causal=True, rngs=rngs, **self.types)

    @advising
    def __call__(self, tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        if length > self.config.length:
            raise ValueError(f"a text of {length} tokens is longer than config.length, {self.config.length}")
        x = self.embed(tokens)
        x = constrain(x + self.positions[:length].astype(x.dtype), "batch", "sequence", "embed")
        for block in self.blocks:
            x = block(x)
        last = jnp.max(jnp.where(tokens != self.config.pad, jnp.arange(length), 0), axis=1)
        return self.norm(jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0])


class TwoTower(nnx.Module):
    """An image tower and a text tower that meet in a contrastive loss: a graph that is not a chain.

    The towers need nothing of each other, so that on different meshes they run side by side. For two tasks
    `left` and `right` the rules are `mm.path({"image", "image_head"}): left` and
    `mm.path({"text", "text_head", "log_scale"}): right`.

    Each tower may be a pipeline of its own: `mm.path("image", "blocks", range(0, 2))` and so on. They share
    `log_scale` and the loss.

    The loss of a batch is not the mean of the losses of its parts: under `mm.microbatch` an image is
    contrasted only with the texts of its own microbatch, and the loss is nearer zero. Choose microbatches as
    large as the contrast should be.

    Example:
      >>> config = TwoTowerConfig(ViTConfig(layers=1), TextConfig(layers=1))
      >>> model = TwoTower(config, rngs=nnx.Rngs(0))
      >>> images, texts, scale = model(jnp.ones((2, 32, 32, 3)), jnp.ones((2, 7), jnp.int32))
      >>> images.shape, texts.shape
      ((2, 128), (2, 128))
    """

    def __init__(self, config: TwoTowerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.image = self.make_image_encoder(rngs)
        self.image_head = self._head(config.image, rngs)
        self.text = self.make_text_encoder(rngs)
        self.text_head = self._head(config.text, rngs)
        self.log_scale = nnx.Param(jnp.array(-math.log(config.temperature), jnp.float32))

    def make_image_encoder(self, rngs: nnx.Rngs) -> nnx.Module:
        """The image tower: a module from images to [batch, config.image.width]."""
        return ImageEncoder(self.config.image, rngs=rngs)

    def make_text_encoder(self, rngs: nnx.Rngs) -> nnx.Module:
        """The text tower: a module from tokens to [batch, config.text.width]."""
        return TextEncoder(self.config.text, rngs=rngs)

    @advising
    def __call__(self, images: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the loss compares.

        Args:
          images: [batch, image, image, channels].
          tokens: int [batch, length].

        Returns:
          (images, texts, scale): features of unit length, float32 [batch, features] each, and a float32
          scalar of at most 100, as in CLIP, by which their products are multiplied.
        """
        image = unit_length(self.image_head(self.image(images)))
        text = unit_length(self.text_head(self.text(tokens)))
        own = self.log_scale[...]
        # Gradients pass the bound, or a step beyond it would never be taken back.
        log_scale = own + jax.lax.stop_gradient(jnp.minimum(own, math.log(100)) - own)
        return image, text, jnp.exp(log_scale)

    def loss(self, images: jax.Array, tokens: jax.Array) -> jax.Array:
        """Mean cross-entropy, in nats, of telling each image's text and each text's image."""
        image, text, scale = self(images, tokens)
        return contrastive_loss(image, text, scale)

    def _head(self, tower: ViTConfig | TextConfig, rngs: nnx.Rngs) -> Linear:
        types = dict(dtype=tower.dtype, param_dtype=tower.param_dtype)
        width, features = tower.width, self.config.features
        return Linear(width, features, use_bias=False, kernel_axes=("embed", None), rngs=rngs, **types)


def unit_length(x: jax.Array) -> jax.Array:
    """`x` [..., features] in float32, each row divided by its length."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)


def contrastive_loss(image: jax.Array, text: jax.Array, scale: jax.Array) -> jax.Array:
    """The symmetric loss of CLIP (arXiv:2103.00020, figure 3): row i of one goes with row i of the other.

    Args:
      image, text: float [batch, features], of unit length.
      scale: scalar, one over the temperature.

    Example:
      >>> round(float(contrastive_loss(jnp.eye(2), jnp.eye(2), jnp.float32(1.0))), 4)
      0.3133
    """
    logits = scale * image @ text.T
    same = jnp.arange(logits.shape[0])
    losses = [optax.softmax_cross_entropy_with_integer_labels(side, same) for side in (logits, logits.T)]
    return (losses[0].mean() + losses[1].mean()) / 2
