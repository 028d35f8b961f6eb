"""Without graph updates: arguments are trees of Variables, each of which is there once.

What the styles have in common is in the other files.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import assert_same, homes, pipeline
from tests.nnx.modes import FUNCTIONAL, GRAPH, TREE, in_every_style, without_updates
from tests.slow import few


def param(value=1.0):
    return nnx.Param(jnp.full(2, value))


class Tied(nnx.Module):
    """A layer under two names."""

    def __init__(self):
        self.first = nnx.Linear(2, 2, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
        self.again = self.first
        self.last = nnx.Linear(2, 2, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.last(self.again(jnp.tanh(self.first(x))))


# One object in two places


@without_updates
def test_new_objects_are_returned(place, style):
    """Copies, and what is made inside."""
    v = place.put(param())
    copy, new = place.jit(lambda v: (nnx.clone(v), nnx.Param(v[...] + 1)), **style)(v)
    assert copy is not v and type(new) is nnx.Param
    np.testing.assert_array_equal(copy[...], np.full(2, 1.0))
    np.testing.assert_array_equal(new[...], np.full(2, 2.0))


def test_an_argument_is_not_returned(place):
    """Nor is anything returned twice, in a tree; in a graph it then is one object."""
    v = place.put(param())
    twice = lambda v: [w := nnx.Param(v + 1), w]
    for f, style in ((lambda v: v, TREE), (lambda v: v, FUNCTIONAL), (twice, TREE)):
        with pytest.raises(ValueError, match="does not support Variable aliasing"):
            place.jit(f, **style)(v)
    one, two = place.jit(twice, **FUNCTIONAL)(v)
    assert one is two
    np.testing.assert_array_equal(one[...], np.full(2, 2.0))


def test_an_argument_is_given_once(place):
    """A tree holds a Variable once, whatever is called; graphs know that two arguments are one."""
    v = place.put(param())
    f = place.jit(lambda a, b: a[...] + b[...], **TREE)
    for call in (f, f.lower, f.trace, f.eval_shape):
        with pytest.raises(ValueError, match=r"Duplicate Param(.|\n)*found at paths"):
            call(v, v)
    with pytest.raises(ValueError, match="Duplicate Param"):
        place.jit(lambda m, x: m(x), **TREE)(place.put(Tied()), np.ones((1, 2), np.float32))
    model = place.put(Tied())
    y = place.jit(lambda m, x: m(x), **FUNCTIONAL)(model, np.ones((1, 2), np.float32))
    np.testing.assert_allclose(y, np.full((1, 2), 4 * np.tanh(2)), rtol=1e-6)


@without_updates
def test_a_captured_variable_is_not_returned(place, style):
    captured = param()
    with pytest.raises(ValueError, match="Cannot return captured Variable"):
        place.jit(lambda x: captured, **style)(1.0)


# Donation


@without_updates
@pytest.mark.parametrize("by", ["number", "name"])
def test_donated_state_that_nothing_changes_stays(place, style, by):
    """It is given back, and can be donated again."""
    options = dict(donate_argnums=(0,)) if by == "number" else dict(donate_argnames=("v",))
    f = place.jit(lambda v: v[...] + 1.0, **options, **style)
    v = place.put(param())
    for _ in range(2):
        out = f(v) if by == "number" else f(v=v)
        np.testing.assert_array_equal(out, np.full(2, 2.0))
        np.testing.assert_array_equal(v[...], np.full(2, 1.0))


@without_updates
def test_a_donated_module(place, style):
    f = place.jit(lambda m, x: m(x), donate_argnums=0, **style)
    model, x = place.put(nnx.LayerNorm(2, rngs=nnx.Rngs(0))), np.array([[0.0, 1.0]], np.float32)
    for _ in range(2):
        np.testing.assert_allclose(f(model, x), [[-1.0, 1.0]], rtol=1e-4)
        np.testing.assert_array_equal(model.scale[...], np.ones(2))


@without_updates
def test_donated_state_is_updated(place, style):
    """Its old array is gone, where the new one can take its place."""

    def f(v):
        v[...] += 1.0

    f, v = place.jit(f, donate_argnums=0, **style), place.put(param(0.0))
    for count in (1, 2):
        old = v.get_raw_value()
        f(v)
        np.testing.assert_array_equal(v[...], np.full(2, float(count)))
        assert old.is_deleted()


@without_updates
def test_one_of_two_is_donated(place, style):
    f = place.jit(lambda a, b: a[...] + b[...], donate_argnums=0, **style)
    a, b = place.put(param(1.0), param(2.0))
    kept = b.get_raw_value()
    for _ in range(2):
        np.testing.assert_array_equal(f(a, b), np.full(2, 3.0))
        np.testing.assert_array_equal(a[...], np.full(2, 1.0))
    assert b.get_raw_value() is kept and not kept.is_deleted()


# All of a train step


class Two(nnx.Module):
    """Two layers."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def step(model, optimizer, batch):
    def loss_fn(model, batch):
        return (model(batch) ** 2).mean()

    grad_fn = mm.microbatch(nnx.value_and_grad(loss_fn), dim=0, size=2, argnum=1, reduce="mean")
    loss, grads = grad_fn(model, batch)
    optimizer.update(model, grads)
    return loss


