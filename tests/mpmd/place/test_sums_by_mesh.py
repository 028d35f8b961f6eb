"""A value that several meshes read: each sends one gradient of it, whatever the order of the lines."""

from __future__ import annotations

import itertools
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import MOMENTUM, assert_same, born, pipeline, place
from tests.slow import all_but, few, grid

WIDTH, ROWS = 8, 4
MESH, TASKS = pipeline(3)
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem, self.aux, self.block, self.other, self.head = (
            nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(5)
        )


def residual(model, x, order):
    """A residual block elsewhere, and an auxiliary loss at home."""
    h = jnp.tanh(model.stem(x))
    said = {}
    for name in order:
        said[name] = jnp.tanh((model.aux if name == "aux" else model.block)(h))
    return ((h + said["block"]) ** 2).mean() + (said["aux"] ** 2).mean()


def read_by_three(model, x, order):
    """By layers of three meshes, two of them of one mesh."""
    h = jnp.tanh(model.stem(x))
    layers = {"aux": model.aux, "block": model.block, "other": model.other, "head": model.head}
    return sum((jnp.sin(layers[name](h)) ** 2).mean() for name in order)


def backward_sent(loss_fn, owned, size):
    """How often each mesh sends a gradient of a microbatch to each; two steps equal those of one device."""

    def step(model, optimizer, x):
        grad_fn = nnx.value_and_grad(loss_fn)
        if size is not None:
            grad_fn = mm.microbatch(grad_fn, 0, size, argnum=1, reduce="mean", schedule="1f1b", per_call=1)
        loss, grads = grad_fn(model, x)
        optimizer.update(model, grads)
        return loss

    reference = Net()
    references = reference, nnx.Optimizer(reference, MOMENTUM, wrt=nnx.Param)
    whole, split = nnx.jit(step), mm.jit(step)
    with MESH:
        model = born(Net, place(TASKS, *owned))
        state = model, mm.jit(lambda m: nnx.Optimizer(m, MOMENTUM, wrt=nnx.Param))(model)
        for _ in range(2):
            with mm.ignore_transforms():
                expected = whole(*references, X)
            assert_same(split(*state, X), expected)
        assert_same(nnx.state(state), nnx.state(references))
        sent = split.program(*state, X).transfers
    return Counter((t.source, t.target) for t in sent if t.shape and t.microbatch in (None, 0))


@pytest.mark.parametrize("order, size", grid([("aux", "block"), ("block", "aux")], [None, 2]))
def test_a_residual_block_and_an_auxiliary_loss(order, size):
    loss_fn = lambda model, x: residual(model, x, order)
    owned = [["stem", "aux"], ["block"], ["other", "head"]]
    assert backward_sent(loss_fn, owned, size) == {("stage0", "stage1"): 1, ("stage1", "stage0"): 1}


NAMES = ["aux", "block", "other", "head"]
ORDERS = [[*order] for order in itertools.islice(itertools.permutations(NAMES), 0, None, 5)]


@pytest.mark.parametrize("order", all_but(ORDERS[2:3], ORDERS))
def test_a_value_that_three_meshes_read(order):
    loss_fn = lambda model, x: read_by_three(model, x, order)
    sent = backward_sent(loss_fn, [["stem", "aux"], ["block", "head"], ["other"]], None)
    assert sum(sent.values()) == 4 and max(sent.values()) == 1  # to both others, and a gradient from each


@few(1)
@pytest.mark.parametrize("size", [None, 2])
def test_a_sum_that_is_read_on_the_way_and_at_home(size):
    """A residual block elsewhere, whose result is read there and by a later layer at home."""

    def loss_fn(model, x):
        x = jnp.tanh(model.stem(x))
        h = x + jnp.tanh(model.block(x))
        return ((x + jnp.tanh(model.aux(h))) ** 2).mean() + (jnp.tanh(model.other(h)) ** 2).mean()

    sent = backward_sent(loss_fn, [["stem", "aux"], ["block", "other"], ["head"]], size)
    assert set(sent) == {("stage0", "stage1"), ("stage1", "stage0")}
    assert sum(sent.values()) <= 5  # there and back, twice, and a gradient that is added up elsewhere
