"""What does not depend on the microbatch is done once, unless it is larger than what it is made of."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import MOMENTUM, assert_parity, assert_same, born, pipeline, place
from tests.slow import grid

STAGES, WIDTH, ROWS, RANK, COUNT = 2, 32, 48, 2, 4
MESH, TASKS = pipeline(STAGES)
TOKENS = np.random.default_rng(0).integers(0, ROWS, (8, 3))


class Eight(nnx.Module):
    """A matrix of eight bits, whose columns have a factor each."""

    def __init__(self, rows: int, columns: int, rngs: nnx.Rngs):
        self.codes = nnx.Variable(jax.random.randint(rngs(), (rows, columns), -127, 128, jnp.int8))
        self.scale = nnx.Variable(jnp.full((columns,), 0.01 / np.sqrt(rows)))

    def __call__(self) -> jax.Array:
        return self.codes[...].astype(jnp.float32) * self.scale[...]


class Adapted(nnx.Module):
    """A product with such a matrix, and with a trained one of low rank (QLoRA, Dettmers et al. 2023)."""

    def __init__(self, rngs: nnx.Rngs):
        self.base = Eight(WIDTH, WIDTH, rngs)
        self.a = nnx.Param(0.1 * jax.random.normal(rngs(), (WIDTH, RANK)))
        self.b = nnx.Param(0.1 * jax.random.normal(rngs(), (RANK, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.sin(x @ self.base() + x @ self.a[...] @ self.b[...])


class Model(nnx.Module):
    """Its table is read by the first stage and by the last."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table = Eight(ROWS, WIDTH, rngs)
        self.layers = nnx.List(Adapted(rngs) for _ in range(2 * STAGES))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table()[tokens]
        for layer in self.layers:
            x = layer(x)
        return x @ self.table().T


PLACEMENT = place(
    TASKS, *[[("layers", 2 * n), ("layers", 2 * n + 1), *([] if n else ["table"])] for n in range(STAGES)]
)


def loss_fn(model, tokens):
    return (model(tokens) ** 2).mean()


def kept(program: mm.Program) -> Counter:
    """The matrices that are kept outside of fragments, by type and shape."""
    return Counter((v.aval.dtype.name, v.aval.shape) for v, _ in program.values if len(v.aval.shape) == 2)


@pytest.mark.parametrize(
    "schedule, remat", grid(["1f1b", "gpipe", "zero-bubble-h1", "looped-bfs"], [False, True], step=3)
)
def test_weights_of_eight_bits_are_kept_so(schedule, remat):
    def loss(model, tokens):
        return (nnx.remat(loss_fn) if remat else loss_fn)(model, tokens)

    program = assert_parity(
        Model,
        loss,
        TOKENS,
        PLACEMENT,
        mesh=MESH,
        microbatch=len(TOKENS) // COUNT,
        schedule=schedule,
        optimizer=MOMENTUM,
        steps=2,
        rtol=1e-4,
    )
    matrices = kept(program)
    assert matrices["int8", (WIDTH, WIDTH)] == 2 * STAGES
    assert not matrices["float32", (WIDTH, WIDTH)] and not matrices["float32", (ROWS, WIDTH)]
    sent = Counter((t.dtype, t.shape) for t in program.transfers if len(t.shape) == 2)
    assert sent == {(jnp.dtype("int8"), (ROWS, WIDTH)): 1}  # the table, once


def test_what_is_as_large_or_smaller_is_made_once():
    """Copies of half the bytes, for each microbatch to read."""

    class Halved(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(STAGES))

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.sin(x @ layer.kernel[...].astype(jnp.bfloat16))
            return x

    x = np.ones((8, WIDTH), jnp.bfloat16)
    with MESH:
        model = born(Halved, place(TASKS, *[[("layers", n)] for n in range(STAGES)]))
        grad_fn = nnx.grad(lambda model, x: model(x).astype(jnp.float32).mean())
        program = mm.jit(mm.microbatch(grad_fn, dim=0, size=2, argnum=1)).program(model, x)
    assert kept(program)["bfloat16", (WIDTH, WIDTH)] == STAGES


def test_a_while_over_tasks():
    """As tokens are decoded one by one: a step is bound by the bytes of weights that it reads."""

    def decode(model, tokens, count):
        def body(carry):
            n, tokens = carry
            return n + 1, model(tokens).argmax(-1)

        return nnx.while_loop(lambda carry: carry[0] < count, body, (0, tokens))[1]

    with MESH:
        model, split = born(Model, PLACEMENT), mm.jit(decode)
        program = split.program(model, TOKENS, 3)
        assert_same(split(model, TOKENS, 3), nnx.jit(decode)(Model(), TOKENS, 3))
    assert not kept(program)["float32", (WIDTH, WIDTH)] and not kept(program)["float32", (ROWS, WIDTH)]
