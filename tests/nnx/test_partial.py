"""Arguments that are bound once: functools.partial around mm.jit does what nnx.jit_partial does."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import assert_same
from tests.nnx.modes import FUNCTIONAL, GRAPH, TREE, without_updates

X = np.ones((1, 2), np.float32)


def linear(n=3):
    return nnx.Linear(2, n, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))


def counted(traces):
    """Counts its calls in a Variable, and its traces in a list."""

    def f(model, x):
        traces.append(1)
        model.count[...] += 1
        return model.layer(x)

    return f


def model_with_count():
    return nnx.Dict(layer=linear(), count=nnx.Variable(jnp.array(0)))


@without_updates
def test_bound_state_is_read_and_updated(place, style):
    """Whatever it is at each call; a function is traced once for all of its values."""
    traces, model = [], place.put(model_with_count())
    f = functools.partial(place.jit(counted(traces), **style), model)
    np.testing.assert_array_equal(f(X), np.full((1, 3), 2.0))
    model.layer.kernel[...] = jnp.zeros_like(model.layer.kernel[...])
    np.testing.assert_array_equal(f(X), np.zeros((1, 3)))
    assert int(model.count[...]) == 2 and len(traces) == 1


@without_updates
def test_several_or_none_are_bound(place, style):
    one, two = place.put(linear(2), linear(3))
    f = functools.partial(place.jit(lambda one, two, x: two(one(x)), **style), one, two)
    np.testing.assert_array_equal(f(X), np.full((1, 3), 4.0))
    double = functools.partial(place.jit(lambda x: x * 2, **style))
    assert double(3.0) == 6.0


@without_updates
def test_what_is_compiled_takes_the_bound_arguments_too(place, style):
    model = place.put(model_with_count())
    compiled = place.jit(counted([]), **style).lower(model, X).compile()
    f = functools.partial(compiled, model)
    for count in (1, 2):
        np.testing.assert_array_equal(f(X), np.full((1, 3), 2.0))
        assert int(model.count[...]) == count


@without_updates
@pytest.mark.parametrize("kind", ["none", "one", "each", "some"])
def test_shardings_of_bound_arguments(place, style, kind):
    """in_shardings has an entry for each argument, bound or not; or one for all."""
    over = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    whole = NamedSharding(over.mesh, P())
    shardings = {"none": (None, None), "one": whole, "each": (over, over), "some": (None, over)}[kind]
    v, x = nnx.Param(jnp.ones((8, 4))), np.ones((8, 4), np.float32)
    y = functools.partial(place.jit(lambda v, x: v[...] + x, in_shardings=shardings, **style), v)(x)
    np.testing.assert_array_equal(y, np.full((8, 4), 2.0))


@without_updates
def test_a_train_step(place, style):
    def train(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def run(jit, put):
        model = linear()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        put(model, optimizer)
        step = functools.partial(jit(train, **style), model, optimizer)
        return [step(X, np.ones((1, 3), np.float32)) for _ in range(2)], nnx.state(model)

    assert_same(run(place.jit, place.put), run(nnx.jit, lambda *_: None))


def test_bound_arguments_that_share_state(place):
    """A tree refuses them, a graph knows that they do."""
    v = nnx.Param(jnp.ones(2))
    one, two = place.put(nnx.Dict(v=v), nnx.Dict(v=v))

    def f(one, two, x):
        one.v[...] += x
        return one.v[...] + two.v[...]

    with pytest.raises(ValueError, match="Duplicate Param"):
        functools.partial(place.jit(f, **TREE), one, two)(1.0)
    np.testing.assert_array_equal(
        functools.partial(place.jit(f, **FUNCTIONAL), one, two)(1.0), np.full(2, 4.0)
    )
    np.testing.assert_array_equal(v[...], np.full(2, 2.0))


def test_cached_partial():
    """Flax's own, which hands the same copy of a bound module to every call, takes mm.jit for nnx.jit."""
    model = linear()

    @mm.jit(**GRAPH)
    def f(cached, model):
        assert cached is not model and cached.kernel is model.kernel
        return cached

    cached_f = nnx.compat.cached_partial(f, model)
    cached = cached_f(model)
    assert cached is not model and cached.kernel is model.kernel
    assert cached_f(model) is cached
