"""Convolution, norm and activation in one block, and the residual block made of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mmnnx.modules.logical import constrain, named

HE_INIT = nnx.initializers.he_normal()
Norm = Literal["batch", "group", "layer"]


class ConvBlock(nnx.Module):
    """`activation(norm(conv(x)))`: images [batch, height, width, in_features] to [..., out_features].

    The convolution has no bias: the norm adds one. BatchNorm's averages change with every call in training;
    under `mm.microbatch` they are carried from one microbatch to the next. `model.eval()` has it use them.

    Args:
      in_features, out_features, kernel_size, strides, padding, dtype, param_dtype, rngs: as in `nnx.Conv`.
      norm: "batch", "group" or "layer" (over the features of each pixel).
      groups: number of groups of "group"; must divide out_features.
      activation: a function; None for none.
      kernel_init: makes the kernel, [*kernel_size, in_features, out_features].
      scale_init: makes the norm's scale, [out_features].
      axes: logical names of the last two axes of the kernel; the second is also that of the norm's.

    Raises:
      ValueError: a norm of another name, or groups that do not divide the features.

    Example:
      >>> ConvBlock(3, 8, (3, 3), strides=2, rngs=nnx.Rngs(0))(jnp.ones((1, 32, 32, 3))).shape
      (1, 16, 16, 8)

    Subclasses may override `make_norm(features, **options)`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int] = (3, 3),
        strides: int | Sequence[int] = 1,
        *,
        norm: Norm = "batch",
        groups: int = 32,
        activation: Callable[[jax.Array], jax.Array] | None = nnx.relu,
        padding: Any = "SAME",
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = HE_INIT,
        scale_init: nnx.Initializer = nnx.initializers.ones,
        axes: tuple[str | None, str | None] = ("conv_in", "conv_out"),
    ):
        if norm not in ("batch", "group", "layer"):
            raise ValueError(f"ConvBlock: norm={norm!r} is none of 'batch', 'group', 'layer'")
        if norm == "group" and out_features % groups:
            raise ValueError(f"ConvBlock: groups={groups} does not divide {out_features} features")
        self.norm_kind, self.groups, self.activation = norm, groups, activation
        self.axis = axes[1]
        size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        if len(size) == 1:
            size *= 2
        self.conv = nnx.Conv(
            in_features,
            out_features,
            size,
            strides,
            padding=padding,
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=named(kernel_init, None, None, *axes),
            rngs=rngs,
        )
        self.norm = self.make_norm(
            out_features,
            dtype=dtype,
            param_dtype=param_dtype,
            scale_init=named(scale_init, axes[1]),
            bias_init=named(nnx.initializers.zeros, axes[1]),
            rngs=rngs,
        )

    def make_norm(self, features: int, **options: Any) -> nnx.Module:
        """The norm, a module of [batch, height, width, features]; `options` are those of `nnx.BatchNorm`."""
        if self.norm_kind == "batch":
            return nnx.BatchNorm(features, **options)
        if self.norm_kind == "group":
            return nnx.GroupNorm(features, self.groups, **options)
        return nnx.LayerNorm(features, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.conv(x))
        if self.activation is not None:
            x = self.activation(x)
        return constrain(x, "batch", None, None, self.axis)


class ResidualBlock(nnx.Module):
    """`activation(shortcut(x) + block(block(x)))`, the basic block of ResNet (arXiv:1512.03385).

    The shortcut is a strided 1 x 1 convolution and norm where the shape changes, else `x` itself. The scale
    of the last norm begins at zero, so that a new block passes on its shortcut (arXiv:1706.02677, 5.1).

    Args:
      in_features, out_features: features before and after.
      strides: of the first convolution and of the shortcut.
      activation: as in `ConvBlock`; also the one after the sum.
      rngs: for the parameters.
      **options: what else `ConvBlock` takes, for all of its blocks.

    Example:
      >>> ResidualBlock(4, 8, strides=2, rngs=nnx.Rngs(0))(jnp.ones((1, 8, 8, 4))).shape
      (1, 4, 4, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        strides: int = 1,
        *,
        activation: Callable[[jax.Array], jax.Array] = nnx.relu,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        self.activation = activation
        options["rngs"] = rngs
        self.first = ConvBlock(in_features, out_features, strides=strides, activation=activation, **options)
        last = options | {"scale_init": nnx.initializers.zeros, "activation": None}
        self.second = ConvBlock(out_features, out_features, **last)
        changes = strides != 1 or in_features != out_features
        one = options | {"kernel_size": (1, 1), "activation": None}
        self.shortcut = ConvBlock(in_features, out_features, strides=strides, **one) if changes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return self.activation(shortcut + self.second(self.first(x)))
