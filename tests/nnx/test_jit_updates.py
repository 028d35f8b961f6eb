"""What a function does to its arguments is done to them: values in every style, structure in one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nnx.modes import FUNCTIONAL, GRAPH, in_every_style, without_updates


class Two(nnx.Module):
    """Two Variables, and how often functions of these tests were traced is counted beside it."""

    def __init__(self):
        self.a = nnx.Param(jnp.full(2, 1.0))
        self.b = nnx.Param(jnp.full(2, 2.0))


class Layers(nnx.Module):
    """Two submodules, of one type or of two."""

    def __init__(self, first=nnx.LayerNorm, second=nnx.BatchNorm):
        self.a, self.b = first(2, rngs=nnx.Rngs(0)), second(2, rngs=nnx.Rngs(1))


class Self(nnx.Module):
    """May refer to itself."""

    def __init__(self):
        self.ref = nnx.data(None)
        self.w = nnx.Param(jnp.ones(2))


def counted(fun):
    """The function, and a list with one entry for each time it is traced."""
    traces = []

    def watched(*args):
        traces.append(1)
        return fun(*args)

    return watched, traces


# Values


@pytest.mark.parametrize("value", [7, np.float32(7), jnp.full(2, 7.0)], ids=["int", "numpy", "array"])
def test_an_attribute_is_assigned(place, value):
    """Where graphs are updated, what is assigned to a Variable's name takes its place."""
    model = place.put(nnx.Dict(a=nnx.Param(jnp.ones(2))))

    def f(model):
        model.a = value
        return 1.0

    assert place.jit(f, **GRAPH)(model) == 1.0
    assert isinstance(model.a, jax.Array)
    np.testing.assert_array_equal(model.a, value)


@in_every_style
@pytest.mark.parametrize("one", [1, jnp.array(1), jnp.ones(2)], ids=["int", "scalar", "array"])
def test_a_value_is_set(place, style, one):
    model = nnx.Dict(a=nnx.Param(one))
    variable = (model if isinstance(one, int) else place.put(model)).a

    def f(model):
        model.a.set_value(model.a.get_value() + 1)
        return 1.0

    assert place.jit(f, **style)(model) == 1.0
    assert model.a is variable
    np.testing.assert_array_equal(model.a[...], one + 1)


@in_every_style
def test_values_are_exchanged(place, style):
    """Variables stay what and where they are, and their values change. No call is traced again."""

    def f(model):
        a, b = model.a.get_value(), model.b.get_value()
        model.a.set_value(b)
        model.b.set_value(a)

    watched, traces = counted(f)
    swap, model = place.jit(watched, **style), place.put(Two())
    a, b = model.a, model.b
    for expected in ((2, 1), (1, 2), (2, 1)):
        assert swap(model) is None
        assert model.a is a and model.b is b
        assert (float(a[0]), float(b[0])) == expected
    assert len(traces) == 1


@without_updates
@pytest.mark.parametrize("wrapped", [False, True], ids=["argument", "in a pytree"])
def test_exchanged_attributes_are_forgotten(place, style, wrapped):
    """Without graph updates, what the function does to the structure of its own copy stays there."""

    def f(tree):
        model = tree[0]["model"] if wrapped else tree
        model.a, model.b = model.b, model.a

    watched, traces = counted(f)
    swap, model = place.jit(watched, **style), place.put(Layers(nnx.LayerNorm, nnx.LayerNorm))
    a, b = model.a, model.b
    for _ in range(2):
        swap(({"model": model},) if wrapped else model)
        assert model.a is a and model.b is b
    assert len(traces) == 1


# Structure


def test_exchanged_variables(place):
    def f(model):
        model.a, model.b = model.b, model.a

    model = place.put(Two())
    a, b = model.a, model.b
    place.jit(f, **GRAPH)(model)
    assert model.a is b and model.b is a
    np.testing.assert_array_equal(model.b[...], np.full(2, 1.0))


@pytest.mark.parametrize("wrapped", [False, True], ids=["argument", "in a pytree"])
def test_exchanged_submodules_of_one_type(place, wrapped):
    """The structure is then as before, and nothing is traced again."""

    def f(tree):
        model = tree[0]["model"] if wrapped else tree
        model.a, model.b = model.b, model.a

    watched, traces = counted(f)
    swap, model = place.jit(watched, **GRAPH), place.put(Layers(nnx.LayerNorm, nnx.LayerNorm))
    a, b = model.a, model.b
    for first, second in ((b, a), (a, b)):
        swap(({"model": model},) if wrapped else model)
        assert model.a is first and model.b is second
    assert len(traces) == 1


def test_exchanged_submodules_of_two_types(place):
    """Each order is traced once, and values go along with their Variables."""

    def f(model):
        model.a, model.b = model.b, model.a

    watched, traces = counted(f)
    swap, model = place.jit(watched, **GRAPH), place.put(Layers())
    a, b = model.a, model.b
    variables = [a.scale, a.bias, b.scale, b.bias, b.mean, b.var]
    before = [np.asarray(v[...]) for v in variables]
    for count, first, second in ((1, b, a), (2, a, b), (2, b, a), (2, a, b)):
        swap(model)
        assert model.a is first and model.b is second and len(traces) == count
    for variable, value in zip(variables, before):
        np.testing.assert_array_equal(variable[...], value)


@pytest.mark.parametrize("returned", [False, True])
def test_a_module_refers_to_itself(place, returned):
    """From the second call on it comes in so, and is traced once more; what is returned is what came in."""

    def f(model):
        model.ref = model
        model.w[...] += 1.0
        return model if returned else None

    watched, traces = counted(f)
    call, model = place.jit(watched, **GRAPH), place.put(Self())
    for count in (1, 2, 2):
        out = call(model)
        assert model.ref is model and len(traces) == count
        assert out is (model if returned else None)
    np.testing.assert_array_equal(model.w[...], np.full(2, 4.0))


def test_shared_state_is_updated_once(place):
    """Two arguments share a Variable; the copies inside are one object, also without graph updates."""
    for style in (GRAPH, FUNCTIONAL):
        v = nnx.Param(jnp.ones(2))
        one, two = nnx.Dict(v=v), nnx.Dict(v=v, w=nnx.Param(jnp.zeros(2)))
        place.put(one, two)

        def f(one, two):
            one.v[...] += 1.0
            two.w[...] += two.v[...]
            return one.v is two.v

        assert place.jit(f, **style)(one, two)
        np.testing.assert_array_equal(v[...], np.full(2, 2.0))
        np.testing.assert_array_equal(two.w[...], np.full(2, 2.0))
