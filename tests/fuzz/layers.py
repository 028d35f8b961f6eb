"""The layers of random models, by name: from [rows, WIDTH] to [rows, WIDTH]."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmnnx.modules.linear import Linear
from tests import models

WIDTH = 4
EXPERTS = DEPTH = 2


class Tanh(nnx.Module):
    """A linear layer."""

    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        self.linear = Linear(WIDTH, WIDTH, kernel_axes=("in", "out"), rngs=rngs, **dtypes)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class MLP(nnx.Module):
    """Two, with a relu between."""

    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        self.up = Linear(WIDTH, 2 * WIDTH, kernel_axes=("in", "out"), rngs=rngs, **dtypes)
        self.down = Linear(2 * WIDTH, WIDTH, kernel_axes=("out", "in"), rngs=rngs, **dtypes)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class LayerNorm(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        self.norm = nnx.LayerNorm(WIDTH, epsilon=0.1, rngs=rngs, **dtypes)

    def __call__(self, x):
        return self.norm(x)


class RMSNorm(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        self.norm = nnx.RMSNorm(WIDTH, epsilon=0.1, rngs=rngs, **dtypes)

    def __call__(self, x):
        return self.norm(x)


class BatchNorm(nnx.Module):
    """Its averages change with every microbatch."""

    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        self.linear = Linear(WIDTH, WIDTH, kernel_axes=("in", "out"), rngs=rngs, **dtypes)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, epsilon=0.1, rngs=rngs, **dtypes)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.linear(x)))


class Dropout(nnx.Module):
    """Its counter does."""

    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        self.linear = Linear(WIDTH, WIDTH, kernel_axes=("in", "out"), rngs=rngs, **dtypes)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.linear(x)))


class Conv(nnx.Module):
    """Its window is of one place.

    With a wider one, where the places are sharded over one axis of a mesh that has another, XLA (jaxlib 0.10
    and 0.12) multiplies the gradient of the kernel by the size of the other, under jax.jit as well.
    """

    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        self.conv = nnx.Conv(2, 2, (1,), rngs=rngs, **dtypes)

    def __call__(self, x):
        return jnp.sin(self.conv(x.reshape(-1, WIDTH // 2, 2))).reshape(x.shape)


class Attention(nnx.Module):
    """Each row is a sequence of two vectors."""

    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        self.attention = models.Attention(WIDTH // 2, 1, rngs=rngs, **dtypes)

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((2, 2), bool))
        return x + self.attention(x.reshape(-1, 2, WIDTH // 2), mask).reshape(x.shape)


class Experts(nnx.Module):
    """The expert that a router likes best, weighted with how much it does."""

    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        self.router = Linear(WIDTH, EXPERTS, rngs=rngs, **dtypes)
        kernel = nnx.initializers.lecun_normal(batch_axis=0)
        shape = EXPERTS, WIDTH, WIDTH
        self.experts = nnx.Param(kernel(rngs.params(), shape, dtypes.get("param_dtype", jnp.float32)))

    def __call__(self, x):
        weights = jax.nn.softmax(self.router(x))
        chosen = jax.nn.one_hot(jnp.argmax(weights, axis=-1), EXPERTS, dtype=weights.dtype)
        results = jnp.einsum("ri,eio->reo", x, self.experts[...].astype(x.dtype))
        return jnp.einsum("reo,re->ro", jnp.tanh(results), chosen * weights)


class Where(nnx.Module):
    """Jumps where its input is 0.1."""

    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        self.linear = Linear(WIDTH, WIDTH, kernel_axes=("in", "out"), rngs=rngs, **dtypes)

    def __call__(self, x):
        return jnp.where(x > 0.1, jnp.sin(self.linear(x)), 0.5 * x)


class Cond(nnx.Module):
    """One of two functions, for all rows."""

    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        self.linear = Linear(WIDTH, WIDTH, kernel_axes=("in", "out"), rngs=rngs, **dtypes)

    def __call__(self, x):
        y = self.linear(x)
        return jax.lax.cond(y[0, 0] > 0.1, lambda x, y: x + jnp.tanh(y), lambda x, y: x * jnp.cos(y), x, y)


class Stack(nnx.Module):
    """Layers made by nnx.vmap, and run by nnx.scan."""

    def __init__(self, *, rngs: nnx.Rngs, **dtypes: Any):
        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs, **dtypes)

        self.layers = stack(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return x + jnp.tanh(layer(x))

        return run(x, self.layers)


# Those that a plain function may close over, so that a loop or a branch may hold them.
PURE = {
    "tanh": Tanh,
    "mlp": MLP,
    "layer norm": LayerNorm,
    "rms norm": RMSNorm,
    "conv": Conv,
    "attention": Attention,
    "experts": Experts,
    "where": Where,
    "cond": Cond,
}
KINDS = PURE | {"batch norm": BatchNorm, "dropout": Dropout, "stack": Stack}
STATEFUL = ("batch norm", "dropout")  # what a microbatch leaves, statistics or counters, the next one reads
