"""The embedding of Flax with named axes."""

from __future__ import annotations

from typing import Any

from flax import nnx

from mmnnx.modules.linear import Names
from mmnnx.modules.logical import named

INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class Embed(nnx.Embed):
    """`nnx.Embed` whose table has named axes: int [...] to [..., features].

    `embed.attend(x)` is the tied output layer: [..., features] to logits [..., num_embeddings]. A token
    beyond the table becomes NaN; one below 0 counts from its end, as in NumPy.

    Args:
      num_embeddings: the number of rows of the table.
      features: size of each.
      embedding_axes: logical names of the axes of `embedding` [num_embeddings, features].
      embedding_init: its initialiser; the default gives rows of length one or so.
      rngs: whose `params` stream makes it.
      **options: as for `nnx.Embed`: `dtype=None` (that of the table), `param_dtype=float32`, ...

    Example:
      >>> import jax.numpy as jnp
      >>> embed = Embed(100, 8, rngs=nnx.Rngs(0))
      >>> embed.attend(embed(jnp.array([[3, 7]]))).shape
      (1, 2, 100)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        embedding_axes: Names = ("vocab", "embed"),
        embedding_init: nnx.Initializer = INIT,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        init = named(embedding_init, *embedding_axes)
        super().__init__(num_embeddings, features, embedding_init=init, rngs=rngs, **options)
