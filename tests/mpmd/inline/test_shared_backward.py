"""Gradients of what is made of shared state are summed where they are made, and sent home once."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd.ir.flops import count_flops
from tests.mpmd.parity import MOMENTUM, assert_parity, born, pipeline, place
from tests.slow import grid

STAGES, WIDTH, ROWS, COUNT = 3, 8, 12, 4
MESH, TASKS = pipeline(STAGES)
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
MADE = {
    "as it is": lambda w: w,
    "scaled": lambda w: 3.0 * w,
    "normalised": lambda w: w / jnp.linalg.norm(w, axis=1, keepdims=True),
    "normalised, then scaled": lambda w: 3.0 * (w / jnp.linalg.norm(w, axis=1, keepdims=True)),
    "sliced": lambda w: w[: ROWS - 3],
    "rows": lambda w: w[jnp.arange(ROWS)[::-1]],
    "transposed": lambda w: w.T.reshape(ROWS, WIDTH),
    "repeated": lambda w: jnp.repeat(w[:3], 4, axis=0),
}


class Tied(nnx.Module):
    """Each layer reads what is made of one table, in two products."""

    def __init__(self, kind: str):
        rngs = nnx.Rngs(0)
        self.table = nnx.Param(0.3 * jax.random.normal(rngs(), (ROWS, WIDTH)))
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(STAGES))
        self.kind = kind

    def __call__(self, x):
        table = MADE[self.kind](self.table[...])
        for layer in self.layers:
            x = x + jnp.tanh(layer(jnp.sin(x @ table.T) @ table / ROWS))
        return x


PLACEMENT = place(TASKS, *[[("layers", n), *(["table"] if n == 0 else [])] for n in range(STAGES)])


def sent(make, loss_fn=lambda model, x: (model(x) ** 2).mean(), batch=X, **options):
    """How many arrays of each shape a step sends, whose results are those of one device."""
    options = dict(microbatch=len(batch) // COUNT, optimizer=MOMENTUM, steps=2, rtol=1e-4) | options
    program = assert_parity(make, loss_fn, batch, PLACEMENT, mesh=MESH, **options)
    return Counter(t.shape for t in program.transfers)


@pytest.mark.parametrize("kind, schedule", grid(list(MADE), ["1f1b", "gpipe", "zero-bubble-h1"], step=9))
def test_each_gradient_goes_home_once(kind, schedule):
    shapes = sent(lambda: Tied(kind), schedule=schedule)
    tables = sum(n for shape, n in shapes.items() if shape and shape[0] > ROWS // 2)
    # There, and sums of gradients back; and once what the backward of how it is made reads.
    assert tables <= (6 if "normalised" in kind else 2) * (STAGES - 1)


def test_a_bias_by_relative_positions():
    """Its gradients are those of the table that it is made of."""
    length, heads = 6, 2

    class Attention(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.table = nnx.Param(jax.random.normal(rngs(), (4, heads)))
            self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(STAGES))

        def __call__(self, x):
            far = jnp.clip(jnp.abs(jnp.arange(length)[:, None] - jnp.arange(length)), 0, 3)
            bias = self.table[...][far].transpose(2, 0, 1)
            for layer in self.layers:
                y = layer(x).reshape(*x.shape[:2], heads, -1)
                weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", y, y) + bias)
                x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, y).reshape(x.shape)
            return x

    batch = np.random.default_rng(1).normal(size=(8, length, WIDTH)).astype(np.float32)
    shapes = sent(Attention, batch=batch)
    scores = {s: n for s, n in shapes.items() if np.prod(s) == heads * length * length}
    assert sum(scores.values()) <= STAGES - 1  # the bias itself
    assert shapes[4, heads] == STAGES - 1


@pytest.mark.slow
def test_a_gradient_of_few_microbatches_is_left_whole():
    """It would be sent as often as what its backward reads."""
    whole = sent(lambda: Tied("normalised"), microbatch=len(X) // 2)
    assert whole[ROWS, WIDTH] <= 2 * 2 * (STAGES - 1)


class Prefix(nnx.Module):
    """Each layer reads a projection of its own of one small array (prefix tuning, Li and Liang 2021)."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.prefix = nnx.Param(jax.random.normal(rngs(), (1, WIDTH)))
        linear = lambda: nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List(linear() for _ in range(STAGES))
        self.projections = nnx.List(linear() for _ in range(STAGES))

    def __call__(self, x):
        prefix = jnp.sin(self.prefix[...])
        for layer, projection in zip(self.layers, self.projections):
            x = x + jnp.sin(layer(x)) * projection(prefix)
        return x


def test_what_a_layer_makes_of_it_by_weights_of_its_own():
    """Gradients of these weights are made where they are."""
    owned = [[("layers", n), ("projections", n)] for n in range(STAGES)]
    owned[0].append("prefix")
    program = assert_parity(
        Prefix,
        lambda model, x: (model(x) ** 2).mean(),
        X,
        place(TASKS, *owned),
        mesh=MESH,
        microbatch=2,
        optimizer=MOMENTUM,
        schedule="1f1b",
        rtol=1e-4,
    )
    shapes = Counter(t.shape for t in program.transfers)
    assert WIDTH not in {shape[0] for shape in shapes if shape}  # no kernel, nor its gradient
    assert shapes[2, WIDTH] == 2 * COUNT * (STAGES - 1)  # activations and gradients
    assert shapes[1, WIDTH] <= 3 * (STAGES - 1)  # the prefix, and what its backward reads and makes: once


class Product(nnx.Module):
    """The table is the product of two, of more bytes than all of its gradients."""

    def __init__(self, everywhere: bool):
        rngs = nnx.Rngs(0)
        self.a = nnx.Param(0.1 * jax.random.normal(rngs(), (WIDTH, 512)))
        self.b = nnx.Param(0.1 * jax.random.normal(rngs(), (512, WIDTH)))
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(STAGES))
        self.everywhere = everywhere

    def __call__(self, x):
        table = self.a[...] @ self.b[...]
        for layer in self.layers:
            x = x + jnp.sin(x @ table) if self.everywhere else x
            x = jnp.sin(layer(x))
        for _ in range(0 if self.everywhere else STAGES):
            x = x + jnp.sin(x @ table)
        return x


@pytest.mark.parametrize("everywhere", [True, False])  # read by all stages, or by its own, though often
def test_a_backward_that_saves_no_bytes_is_taken_once(everywhere):
    owned = [[("layers", n), *(["a", "b"] if n == 0 else [])] for n in range(STAGES)]
    step = mm.microbatch(
        nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean()), dim=0, count=4, argnum=1, schedule="1f1b"
    )
    flops = []
    for tasks in (TASKS, [TASKS[0]] * STAGES):
        with MESH:
            model = born(lambda: Product(everywhere), place(tasks, *owned))
            program = mm.jit(lambda model, x: step(model, x)).program(model, X)
        flops.append(sum(count_flops(call.fragment.jaxpr).total() for call in program.calls))
    assert flops[0] < 1.1 * flops[1]


@pytest.mark.slow
def test_what_is_not_linear_is_left_whole():
    """A mask of the batch is another in each microbatch."""

    def loss_fn(model, x):
        table = jnp.where(x.mean(0) > 0, model.table[...], 0.0)
        for layer in model.layers:
            x = x + jnp.tanh(layer(jnp.sin(x @ table.T) @ table / ROWS))
        return (x**2).mean()

    # Also the sums of gradients, which go home in each microbatch.
    assert sent(lambda: Tied("as it is"), loss_fn, whole_batch=False, per_call=1)[ROWS, WIDTH] > COUNT
