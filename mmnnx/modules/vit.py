"""Vision transformer (ViT, arXiv:2010.11929): one config, one file."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmnnx.modules.attention import Attention
from mmnnx.modules.linear import KERNEL_INIT, Linear
from mmnnx.modules.logical import constrain, named
from mmnnx.modules.mlp import MLP
from mmnnx.modules.norm import LayerNorm
from mmnnx.sharding.incompatible_devices import advising


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """The sizes of a `ViT`, and of the image tower of a `TwoTower`.

    Args:
      image: height and width of an image, in pixels.
      patch: height and width of a patch.
      channels: of an image.
      classes: number of logits (a tower has none).
      layers, width, heads, mlp: blocks, features, attention heads, hidden features of an MLP.
      pooling: what stands for the image: "class", a learned token in front of the patches, or the "mean".
      dtype: what activations are computed in.
      param_dtype: what weights are kept in.

    Raises:
      ValueError: patches that do not fill the image, heads that do not divide the width, another pooling.

    Example:
      >>> ViTConfig(image=32, patch=8).classes
      10
    """

    image: int = 32
    patch: int = 4
    channels: int = 3
    classes: int = 10
    layers: int = 4
    width: int = 128
    heads: int = 4
    mlp: int = 512
    pooling: Literal["class", "mean"] = "class"
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if self.image % self.patch:
            raise ValueError(f"patches of {self.patch} pixels do not fill an image of {self.image}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.pooling not in ("class", "mean"):
            raise ValueError(f"pooling={self.pooling!r} is neither 'class' nor 'mean'")

    @property
    def tokens(self) -> int:
        """Patches of an image, and the class token."""
        return (self.image // self.patch) ** 2 + (self.pooling == "class")


class ViTBlock(nnx.Module):
    """A pre-norm transformer block with LayerNorm, biases and GELU: [batch, length, width] to the same.

    Example:
      >>> ViTBlock(8, 2, 16, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
      (2, 5, 8)
    """

    def __init__(
        self, width: int, heads: int, mlp: int, *, causal: bool = False, rngs: nnx.Rngs, **types: Any
    ):
        self.attention_norm = LayerNorm(width, rngs=rngs, **types)
        self.attention = Attention(width, heads, causal=causal, bias=True, out_bias=True, rngs=rngs, **types)
        self.mlp_norm = LayerNorm(width, rngs=rngs, **types)
        self.mlp = MLP(width, mlp, rngs=rngs, **types)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return constrain(x + self.mlp(self.mlp_norm(x)), "batch", "sequence", "embed")


class ImageEncoder(nnx.Module):
    """A vision transformer without its classifier: images [batch, image, image, channels] to [batch, width].

    Subclasses may override `make_block`.

    Example:
      >>> ImageEncoder(ViTConfig(layers=2), rngs=nnx.Rngs(0))(jnp.ones((1, 32, 32, 3))).shape
      (1, 128)
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.types = dict(dtype=config.dtype, param_dtype=config.param_dtype)
        small = nnx.initializers.normal(0.02)
        self.patches = nnx.Conv(
            config.channels,
            config.width,
            (config.patch, config.patch),
            config.patch,
            padding="VALID",
            kernel_init=named(KERNEL_INIT, None, None, "conv_in", "embed"),
            bias_init=named(nnx.initializers.zeros, "embed"),
            rngs=rngs,
            **self.types,
        )
        if config.pooling == "class":
            token = named(nnx.initializers.zeros, "embed")
            self.class_token = nnx.Param(token(rngs.params(), (config.width,), config.param_dtype))
        positions = named(small, None, "embed")
        shape = (config.tokens, config.width)
        self.positions = nnx.Param(positions(rngs.params(), shape, config.param_dtype))
        self.blocks = nnx.List(self.make_block(rngs) for _ in range(config.layers))
        self.norm = LayerNorm(config.width, rngs=rngs, **self.types)

    def make_block(self, rngs: nnx.Rngs) -> nnx.Module:
        """One block, a module from [batch, tokens, width] to the same."""
        return ViTBlock(self.config.width, self.config.heads, self.config.mlp, rngs=rngs, **self.types)

    def features(self, images: jax.Array) -> jax.Array:
        """What stands for each image: [batch, width], in `dtype`.

        Raises:
          ValueError: images of another shape.
        """
        config = self.config
        shape = (config.image, config.image, config.channels)
        if images.shape[1:] != shape:
            raise ValueError(f"images are [batch, {', '.join(map(str, shape))}], not {list(images.shape)}")
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, config.width)
        if config.pooling == "class":
            token = self.class_token[...].astype(x.dtype)
            x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, config.width)), x], axis=1)
        x = constrain(x + self.positions[...].astype(x.dtype), "batch", "sequence", "embed")
        for block in self.blocks:
            x = block(x)
        if config.pooling == "class":
            return self.norm(x[:, 0])
        return self.norm(x).mean(axis=1)

    @advising
    def __call__(self, images: jax.Array) -> jax.Array:
        return self.features(images)


class ViT(ImageEncoder):
    """Classifies images: patches by a convolution, learned positions, pre-norm blocks, a linear head.

    `mm.pipeline_sharding(model, 4)` places it: patches and positions with the first blocks, norm and head
    with the last.

    Example:
      >>> model = ViT(ViTConfig(layers=2), rngs=nnx.Rngs(0))
      >>> model(jnp.ones((1, 32, 32, 3))).shape
      (1, 10)
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        zeros = nnx.initializers.zeros  # the first loss is that of a uniform guess
        self.head = Linear(
            config.width,
            config.classes,
            kernel_axes=("embed", None),
            kernel_init=zeros,
            rngs=rngs,
            **self.types,
        )

    @advising
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits, float32 [batch, classes], of `images` [batch, image, image, channels]."""
        return self.head(self.features(images)).astype(jnp.float32)

    def loss(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats of `labels`, int [batch]."""
        return optax.softmax_cross_entropy_with_integer_labels(self(images), labels).mean()
