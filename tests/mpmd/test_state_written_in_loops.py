"""State that a forward writes in every microbatch, and values that are the same in all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import assert_same, born, pipeline

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


class Written(nnx.Module):
    """A layer that keeps its weights in bounds, or notes something about them, and one that does not."""

    def __init__(self, kind: str):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(6, 8, rngs=rngs)
        if kind == "weight norm":
            self.first = nnx.WeightNorm(self.first, rngs=rngs)
        self.second = nnx.Linear(8, 3, rngs=rngs)
        self.largest = nnx.Variable(jnp.zeros(()))
        self.narrow = nnx.Variable(jnp.zeros((6, 8), jnp.int8))
        self.count = nnx.Variable(jnp.int32(2))
        self.kind = kind

    def __call__(self, x):
        if self.kind != "weight norm":
            kernel = self.first.kernel
            if self.kind == "clipped":
                kernel[...] = jnp.clip(kernel[...], -0.3, 0.3)
            if self.kind == "normed":
                kernel[...] = kernel[...] / jnp.linalg.norm(kernel[...], axis=0)
            if self.kind == "noted":
                self.largest[...] = jnp.abs(kernel[...]).max()
            if self.kind == "narrowed":
                self.narrow[...] = jnp.round(jax.lax.stop_gradient(kernel[...]) * 127).astype(jnp.int8)
        return self.second(jnp.tanh(self.first(x)))


def placed(kind):
    mesh, tasks = pipeline(2)
    rules = {mm.path("second"): tasks[1], mm.path("count"): tasks[1], mm.path(...): tasks[0]}
    with mesh:
        return mesh, born(lambda: Written(kind), mm.TaskSharding(rules))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h1"])
@pytest.mark.parametrize("kind", ["weight norm", "clipped", "normed", "noted", "narrowed"])
def test_trained_weights_that_the_forward_writes(kind, schedule):
    def step(model, optimizer, x):
        grad_fn = nnx.value_and_grad(lambda model, x: jnp.mean((model(x) - 1) ** 2))
        loss, grads = mm.microbatch(grad_fn, 0, 2, argnum=1, schedule=schedule, reduce="mean")(model, x)
        optimizer.update(model, grads)
        return loss

    def run(jit, model):
        optimizer = jit(lambda model: nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param))(model)
        train = jit(step)
        return [train(model, optimizer, X) for _ in range(3)], nnx.state(model), nnx.state(optimizer)

    mesh, model = placed(kind)
    with mesh:
        found = run(mm.jit, model)
    assert_same(found, run(nnx.jit, Written(kind)))


@pytest.mark.parametrize("reduce", ["last", "concat", "mean", "max"])
@pytest.mark.parametrize(
    "value",
    [
        lambda model: jnp.linalg.norm(model.first.kernel[...]),
        lambda model: model.count[...] + 1,
        lambda model: optax.linear_schedule(1.0, 0.0, 10)(model.count[...]),
        lambda model: nnx.state(model, nnx.Not(nnx.Param)),
    ],
    ids=["norm of weights", "counter", "learning rate", "state"],
)
def test_results_that_no_microbatch_changes(value, reduce):
    def f(model, x):
        grad_fn = nnx.value_and_grad(lambda m, x: (jnp.mean(m(x) ** 2), value(m)), has_aux=True)
        return mm.microbatch(grad_fn, 0, 2, argnum=1, reduce=(("mean", reduce), "mean"))(model, x)

    mesh, model = placed("noted")
    with mesh:
        found = mm.jit(f)(model, X)
    assert_same(found, nnx.jit(f)(Written("noted"), X))
