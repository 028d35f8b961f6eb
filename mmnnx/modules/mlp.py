"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from mmnnx.modules.linear import KERNEL_INIT, Linear, Names
from mmnnx.modules.logical import constrain


class MLP(nnx.Module):
    """Two linear layers with an activation between: `down(activation(up(x)))`, [..., width] to the same.

    A subclass overrides `hidden`: what `down` gets.

    Args:
      width: features of input and output.
      mlp: features between.
      activation: elementwise; the default is GELU by its tanh formula, and
        `functools.partial(nnx.gelu, approximate=False)` the exact one.
      bias: whether the two layers have biases.
      kernel_axes: logical names of the axes of the kernel of `up` [width, mlp]; the last also names the
        activations between.
      out_axes: those of the kernel of `down` [mlp, width].
      kernel_init: initialiser of all kernels but that of `down`.
      out_init: initialiser of the kernel of `down`.
      bias_init: initialiser of the biases.
      rngs: whose `params` stream makes them.
      dtype: what is computed in. Default: inferred from input and weights.
      param_dtype: dtype of the weights.

    Example:
      >>> MLP(8, 32, rngs=nnx.Rngs(0))(jax.numpy.ones((2, 5, 8))).shape
      (2, 5, 8)
    """

    def __init__(
        self,
        width: int,
        mlp: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = nnx.gelu,
        bias: bool = True,
        kernel_axes: Names = ("embed", "mlp"),
        out_axes: Names = ("mlp", "embed"),
        kernel_init: nnx.Initializer = KERNEL_INIT,
        out_init: nnx.Initializer = KERNEL_INIT,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jax.numpy.float32,
    ):
        options = dict(use_bias=bias, bias_init=bias_init, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.activation = activation
        self.hidden_axes = tuple(kernel_axes[-1:])
        self.up = Linear(width, mlp, kernel_axes=kernel_axes, kernel_init=kernel_init, **options)
        self.down = Linear(mlp, width, kernel_axes=out_axes, kernel_init=out_init, **options)

    def hidden(self, x: jax.Array) -> jax.Array:
        """[..., width] to [..., mlp]."""
        return self.activation(self.up(x))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] to [..., width]."""
        return self.down(constrain(self.hidden(x), ..., *self.hidden_axes))


class SwiGLU(MLP):
    """Gated feed-forward layer (arXiv:2002.05202): `down(silu(gate(x)) * up(x))`, [..., width] to the same.

    It has no biases. Another `activation` makes another gate: `nnx.gelu` a GEGLU. The other arguments are
    those of `MLP`, and a subclass overrides `hidden`.

    Example:
      >>> SwiGLU(8, 24, rngs=nnx.Rngs(0))(jax.numpy.ones((2, 5, 8))).shape
      (2, 5, 8)
    """

    def __init__(
        self,
        width: int,
        mlp: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = nnx.silu,
        kernel_axes: Names = ("embed", "mlp"),
        kernel_init: nnx.Initializer = KERNEL_INIT,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jax.numpy.float32,
        **options: Any,
    ):
        shared: dict[str, Any] = dict(kernel_axes=kernel_axes, kernel_init=kernel_init, rngs=rngs)
        shared |= dict(dtype=dtype, param_dtype=param_dtype)
        self.gate = Linear(width, mlp, use_bias=False, **shared)
        super().__init__(width, mlp, activation=activation, bias=False, **shared, **options)

    def hidden(self, x: jax.Array) -> jax.Array:
        """[..., width] to [..., mlp]."""
        return self.activation(self.gate(x)) * self.up(x)
