"""Loops over several tasks that nobody calls microbatches: training steps, sums of gradients, tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import MOMENTUM, assert_same, born_with_optimizer, pipeline, place, values
from tests.slow import few, grid

TOKENS = np.random.default_rng(0).integers(0, 16, (4, 4, 9)).astype(np.int32)


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(params=0, dropout=1)
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.mix = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.mix:
            x = x + jnp.tanh(layer(x))
        return self.head(self.dropout(self.norm(x)))


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def train_microbatches(model, optimizer, tokens):
    grad_fn = mm.microbatch(nnx.value_and_grad(loss_fn), 0, 2, argnum=1, reduce="mean", schedule="1f1b")
    loss, grads = grad_fn(model, tokens)
    optimizer.update(model, grads)
    return loss


def steps(step, reverse=False):
    """Several steps of training in one call, with `lax.scan`."""

    def run(model, optimizer, tokens):
        graphdef, state = nnx.split((model, optimizer))

        def body(state, batch):
            merged = nnx.merge(graphdef, state)
            loss = step(*merged, batch)
            return nnx.state(merged), loss

        state, losses = jax.lax.scan(body, state, tokens, reverse=reverse)
        nnx.update((model, optimizer), state)
        return losses

    return run


def nnx_steps(model, optimizer, tokens):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(both, batch):
        return both, train(*both, batch)

    return body((model, optimizer), tokens)[1]


def summed(model, optimizer, tokens):
    """Gradients summed over slices by hand."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def body(carry, batch):
        sums, rest = carry

        merged = nnx.merge(graphdef, params, rest, copy=True)
        value, grads = nnx.value_and_grad(loss_fn)(merged, batch)
        rest = nnx.state(merged, nnx.Not(nnx.Param))
        return (jax.tree.map(jnp.add, sums, grads), rest), value

    start = jax.tree.map(jnp.zeros_like, params), rest
    (grads, rest), losses = jax.lax.scan(body, start, tokens)
    nnx.update(model, rest)
    optimizer.update(model, grads)
    return losses


def steps_of_sums(model, optimizer, tokens):
    return steps(lambda m, o, batch: summed(m, o, batch[:, None]).sum())(model, optimizer, tokens)


def decoded(model, optimizer, tokens):
    model.eval()

    def body(token, _):
        token = jnp.argmax(model(token), -1)
        return token, token

    return jax.lax.scan(body, tokens[0, :, :1], length=6)[1]


def decoded_by_fori(model, optimizer, tokens):
    model.eval()

    def body(i, seen):
        logits = model(jax.lax.dynamic_slice_in_dim(seen, i, 1, 1))
        return jax.lax.dynamic_update_slice_in_dim(seen, jnp.argmax(logits, -1), i + 1, 1)

    return jax.lax.fori_loop(0, 5, body, tokens[0])


def evaluated(model, optimizer, tokens):
    model.eval()
    return jax.lax.map(lambda batch: loss_fn(model, batch), tokens)


LOOPS = {
    "training steps": steps(train),
    "training steps, last first": steps(train, reverse=True),
    "training steps, nnx.scan": nnx_steps,
    "training steps of microbatches": steps(train_microbatches),
    "sums of gradients": summed,
    "training steps of sums": steps_of_sums,
    "tokens": decoded,
    "tokens, fori_loop": decoded_by_fori,
    "evaluation": evaluated,
}


def made():
    """The model and its optimizer on three meshes, and the MultiMesh."""
    mesh, tasks = pipeline(3)
    placement = place(tasks, ["embed", ("mix", 0)], [("mix", 1)], ["norm", "head"])
    with mesh:
        return mesh, *born_with_optimizer(Model, placement, MOMENTUM)


@functools.cache
def on_one_device(kind: str):
    """Results, model and optimizer after each of two calls."""
    model = Model()
    whole, step = (model, nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param)), nnx.jit(LOOPS[kind])
    return [values((step(*whole, TOKENS), *map(nnx.state, whole))) for _ in range(2)]


@pytest.mark.parametrize("kind, donate", grid([*LOOPS], [False, True], step=10))
def test_parity(kind, donate):
    mesh, *split = made()
    with mesh:
        step = mm.jit(LOOPS[kind], donate_argnums=(0, 1) if donate else ())
        for each in on_one_device(kind):
            homes = {str(path): x.sharding for path, x in jax.tree.leaves_with_path(nnx.state(tuple(split)))}
            assert_same(values((step(*split, TOKENS), *map(nnx.state, split))), each, 1e-4)
            after = {str(path): x.sharding for path, x in jax.tree.leaves_with_path(nnx.state(tuple(split)))}
            assert homes == after


@functools.cache
def program(kind: str, length: int = len(TOKENS)):
    mesh, *split = made()
    with mesh:
        return mm.jit(LOOPS[kind]).program(*split, TOKENS[:length])


@few(3)
@pytest.mark.parametrize("kind", LOOPS)
def test_weights_stay_where_they_are(kind):
    """What is sent is of the batch: activations, their gradients, tokens."""
    shapes = {t.shape for t in program(kind).transfers}
    weights = {(16, 8), (8, 8), (8, 16), (16,)}
    assert shapes and not shapes & weights


@pytest.mark.parametrize("kind", ["training steps", "sums of gradients", "evaluation"])
def test_programs_do_not_grow_with_the_loop(kind):
    short, long = program(kind, 2), program(kind)
    assert len(short.fragments) == len(long.fragments)
    assert len(short.calls) < len(long.calls)


def test_what_can_overlap_does():
    assert {program(kind).loops[0].schedule for kind in ("training steps", "tokens")} == {"sequential"}
    assert program("sums of gradients").loops[0].schedule not in ("sequential", "gpipe")
    assert program("evaluation").simulate().makespan < program("tokens").simulate().makespan


def test_results_of_an_iteration_that_are_constants():
    def step(model, x):
        def body(carry, row):
            return carry + 1.0, (1.0, model.mix[1](jnp.tanh(model.mix[0](row))), carry)

        def loss_fn(model):
            carry, (ones, y, counts) = jax.lax.scan(body, 0.0, x)
            return (y**2).sum() * ones.sum() / carry + counts.sum()

        return nnx.value_and_grad(loss_fn)(model)

    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    mesh, (model, _) = made()[0], made()[1:]
    with mesh:
        assert_same(mm.jit(step)(model, x), nnx.jit(step)(Model(), x))
