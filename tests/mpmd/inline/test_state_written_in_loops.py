"""State that a forward writes in every microbatch, and values that are the same in all of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import MOMENTUM, assert_same, born, born_with_optimizer, pipeline, values
from tests.slow import few, grid

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


@functools.cache
def written(kind):
    """A function that makes the model."""
    return lambda: Written(kind)


def rules_for(tasks):
    return mm.TaskSharding({mm.path("second"): tasks[1], mm.path("count"): tasks[1], mm.path(...): tasks[0]})


def step_by(schedule):
    def step(model, optimizer, x):
        grad_fn = nnx.value_and_grad(lambda model, x: jnp.mean((model(x) - 1) ** 2))
        loss, grads = mm.microbatch(grad_fn, 0, 2, argnum=1, schedule=schedule, reduce="mean")(model, x)
        optimizer.update(model, grads)
        return loss

    return step


def after_three(train, model, optimizer):
    return values(([train(model, optimizer, X) for _ in range(3)], nnx.state(model), nnx.state(optimizer)))


@functools.cache
def on_one_device(kind):
    model = Written(kind)
    return after_three(nnx.jit(step_by("1f1b")), model, nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param))


@pytest.mark.parametrize(
    "kind, schedule",
    grid(
        ["clipped", "weight norm", "normed", "noted", "narrowed"], ["1f1b", "zero-bubble-h1", "gpipe"], step=6
    ),
)
def test_trained_weights_that_the_forward_writes(kind, schedule):
    mesh, tasks = pipeline(2)
    with mesh:
        split = born_with_optimizer(written(kind), rules_for(tasks), MOMENTUM)
        found = after_three(mm.jit(step_by(schedule)), *split)
    assert_same(found, on_one_device(kind))


@few(1)
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
def test_results_that_no_microbatch_changes(value):
    """However they are reduced."""
    reduces = ("last", "concat", "mean", "max")

    def f(model, x):
        def loss(model, x):
            return jnp.mean(model(x) ** 2), {each: value(model) for each in reduces}

        grad_fn = nnx.value_and_grad(loss, has_aux=True)
        reduce = (("mean", {each: each for each in reduces}), "mean")
        return mm.microbatch(grad_fn, 0, 2, argnum=1, reduce=reduce)(model, x)

    mesh, tasks = pipeline(2)
    with mesh:
        found = mm.jit(f)(born(written("noted"), rules_for(tasks)), X)
    assert_same(found, nnx.jit(f)(Written("noted"), X))