@pytest.fixture(scope="module")
def by_flax():
    """Losses, model and optimizer after two steps under nnx.jit."""
    model = Two(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    batch, jitted = np.ones((4, 4), np.float32), nnx.jit(step)
    return [jitted(model, optimizer, batch) for _ in range(2)], model, optimizer


@few(1)
@in_every_style
def test_a_pipeline(by_flax, style):
    """A model born on two meshes, its optimizer, and microbatches: all in one style, by Flax's own switch."""
    mesh, (first, last) = pipeline(2)
    placement = mm.TaskSharding({mm.path("first"): first, mm.path("last"): last})
    with mesh, nnx.set_graph_mode(style["graph"]), nnx.set_graph_updates(style["graph_updates"]):
        model = mm.jit(lambda: Two(nnx.Rngs(0)), out_shardings=placement)()
        make = lambda model: nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        optimizer = mm.jit(make)(model)
        before = homes(optimizer)
        (moment,) = (
            where for path, where in before.items() if "trace" in path and "['last']['kernel']" in path
        )
        assert moment == set(last.to_mesh().devices.flat)
        train = mm.jit(step, donate_argnums=(0, 1))
        batch = np.ones((4, 4), np.float32)
        program = train.program(model, optimizer, batch)
        assert len({call.mesh for call in program.calls}) == 2
        losses = [train(model, optimizer, batch) for _ in range(2)]
    assert_same((losses, nnx.state(model), nnx.state(optimizer)), _states(by_flax))
    assert homes(optimizer) == before


def _states(by_flax):
    losses, model, optimizer = by_flax
    return losses, nnx.state(model), nnx.state(optimizer)


@in_every_style
def test_where_arguments_would_live(style):
    """input_shardings has an nnx.State for an NNX object, in every style."""
    with pipeline(2)[0]:
        model = nnx.Dict(a=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), b=param())
        (state, x), _ = mm.jit(lambda m, x: m.a(x) + m.b, **style).input_shardings(model, np.ones((1, 2)))
    assert isinstance(state, nnx.State)
    assert {path: s.spec for path, s in nnx.to_flat_state(state)} == {
        ("a", "kernel"): P(),
        ("a", "bias"): P(),
        ("b",): P(),
    }
    assert x.spec == P()


def test_graphs_where_flax_is_set_to_trees():
    """mm.jit(graph=True) of a model whose layers are shared, beside a program in tree mode."""
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("last"): tasks[1], ...: tasks[0]})
    with mesh, nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        model = mm.jit(Tied, out_shardings=placement, **GRAPH)()
        assert model.again is model.first

        @mm.jit(**GRAPH)
        def f(model, x):
            model.first.bias[...] += 1.0
            return model(x)

        y = f(model, np.ones((1, 2), np.float32))
    np.testing.assert_allclose(y, np.full((1, 2), 2 * (2 * np.tanh(3.0) + 1)), rtol=1e-6)
    assert model.first.bias.sharding.device_set == {jax.devices()[0]}
