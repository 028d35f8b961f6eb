"""What is called, and how: functions, constructors, methods, in every style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nnx.modes import GRAPH, TREE, in_every_style, without_updates

X = np.ones((1, 2), np.float32)


class Scale(nnx.Module):
    """Static attributes, and a weight that is drawn."""

    def __init__(self, din, dout, *, rngs):
        self.w = nnx.Param(jax.random.uniform(rngs.params(), (din, dout)))
        self.din, self.dout = din, dout


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.array(0))
        self.w = nnx.Param(jnp.full(2, 2.0))
        self.b = nnx.Param(jnp.zeros(2))

    def __call__(self, x):
        self.count[...] += 1
        return x * self.w + self.b


def linear():
    return nnx.Linear(2, 3, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))


@in_every_style
def test_traced_once(place, style):
    """Calls with arguments like the first one's do not trace; nor does another value of the state."""
    traces = []

    @place.jit(**style)
    def f(model, x):
        traces.append(1)
        return model(x)

    model = place.put(linear())
    np.testing.assert_array_equal(f(model, X), np.full((1, 3), 2.0))
    model.kernel[...] *= 2
    np.testing.assert_array_equal(f(model, X), np.full((1, 3), 4.0))
    f(place.put(linear()), X)
    assert len(traces) == 1


def test_a_constructor(place):
    """It is traced once for each combination of static arguments; what it makes has them as they were."""
    traces = []

    class Jitted(Scale):
        @place.jit(static_argnums=(1, 2), **GRAPH)
        def __init__(self, din, dout, *, rngs):
            traces.append(1)
            super().__init__(din, dout, rngs=rngs)

    for _ in range(2):
        model = Jitted(2, 3, rngs=nnx.Rngs(0))
        assert (model.w.shape, model.din, model.dout, type(model.dout)) == ((2, 3), 2, 3, int)
        assert isinstance(model.w[...], jax.Array) and len(traces) == 1
    np.testing.assert_allclose(model.w[...], Scale(2, 3, rngs=nnx.Rngs(0)).w[...], rtol=1e-6)
    assert Jitted(2, 4, rngs=nnx.Rngs(0)).w.shape == (2, 4) and len(traces) == 2


@without_updates
def test_a_function_that_makes_a_module(place, style):
    traces = []

    @place.jit(static_argnums=(0, 1), **style)
    def make(din, dout, *, rngs):
        traces.append(1)
        return Scale(din, dout, rngs=rngs)

    for _ in range(2):
        rngs = nnx.Rngs(0)
        model = make(2, 3, rngs=rngs)
        assert (model.w.shape, model.din, model.dout, type(model.dout)) == ((2, 3), 2, 3, int)
        assert int(rngs.params.count[...]) == 1 and len(traces) == 1
    np.testing.assert_allclose(model.w[...], Scale(2, 3, rngs=nnx.Rngs(0)).w[...], rtol=1e-6)


@in_every_style
def test_a_method(place, style):
    traces = []

    class Jitted(Counter):
        @place.jit(**style)
        def __call__(self, x):
            traces.append(1)
            return super().__call__(x)

    model = place.put(Jitted())
    for count in (1, 2):
        np.testing.assert_array_equal(model(np.ones(2, np.float32)), np.full(2, 2.0))
        assert int(model.count[...]) == count and len(traces) == 1


@in_every_style
def test_a_jitted_method_inside_a_jitted_function(place, style):
    class Jitted(Counter):
        @place.jit(**style)
        def __call__(self, x):
            return super().__call__(x)

    f, model = place.jit(lambda model, x: model(x) + 1, **style), place.put(Jitted())
    for count in (1, 2):
        np.testing.assert_array_equal(f(model, np.ones(2, np.float32)), np.full(2, 3.0))
        assert int(model.count[...]) == count


@in_every_style
def test_lowered_and_compiled(place, style):
    """A compiled function updates its arguments as the function does, and can be asked what it is."""
    f, model, x = place.jit(lambda model, x: model(x), **style), place.put(Counter()), np.ones(2, np.float32)
    compiled = f.lower(model, x).compile()
    assert len(compiled.as_text()) > 0
    for count in (1, 2):
        np.testing.assert_array_equal(compiled(model, x), np.full(2, 2.0))
        assert int(model.count[...]) == count
    shape = f.eval_shape(model, x)
    assert (shape.shape, shape.dtype) == ((2,), jnp.float32) and int(model.count[...]) == 2


@in_every_style
def test_custom_vjp(place, style):
    """The function itself, and its gradient by its own rule."""

    @nnx.custom_vjp(**style)
    def f(x, y):
        return jnp.sin(x) * y

    def backward(saved, g):
        g = g[1] if style is GRAPH else g  # the gradients of the updated arguments come first
        return 7 * saved[0] * g * saved[2], saved[1] * g

    f.defvjp(lambda x, y: (f(x, y), (jnp.cos(x), jnp.sin(x), y)), backward)
    x, y = place.put(nnx.Param(jnp.array([1.0, 2.0])), nnx.Param(jnp.array([3.0, 4.0])))
    out = place.jit(lambda x, y: f(x[...], y[...]), **style)(x, y)
    np.testing.assert_allclose(out, np.sin([1.0, 2.0]) * [3.0, 4.0], rtol=1e-6)
    grad = place.jit(lambda x, y: jax.grad(lambda x: f(x, y[...]).sum())(x[...]), **style)(x, y)
    np.testing.assert_allclose(grad, 7 * np.cos([1.0, 2.0]) * [3.0, 4.0], rtol=1e-6)


@in_every_style
@pytest.mark.parametrize("options", [dict(static_argnums=(1,)), dict(static_argnames="relu")])
def test_static_arguments(place, style, options):
    f = place.jit(lambda v, relu: jnp.maximum(v[...], 0) if relu else v[...], **style, **options)
    v = place.put(nnx.Param(jnp.array([-1.0, 2.0])))
    np.testing.assert_array_equal(f(v, True), [0.0, 2.0])
    np.testing.assert_array_equal(f(v, False), [-1.0, 2.0])


def test_what_flax_is_set_to(place):
    """The mode is that of the time when the function is made."""
    v = place.put(nnx.Param(jnp.ones(2)))
    f = lambda a, b: a[...] + b[...]
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        tree, graph = place.jit(f), place.jit(f, **GRAPH)
        np.testing.assert_array_equal(graph(v, v), np.full(2, 2.0))
    with pytest.raises(ValueError, match="Duplicate Param"):
        tree(v, v)
    np.testing.assert_array_equal(place.jit(f, **TREE)(v, nnx.Param(jnp.ones(2))), np.full(2, 2.0))
