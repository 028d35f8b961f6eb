"""The flow comes to a mesh again: what is there already does not cross, and nor do weights or gradients."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mmnnx as mm
from tests.mpmd.parity import MOMENTUM, assert_same, born, pipeline, place
from tests.slow import few

WIDTH, EXPERTS, CAPACITY = 16, 4, 8
MESH, TASKS = pipeline(3)
X = np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)


class Layers(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second, self.third = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))


def train(loss_fn):
    def step(model, optimizer, *batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, *batch)
        optimizer.update(model, grads)
        return loss

    return step


def crossings(make, owned, step, x=X) -> Counter:
    """How often each shape goes from which stage to which in a step. Two steps equal those of one device."""
    reference = make()
    references = reference, nnx.Optimizer(reference, MOMENTUM, wrt=nnx.Param)
    whole, split = nnx.jit(step), mm.jit(step)
    with MESH:
        model = born(make, place(TASKS[: len(owned)], *owned))
        state = model, mm.jit(lambda m: nnx.Optimizer(m, MOMENTUM, wrt=nnx.Param))(model)
        for _ in range(2):
            assert_same(split(*state, x), whole(*references, x), 1e-4)
        assert_same(nnx.state(state), nnx.state(references), 1e-4)
        sent = split.program(*state, x).transfers
    return Counter((t.source, t.target, t.shape) for t in sent)


def test_gradients_of_weights_that_are_used_twice_are_summed_at_home():
    def loss_fn(model, x):
        for _ in range(2):
            x = x + model.second(jnp.tanh(model.first(x)))
        return (x**2).mean()

    there, back = ("stage0", "stage1", (4, WIDTH)), ("stage1", "stage0", (4, WIDTH))
    assert crossings(Layers, [["first", "third"], ["second"]], train(loss_fn), X[:4]) == {there: 3, back: 3}


class Experts(nnx.Module):
    """Top-1 routing with a capacity (Fedus et al. 2021), by einsum."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.encoder, self.head = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.router = nnx.Linear(WIDTH, EXPERTS, rngs=rngs)
        self.weights = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, WIDTH, WIDTH)))

    def __call__(self, x):
        x = jnp.tanh(self.encoder(x))
        gates = jax.nn.softmax(self.router(x))
        chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
        place_of = ((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1).astype(int)
        dispatch = chosen[:, :, None] * jax.nn.one_hot(place_of, CAPACITY)[:, None]
        inputs = jnp.einsum("tec,td->ecd", dispatch, x)
        outputs = jnp.einsum("ecd,edf->ecf", inputs, self.weights[...])
        combine = dispatch * gates.max(-1)[:, None, None]
        return self.head(x + jnp.einsum("tec,ecf->tf", combine, outputs))


@pytest.mark.slow
def test_rows_of_experts_alone_go_to_them_and_come_back():
    """Not the tensors of tokens by experts by capacity, which are made of what the router's mesh has."""
    step = train(lambda model, x: (model(x) ** 2).mean())
    rows = EXPERTS, CAPACITY, WIDTH
    sent = crossings(Experts, [["encoder", "router", "head"], ["weights"]], step)
    assert sent == {("stage0", "stage1", rows): 2, ("stage1", "stage0", rows): 2}


NORMS = {"l2": lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True), "softmax": jax.nn.softmax}


@few(1)
@pytest.mark.parametrize("norm", [*NORMS])
def test_gradients_that_come_from_elsewhere_go_to_the_tower_once(norm):
    """Gradient caching (Gao et al. 2021): the backward of each chunk, from the gradient of its rows."""

    def step(model, optimizer, x):
        backward = lambda model, chunk: nnx.grad(
            lambda model: (NORMS[norm](model.first(chunk[0])) * chunk[1]).sum()
        )(model)
        grads = mm.microbatch(backward, dim=0, size=8, argnum=1)(model, (x, model.second(x)))
        optimizer.update(model, grads)
        return x.sum()

    sent = crossings(Layers, [["first", "third"], ["second"]], step)
    assert {(source, target) for source, target, _ in sent} == {("stage1", "stage0")}
    assert sum(count * np.prod(shape) for (_, _, shape), count in sent.items()) == X.size


@pytest.mark.parametrize("rows", [2, 32])  # activations that are smaller than a kernel, and larger
def test_what_a_scan_carries_stays_where_it_is_made(rows):
    """It begins on another mesh, and does not go back there."""

    def forward(model, x):
        body = lambda z, _: (z + model.third(jnp.tanh(model.second(z))), None)
        return lax.scan(body, model.first(x), None, length=4)[0]

    with MESH:
        model, x = born(Layers, place(TASKS, ["first"], ["second"], ["third"])), X[:rows]
        split = mm.jit(forward)
        assert_same(split(model, x), nnx.jit(forward)(Layers(), x), 1e-4)
        sent = split.program(model, x).transfers
    ways = Counter((t.source, t.target) for t in sent)
    assert {t.shape for t in sent} == {(rows, WIDTH)}
    assert ways == {("stage0", "stage2"): 1, ("stage2", "stage1"): 4, ("stage1", "stage2"): 4}


def test_an_output_that_is_fed_back():
    """A decoder reads what its output layer said last: the gradient of that layer is made where it is."""
    length, rows = 3, 4

    def loss_fn(model, x):
        def body(carry, _):
            state, said = carry
            state = jnp.tanh(model.first(state + said))
            logits = model.second(state)
            return (state, jax.nn.one_hot(logits.argmax(-1), WIDTH)), logits

        _, logits = lax.scan(body, (x, jnp.zeros_like(x)), None, length=length)
        return ((logits - x) ** 2).mean()

    sent = crossings(Layers, [["first", "third"], ["second"]], train(loss_fn), X[:rows])
    assert all(shape[-2:] != (WIDTH, WIDTH) for _, _, shape in sent)
    entries = Counter()
    for (source, _, shape), count in sent.items():
        entries[source] += count * np.prod(shape)
    # States, and once more for the backward; what was said but for the last of it, and gradients of states.
    assert entries["stage0"] <= 2 * length * rows * WIDTH
    assert entries["stage1"] < 2 * length * rows * WIDTH
