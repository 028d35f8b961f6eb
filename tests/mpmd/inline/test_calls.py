"""Equations that hold a jaxpr, and equations of several arrays, over state of two meshes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl

import mmnnx as mm
from tests.models import make
from tests.mpmd.parity import assert_same, born, pipeline, place


class Pair(nnx.Module):
    def __init__(self, *, rngs):
        self.a = nnx.Param(jnp.arange(8.0))
        self.b = nnx.Param(jnp.arange(8.0)[::-1] * 2 + 1)
        self.slots = nnx.Variable(jnp.array([0, 2, 2, 1, 5, 5, 3, 7]))


def reduced(a, b, _):
    most = lambda x, y: (jnp.maximum(x[0], y[0]), x[1] + y[1] * 0.5)
    return lax.reduce((a, b), (jnp.float32(-1), jnp.float32(0)), most, (0,))


def reduced_in_windows(a, b, _):
    both = lambda x, y: (x[0] + y[0], x[1] + y[1] * 0.5)
    return lax.reduce_window((a, b), (jnp.float32(0), jnp.float32(0)), both, (2,), (2,), "VALID")


def kernel(a, b, _):
    def add(x, y, out):
        out[...] = x[...] + 2 * y[...]

    return pl.pallas_call(add, out_shape=jax.ShapeDtypeStruct(a.shape, a.dtype), interpret=True)(a, b)


USES = {
    "scatter-add": lambda a, b, slots: a.at[slots].add(b),
    "scatter-max": lambda a, b, slots: a.at[slots].max(b),
    "segment_sum": lambda a, b, slots: jax.ops.segment_sum(b, slots, 8) + a,
    "reduce": reduced,
    "reduce_window": reduced_in_windows,
    "pallas_call": kernel,
}


@pytest.mark.parametrize("use", USES)
def test_a_jaxpr_that_combines_entries_is_no_call(use):
    f = lambda model: USES[use](model.a[...], model.b[...], model.slots[...])
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(make(Pair), place(tasks, ["a", "slots"], ["b"]))
        assert_same(mm.jit(f)(model), nnx.jit(f)(make(Pair)()))


class Layers(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.sin(layer(x))
        return x


@pytest.mark.parametrize("of", ["parameters", "gradients"])
def test_a_barrier_for_several_arrays_leaves_each_where_it_is(of):
    def loss_fn(model, x):
        if of == "parameters":
            graph, state = nnx.split(model)
            model = nnx.merge(graph, lax.optimization_barrier(state))
        return (model(x) ** 2).mean()

    def backward(model, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        return loss, lax.optimization_barrier(grads) if of == "gradients" else grads

    step = mm.microbatch(backward, dim=0, count=4, argnum=1, reduce="mean", schedule="1f1b")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(make(Layers), place(tasks, [("layers", 0)], [("layers", 1)]))
        sent = [t.shape for t in mm.jit(step).program(model, x).transfers]
        assert_same(mm.jit(step)(model, x), nnx.jit(step)(make(Layers)(), x))
    assert sent == [(2, 8)] * 8


def test_shardings_of_a_nested_jit_hold():
    mesh, tasks = pipeline(2, 2, axes=("data",))
    with mesh:
        model = born(make(Layers), place(tasks, [("layers", 0)], [("layers", 1)]))
        rows = jax.sharding.NamedSharding(
            tasks[0].to_mesh(), jax.P("data")
        )  # of any task: axes are what counts
        nested = jax.jit(jnp.sin, out_shardings=rows)
        found = mm.jit(lambda model, x: nested(model(x)))(model, jnp.ones((8, 8)))
    assert found.sharding.spec == jax.P("data") and found.devices() == {*jax.devices()[2:4]}
