"""A zoo of small NNX models that know nothing of pipelines, for the tests to split.

Each is written as its user would write it. `loss(model, batch)` gives the mean over the rows of the batch, so
that the mean of the losses of equal microbatches is the loss of the batch, and so are the gradients. Where
rows of a batch act on each other (BatchNorm) or draw random numbers (Dropout), microbatches and whole batch
differ by nature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mmnnx as mm

Batch = dict[str, np.ndarray]


def squared_error(model: nnx.Module, batch: Batch) -> jax.Array:
    """Half the mean over rows of the summed squared error of `model(x)` against `y`."""
    error = model(batch["x"]) - batch["y"]
    return 0.5 * jnp.mean(jnp.sum(error.reshape(error.shape[0], -1).astype(jnp.float32) ** 2, axis=-1))


def cross_entropy(model: nnx.Module, batch: Batch) -> jax.Array:
    """Mean negative log likelihood, in nats, of `target` under the logits `model(x)`."""
    logits = model(batch["x"]).astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_p, batch["target"][..., None], axis=-1))


def vectors(rows: int = 8, features_in: int = 8, features_out: int = 4, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, features_in)).astype(np.float32),
        "y": rng.normal(size=(rows, features_out)).astype(np.float32),
    }


def tokens(rows: int = 8, length: int = 6, vocab: int = 32, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, vocab, size=(rows, length + 1)).astype(np.int32)
    return {"x": text[:, :-1], "target": text[:, 1:]}


def images(rows: int = 8, size: int = 8, classes: int = 5, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, size, size, 3)).astype(np.float32),
        "target": rng.integers(0, classes, size=(rows,)).astype(np.int32),
    }


class MLP(nnx.Module):
    """`layers` linear layers with tanh between: 8 features in, 4 out."""

    def __init__(self, layers: int = 4, width: int = 16, *, rngs: nnx.Rngs, **kwargs: Any):
        sizes = [8, *[width] * (layers - 1), 4]
        self.layers = nnx.List(
            nnx.Linear(n_in, n_out, rngs=rngs, **kwargs)
            for n_in, n_out in zip(sizes[:-1], sizes[1:], strict=True)
        )

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)


class Attention(nnx.Module):
    """Causal attention with a softmax written out, so that its mask and scale are there to be placed."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs, **kwargs: Any):
        self.heads = heads
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs, **kwargs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs, **kwargs)

    def __call__(self, x, mask):
        batch, length, width = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(batch, length, self.heads, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // self.heads)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width))


class Block(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int = 16, heads: int = 2, *, rngs: nnx.Rngs, **kwargs: Any):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs, **kwargs)
        self.attention = Attention(width, heads, rngs=rngs, **kwargs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs, **kwargs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs, **kwargs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs, **kwargs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """A decoder-only language model; tied, its embedding is also its head.

    Positions and mask are computed once and shared by every block: they need no state, and every stage wants
    them.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 16,
        vocab: int = 32,
        *,
        tied: bool = False,
        remat: bool = False,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        self.remat = remat
        self.embed = nnx.Embed(vocab, width, rngs=rngs, **kwargs)
        self.blocks = nnx.List(Block(width, rngs=rngs, **kwargs) for _ in range(layers))
        self.norm = nnx.LayerNorm(width, rngs=rngs, **kwargs)
        self.head = None if tied else nnx.Linear(width, vocab, use_bias=False, rngs=rngs, **kwargs)

    def __call__(self, tokens):
        positions = jnp.arange(tokens.shape[-1])
        mask = positions[:, None] >= positions[None, :]
        x = self.embed(tokens)
        frequency = 2.0 ** -jnp.arange(x.shape[-1])
        x = x + jnp.sin(positions[:, None] * frequency).astype(x.dtype)
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x, mask) if self.remat else block(x, mask)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


class ConvNet(nnx.Module):
    """Convolutions with BatchNorm and Dropout: state that changes with every call of the model."""

    def __init__(self, *, rate: float = 0.25, batch_norm: bool = True, rngs: nnx.Rngs):
        # A bias before a BatchNorm would have no gradient but rounding.
        self.convs = nnx.List(
            nnx.Conv(n_in, 6, (3, 3), use_bias=not batch_norm, rngs=rngs) for n_in in (3, 6)
        )
        self.norms = nnx.List(nnx.BatchNorm(6, momentum=0.9, rngs=rngs) for _ in range(2 * batch_norm))
        self.dropouts = nnx.List(nnx.Dropout(rate, rngs=rngs) for _ in range(2))
        self.head = nnx.Linear(6, 5, rngs=rngs)

    def __call__(self, x):
        for i, (conv, dropout) in enumerate(zip(self.convs, self.dropouts, strict=True)):
            x = conv(x)
            if self.norms:
                x = self.norms[i](x)
            x = dropout(jnp.tanh(x))
            x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        return self.head(x.mean(axis=(1, 2)))


class SkipNet(nnx.Module):
    """What the first layer computes is added in again just before the last, past the stages between."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.middle = nnx.List(nnx.Linear(16, 16, rngs=rngs) for _ in range(2))
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        skip = x = jnp.tanh(self.first(x))
        for layer in self.middle:
            x = jnp.tanh(layer(x))
        return self.last(x + skip)


class SharedNet(nnx.Module):
    """One submodule, held under two names (NNX knows it by the first of them) and called at two depths."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.shared = nnx.Linear(16, 16, rngs=rngs)
        self.middle = nnx.Linear(16, 16, rngs=rngs)
        self.shared_again = self.shared
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.first(x))
        x = jnp.tanh(self.shared(x))
        x = jnp.tanh(self.middle(x))
        x = jnp.tanh(self.shared_again(x))
        return self.last(x)


class ScanNet(nnx.Module):
    """Each stage is a stack of layers made by nnx.vmap and run by nnx.scan."""

    def __init__(self, stages: int = 2, depth: int = 3, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return nnx.Linear(16, 16, rngs=rngs)

        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.stacks = nnx.List(stack(rngs) for _ in range(stages))
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return x + jnp.tanh(layer(x))

        x = self.first(x)
        for stack in self.stacks:
            x = run(x, stack)
        return self.last(x)


class RecurrentNet(nnx.Module):
    """Recurrent layers (a scan over time inside each), one above the other."""

    def __init__(self, cell: type = nnx.LSTMCell, vocab: int = 32, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, 8, rngs=rngs)
        self.layers = nnx.List(nnx.RNN(cell(8, 8, rngs=rngs)) for _ in range(2))
        self.head = nnx.Linear(8, vocab, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TwoEncoders(nnx.Module):
    """Two encoders of the same input, side by side, into one decoder."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.left = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)])
        self.right = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)])
        self.decoder = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        left, right = x, x
        for layer in self.left:
            left = jnp.tanh(layer(left))
        for layer in self.right:
            right = jax.nn.gelu(layer(right))
        return self.decoder(jnp.concatenate([left, right], axis=-1))


