"""State that a microbatch adds to several times, as layers do that count what comes through them."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import assert_same, born, pipeline, place
from tests.slow import all_but

WIDTH, STAGES = 8, 3
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
MESH, TASKS = pipeline(STAGES)


class Counting(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(n)) for n in range(STAGES)])
        self.load = nnx.BatchStat(jnp.arange(WIDTH, dtype=jnp.float32))

    def __call__(self, x, added):
        """`added`: the stages whose activations are added, in the order in which they are."""
        made = []
        for layer in self.layers:
            made.append(x := jnp.sin(layer(x)))
        for n, stage in enumerate(added):
            self.load[...] += ((n + 1) * made[stage]).sum(0)
        return x


def microbatched(model, added):
    loss_fn = lambda model, x: (model(x, added) ** 2).mean()
    grad_fn = nnx.value_and_grad(loss_fn)
    loss, grads = mm.microbatch(grad_fn, dim=0, size=2, argnum=1, schedule="1f1b")(model, X)
    return loss, grads.layers


def forward(model, added):
    return mm.microbatch(lambda model, x: model(x, added).sum(), dim=0, size=4, argnum=1)(model, X)


def scanned(model, added):
    def body(model, x):
        return model, model(x, added).sum()

    return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, X.reshape(4, 2, WIDTH))[1]


ADDED = [(1, 1), (1,), (2, 1, 1), (1, 2, 1, 2), (0, 1, 1), (1, 0, 2, 2)]


@pytest.mark.parametrize(
    "step, added, home",
    all_but(
        [
            (microbatched, (1, 1), 0),
            (microbatched, (1, 2, 1, 2), 0),
            (forward, (2, 1, 1), 0),
            (scanned, (1, 1), 0),
        ],
        itertools.product([microbatched, forward, scanned], ADDED, range(STAGES)),
    ),
)
def test_it_is_what_it_is_whole(step, added, home):
    reference = Counting()
    owned = [[("layers", n)] for n in range(STAGES)]
    owned[home].append(("load",))
    compiled, whole = mm.jit(step, static_argnums=1), nnx.jit(step, static_argnums=1)
    with MESH:
        model = born(Counting, place(TASKS, *owned))
        for _ in range(2):
            with mm.ignore_transforms():
                expected = whole(reference, added)
            assert_same(compiled(model, added), expected)
        assert_same(nnx.state(model), nnx.state(reference))
