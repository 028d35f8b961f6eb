"""Linear layers of Flax that record the logical names of their axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from mmnnx.modules.logical import named

Names = Sequence[str | tuple[str, ...] | None]
KERNEL_INIT = nnx.initializers.lecun_normal()


class Linear(nnx.Linear):
    """`nnx.Linear` whose kernel and bias have named axes: [..., in_features] to [..., out_features].

    Args:
      in_features: size of the last dimension of the input.
      out_features: size of the last dimension of the output.
      kernel_axes: logical names of the axes of `kernel` [in_features, out_features], such as
        `("embed", "mlp")`. Default: none are recorded.
      bias_axes: those of `bias` [out_features]. Default: the last of `kernel_axes`.
      kernel_init: initialiser of the kernel.
      bias_init: initialiser of the bias.
      rngs: whose `params` stream makes them.
      **options: as for `nnx.Linear`: `use_bias=True`, `dtype=None`, `param_dtype=float32`, `precision`, ...

    Example:
      >>> layer = Linear(8, 16, kernel_axes=("embed", "mlp"), rngs=nnx.Rngs(0))
      >>> layer.bias.get_metadata("out_sharding")
      ('mlp',)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kernel_axes: Names = (),
        bias_axes: Names | None = None,
        kernel_init: nnx.Initializer = KERNEL_INIT,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(
            in_features,
            out_features,
            kernel_init=named(kernel_init, *kernel_axes),
            bias_init=named(bias_init, *(kernel_axes[-1:] if bias_axes is None else bias_axes)),
            rngs=rngs,
            **options,
        )


class LinearGeneral(nnx.LinearGeneral):
    """`nnx.LinearGeneral` whose kernel and bias have named axes; it contracts any axes into any shape.

    Args:
      in_features: sizes of the contracted dimensions, an int or a tuple.
      out_features: sizes of the dimensions that the output ends with, an int or a tuple.
      kernel_axes: logical names of the axes of `kernel` [*batch_axis sizes, *in_features, *out_features].
        Default: none are recorded.
      bias_axes: those of `bias` [*batch_axis sizes, *out_features]. Default: without `batch_axis`, the last
        of `kernel_axes`; with it none, as two places in the kernel's names would have to be joined.
      kernel_init: initialiser of the kernel, called with the shape flattened to two dimensions.
      bias_init: initialiser of the bias, called with the shape flattened.
      rngs: whose `params` stream makes them.
      **options: as for `nnx.LinearGeneral`: `axis=-1`, `batch_axis`, `use_bias=True`, `dtype=None`,
        `param_dtype=float32`, `precision`, ...

    Example:
      >>> names = ("embed", "heads", None)
      >>> LinearGeneral(8, (4, 2), kernel_axes=names, rngs=nnx.Rngs(0)).kernel.shape
      (8, 4, 2)
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        kernel_axes: Names = (),
        bias_axes: Names | None = None,
        kernel_init: nnx.Initializer = KERNEL_INIT,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if bias_axes is None:
            outputs = 1 if isinstance(out_features, int) else len(out_features)
            bias_axes = () if options.get("batch_axis") else kernel_axes[-outputs:]
        super().__init__(
            in_features,
            out_features,
            kernel_init=named(kernel_init, *kernel_axes),
            bias_init=named(bias_init, *bias_axes),
            rngs=rngs,
            **options,
        )
