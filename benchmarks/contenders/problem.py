"""What every contender trains: a model, its batch and its loss, and how it comes apart into blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mmnnx.modules.linear import Linear
from mmnnx.modules.lm import LM, LMConfig
from mmnnx.modules.moe import MoEAux
from mmnnx.modules.moe_lm import MoELM, MoELMConfig

OPTIMIZER = optax.adamw(1e-3)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One training step: a batch of equal microbatches, whose mean loss is minimised.

    Those who let mmnnx or XLA divide the model need `make`, `batch` and `loss`. Those who divide it by hand
    have the loss in three pieces, of an object `m` that has the model's attributes, or some of them:
    `last(m, block(m.blocks[n], ... block(m.blocks[0], first(m, slice))), slice)`.

    Attributes:
      name: of the model and its size.
      stages, microbatches: of the pipeline.
      make: makes the model, the same one each time. Its blocks are `model.blocks`.
      batch: arrays [rows, ...] on the host, a pytree.
      loss: of the model and a slice of the batch: its mean loss, a scalar.
      first: what enters the first block, from a slice of the batch.
      block: what leaves a block, from the block and what enters it.
      last: the mean loss, from what leaves the last block and the slice.
      before, after: attributes of the model that `first` and that `last` read.
    """

    name: str
    stages: int
    microbatches: int
    make: Callable[[], Any]
    batch: Any
    loss: Callable[[Any, Any], jax.Array]
    first: Callable[[Any, Any], Any]
    block: Callable[[Any, Any], Any]
    last: Callable[[Any, Any, Any], jax.Array]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of one microbatch."""
        return len(jax.tree.leaves(self.batch)[0]) // self.microbatches

    def slices(self, batch: Any) -> Any:
        """The batch as [microbatches, rows, ...]."""
        return jax.tree.map(lambda x: x.reshape(self.microbatches, self.rows, *x.shape[1:]), batch)


# A stack of residual blocks.


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        names = ("embed", "mlp")  # for tensor parallelism alone
        self.up = Linear(width, 4 * width, use_bias=False, kernel_axes=names, rngs=rngs)
        self.down = Linear(4 * width, width, use_bias=False, kernel_axes=names[::-1], rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Network(nnx.Module):
    def __init__(self, blocks: list[Block]):
        self.blocks = nnx.List(blocks)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def mlp(name: str, stages: int, microbatches: int, rows: int, layers: int, width: int) -> Problem:
    """`layers` residual blocks of `width` features, and a mean squared error."""
    shape = (microbatches * rows, width)

    def make():
        rngs = nnx.Rngs(0)
        return Network([Block(width, rngs=rngs) for _ in range(layers)])

    def last(network, x, batch):
        return jnp.mean((x - batch[1]) ** 2)

    return Problem(
        name,
        stages,
        microbatches,
        make=make,
        batch=tuple(np.random.default_rng(seed).standard_normal(shape, np.float32) for seed in (1, 2)),
        loss=lambda network, batch: last(network, network(batch[0]), batch),
        first=lambda network, batch: batch[0],
        block=lambda block, x: block(x),
        last=last,
    )


# Language models.


def lm(name: str, stages: int, microbatches: int, rows: int, length: int, config: LMConfig) -> Problem:
    """The decoder-only transformer that `make train` trains, on `rows` texts of `length` tokens each."""
    return Problem(
        name,
        stages,
        microbatches,
        make=lambda: awake(LM(config, rngs=nnx.Rngs(0))),
        batch=random_tokens(config, microbatches * rows, length),
        loss=lambda model, tokens: model.loss(tokens),
        first=lambda model, tokens: model.embed(tokens[:, :-1]),
        block=lambda block, x: block(x),
        last=cross_entropy,
        before=("embed",),
        after=("norm", "head"),
    )


def moe_lm(name: str, stages: int, microbatches: int, rows: int, length: int, config: MoELMConfig) -> Problem:
    """The same with a mixture of experts in each block. Its routers have losses, which ride along."""
    nothing = jnp.zeros(())

    def block(block, carried):
        x, penalty = carried
        x, aux = block((x, MoEAux(nothing, nothing, jnp.zeros(config.experts), nothing)))
        return x, penalty + config.load_balancing * aux.load_balancing + config.router_z * aux.router_z

    return Problem(
        name,
        stages,
        microbatches,
        make=lambda: awake(MoELM(config, rngs=nnx.Rngs(0))),
        batch=random_tokens(config, microbatches * rows, length),
        loss=lambda model, tokens: model.loss(tokens),
        first=lambda model, tokens: (model.embed(tokens[:, :-1]), nothing),
        block=block,
        last=lambda model, carried, tokens: cross_entropy(model, carried[0], tokens) + carried[1],
        before=("embed",),
        after=("norm", "head"),
    )


def awake(model: Any) -> Any:
    """The model with random weights where a block's start at zero: most gradients would be zero, too."""
    for n, block in enumerate(model.blocks):
        for layer in (block.attention.out, block.mlp.down):
            weight = getattr(layer, "kernel", layer)
            weight.set_value(0.02 * jax.random.normal(jax.random.key(n), weight.shape, weight.dtype))
    return model


def random_tokens(config: LMConfig, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, config.vocab, (rows, length + 1), np.int32)


def cross_entropy(model: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = model.head(model.norm(x)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