class AttentionNet(nnx.Module):
    """nnx.MultiHeadAttention as Flax ships it, twice, with a mask made outside."""

    def __init__(self, vocab: int = 32, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, 16, rngs=rngs)
        self.layers = nnx.List(
            nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=rngs) for _ in range(2)
        )
        self.head = nnx.Linear(16, vocab, rngs=rngs)

    def __call__(self, tokens):
        mask = nnx.make_causal_mask(tokens)
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, mask=mask)
        return self.head(x)


class ControlFlowNet(nnx.Module):
    """Layers whose work is a lax.cond, a lax.while_loop and a checkpointed function; each in one stage."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.branching = nnx.Linear(8, 16, rngs=rngs)
        self.looping = nnx.Linear(16, 16, rngs=rngs)
        self.checkpointed = nnx.Linear(16, 16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        kernel = self.branching.kernel[...]
        x = jax.lax.cond(jnp.sum(x) > 0, lambda k, x: jnp.tanh(x @ k), lambda k, x: jnp.sin(x @ k), kernel, x)
        # A while loop has no backward: it decides only how strongly the layer acts.
        norm = jnp.sum(jax.lax.stop_gradient(x) ** 2, axis=-1, keepdims=True)
        scale = jax.lax.while_loop(lambda s: jnp.any(s * norm > 1.0), lambda s: s * 0.5, jnp.float32(1.0))
        x = x + scale * jnp.tanh(self.looping(x))
        x = jax.checkpoint(lambda k, x: jnp.sin(jnp.tanh(x @ k)))(self.checkpointed.kernel[...], x)
        return self.last(x)


@jax.custom_vjp
def damped(x):
    """The identity, whose gradient is scaled by half the largest entry of each row: no differentiation finds
    that.
    """
    return x


def _damped_forward(x):
    return x, 0.5 * jnp.max(jnp.abs(x), axis=-1, keepdims=True)


def _damped_backward(scale, g):
    return (scale * g,)


damped.defvjp(_damped_forward, _damped_backward)


class CustomRuleNet(nnx.Module):
    """An MLP with a custom_vjp function between its layers."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)])
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = damped(jnp.tanh(layer(x)))
        return self.last(x)


def in_tasks(make_model: Callable[[], nnx.Module], tasks: Mapping[tuple[Any, ...], mm.Task]):
    """A function that makes the model with the submodules at some paths in tasks, as `mm.task` puts them."""

    def make_scoped():
        model = make_model()
        for (*above, last), task in tasks.items():
            owner = model
            for key in above:
                owner = owner[key] if isinstance(key, int) else getattr(owner, key)
            if isinstance(last, int):
                owner[last] = mm.task(owner[last], task=task)
            else:
                setattr(owner, last, mm.task(getattr(owner, last), task=task))
        return model

    return make_scoped


@dataclasses.dataclass(frozen=True)
class Make:
    """Makes a model, always with the same values; those that make equal models are equal."""

    model: type[nnx.Module]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    seed: int

    def __call__(self) -> nnx.Module:
        return self.model(*self.args, rngs=nnx.Rngs(self.seed, dropout=self.seed + 1), **dict(self.kwargs))


def make(model: type[nnx.Module], *args: Any, seed: int = 0, **kwargs: Any) -> Make:
    """A function of no arguments that makes the model."""
    return Make(model, args, tuple(kwargs.items()), seed)
