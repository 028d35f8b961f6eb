"""The normalisations of Flax with named axes, computed in float32 whatever the types around them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmnnx.modules.linear import Names
from mmnnx.modules.logical import named


def _keep(arrays: Any, dtype: Any = None) -> Any:
    """In place of Flax's promotion, which rounds input and scale to `dtype` before they are used."""
    return arrays


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` (arXiv:1910.07467) over the last dimension: [..., num_features] to the same.

    Mean square, division and scale are in float32 (or wider, with wider inputs); only the result is rounded
    to `dtype`.

    Args:
      num_features: size of the last dimension.
      scale_axes: logical names of the axis of `scale` [num_features].
      scale_init: its initialiser.
      rngs: whose `params` stream makes it.
      **options: as for `nnx.RMSNorm`: `epsilon=1e-6`, `dtype=None`, `param_dtype=float32`, ...

    Example:
      >>> import jax.numpy as jnp
      >>> norm = RMSNorm(8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
      >>> norm(jnp.ones((2, 8))).dtype
      dtype(bfloat16)
    """

    def __init__(
        self,
        num_features: int,
        *,
        scale_axes: Names = ("embed",),
        scale_init: nnx.Initializer = nnx.initializers.ones,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        options = {"promote_dtype": _keep} | options
        super().__init__(num_features, scale_init=named(scale_init, *scale_axes), rngs=rngs, **options)


class OffsetRMSNorm(nnx.Module):
    """`RMSNorm` whose features are multiplied by 1 + scale, as in Gemma (arXiv:2403.08295).

    Args:
      num_features: size of the last dimension.
      epsilon: added to the mean square.
      scale_axes: logical names of the axis of `scale` [num_features].
      scale_init: its initialiser.
      rngs: whose `params` stream makes it.
      dtype: of the result. Default: inferred from input and scale.
      param_dtype: of the scale.

    Example:
      >>> OffsetRMSNorm(8, rngs=nnx.Rngs(0))(jnp.ones((2, 8))).shape
      (2, 8)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        scale_axes: Names = ("embed",),
        scale_init: nnx.Initializer = nnx.initializers.zeros,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        self.scale = nnx.Param(named(scale_init, *scale_axes)(rngs.params(), (num_features,), param_dtype))
        self.epsilon, self.dtype, self.param_dtype = epsilon, dtype, param_dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., num_features] to the same."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(wide**2, axis=-1, keepdims=True)
        y = wide * jax.lax.rsqrt(mean_square + self.epsilon) * (1 + self.scale[...].astype(wide.dtype))
        return y.astype(self.dtype or jnp.result_type(x.dtype, self.param_dtype))


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` (arXiv:1607.06450) over the last dimension: [..., num_features] to the same.

    Mean, variance, division, scale and bias are in float32 (or wider, with wider inputs); only the result is
    rounded to `dtype`.

    Args:
      num_features: size of the last dimension.
      scale_axes: logical names of the axis of `scale` [num_features].
      bias_axes: those of `bias` [num_features]. Default: `scale_axes`.
      scale_init: initialiser of the scale.
      bias_init: initialiser of the bias.
      rngs: whose `params` stream makes them.
      **options: as for `nnx.LayerNorm`: `epsilon=1e-6`, `dtype=None`, `use_bias=True`, ...

    Example:
      >>> import jax.numpy as jnp
      >>> LayerNorm(8, rngs=nnx.Rngs(0))(jnp.ones((2, 8))).shape
      (2, 8)
    """

    def __init__(
        self,
        num_features: int,
        *,
        scale_axes: Names = ("embed",),
        bias_axes: Names | None = None,
        scale_init: nnx.Initializer = nnx.initializers.ones,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        options = {"promote_dtype": _keep} | options
        super().__init__(
            num_features,
            scale_init=named(scale_init, *scale_axes),
            bias_init=named(bias_init, *(scale_axes if bias_axes is None else bias_axes)),
            rngs=rngs,
            **options,
        )
