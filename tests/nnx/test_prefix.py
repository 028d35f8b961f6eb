"""Shardings for parts of an NNX object, in every style: nnx.prefix, StateSharding, TaskSharding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import pipeline
from tests.nnx.modes import FUNCTIONAL, GRAPH, TREE, in_every_style, without_updates
from tests.slow import few

KERNEL, BIAS = nnx.PathContains("kernel"), nnx.PathContains("bias")


def linear():
    init = lambda _, shape, dtype: jnp.arange(1, 33, dtype=dtype).reshape(shape) / 32
    return nnx.Linear(8, 4, kernel_init=init, rngs=nnx.Rngs(0))


def shardings():
    """Of kernels and biases, over all devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    return {KERNEL: NamedSharding(mesh, P("a", "b")), BIAS: NamedSharding(mesh, P("b"))}


# Results


@without_updates
def test_a_result(place, style):
    """A module is made with the sharding that each part of a prefix asks for."""
    prefix = nnx.prefix(linear(), shardings(), graph=style["graph"])
    model = place.jit(linear, out_shardings=prefix, **style)()
    assert (model.kernel.sharding.spec, model.bias.sharding.spec) == (P("a", "b"), P("b"))
    np.testing.assert_array_equal(model.kernel[...], linear().kernel[...])


@without_updates
@pytest.mark.parametrize("static", [dict(static_argnums=(1, 2)), dict(static_argnames=("double", "bias"))])
def test_beside_static_arguments(place, style, static):
    """What the function itself asks for gives way to out_shardings."""
    prefix = nnx.prefix(linear(), shardings(), graph=style["graph"])

    def make(scale, double, bias):
        model = linear()
        kernel = model.kernel[...] * scale * (2 if double else 1)
        model.kernel.set_value(jax.lax.with_sharding_constraint(kernel, NamedSharding(mesh, P("b", "a"))))
        return model

    mesh = shardings()[KERNEL].mesh
    model = place.jit(make, out_shardings=prefix, **style, **static)(0.5, True, True)
    assert model.kernel.sharding.spec == P("a", "b")
    np.testing.assert_array_equal(model.kernel[...], linear().kernel[...])


@without_updates
def test_specs_and_none_and_one_of_several_results(style):
    """A PartitionSpec is over the current MultiMesh; None leaves it to mm.jit."""
    prefix = nnx.prefix(linear(), {KERNEL: P("model"), ...: None}, graph=style["graph"])
    with pipeline(2, 2)[0]:
        model, total = mm.jit(lambda x: (linear(), x + 1), out_shardings=(prefix, None), **style)(1.0)
    assert model.kernel.sharding.spec == P("model")
    np.testing.assert_array_equal(model.bias[...], np.zeros(4))
    assert total == 2


@without_updates
def test_parts_on_two_meshes(style):
    """The meshes of the shardings are submeshes: what is placed by them is split as by a TaskSharding."""
    mesh, tasks = pipeline(2)
    make = lambda: nnx.Sequential(linear(), nnx.LayerNorm(4, rngs=nnx.Rngs(1)))
    with mesh:
        on = [NamedSharding(task.to_mesh(), P()) for task in tasks]
        rules = {mm.path("layers", 0): on[0], mm.path("layers", 1): on[1]}
        model = mm.jit(make, out_shardings=nnx.prefix(make(), rules, graph=style["graph"]), **style)()
        y = mm.jit(lambda model, x: model(x), **style)(model, np.ones((2, 8), np.float32))
    assert [model.layers[0].kernel.sharding, model.layers[1].scale.sharding] == on
    np.testing.assert_allclose(y, make()(jnp.ones((2, 8))), rtol=1e-5)
    assert y.sharding.device_set == on[1].device_set


# Arguments


@without_updates
def test_an_argument(place, style):
    """What comes in as a prefix says goes out so, where it is changed."""
    model = linear()
    prefix = nnx.prefix(model, shardings(), graph=style["graph"])

    @place.jit(in_shardings=(prefix, None), **style)
    def step(model, x):
        model.kernel[...] += 1.0
        return model(x)

    y = step(model, np.ones((2, 8), np.float32))
    assert model.kernel.sharding.spec == P("a", "b")
    np.testing.assert_allclose(model.kernel[...], linear().kernel[...] + 1, rtol=1e-6)
    np.testing.assert_allclose(y, model(jnp.ones((2, 8))), rtol=1e-5)


def test_by_filters_with_graph_updates(place):
    """nnx.StateSharding, beside static arguments: state is moved even if nothing changes it."""
    model = linear()

    @place.jit(in_shardings=(nnx.StateSharding(shardings()), None), static_argnames="double", **GRAPH)
    def look(model, scale, double):
        return model.kernel[...].sum() * scale * (2 if double else 1)

    total = look(model, 0.5, True)
    assert (model.kernel.sharding.spec, model.bias.sharding.spec) == (P("a", "b"), P("b"))
    np.testing.assert_allclose(total, linear().kernel[...].sum(), rtol=1e-5)


@few(6)
@pytest.mark.parametrize("static", [dict(static_argnums=(2,)), dict(static_argnames=("relu",))])
@in_every_style
def test_an_array_beside_static_arguments(place, style, static):
    sharded = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    f = place.jit(
        lambda x, scale, relu: (jnp.maximum(x, 0) if relu else x).sum() * scale,
        in_shardings=(sharded, None),
        **style,
        **static,
    )
    x = np.arange(-8.0, 8.0, dtype=np.float32).reshape(8, 2)
    assert (f(x, 0.5, True), f(x, 0.5, False)) == (14.0, -4.0)


def test_objects_that_share_state():
    """A prefix made for two arguments together knows what they share once."""
    mesh, _ = pipeline(2, 2)
    shared = linear()
    first, second = nnx.Dict(a=shared), nnx.Dict(b=shared, c=nnx.Param(jnp.zeros(4)))
    prefixes = nnx.prefix((first, second), {nnx.PathContains("c"): P("model"), ...: P()}, graph=True)

    @mm.jit(in_shardings=prefixes, **FUNCTIONAL)
    def f(first, second):
        second.c[...] += first.a.bias[...] + 1.0
        second.b.bias[...] += 2.0

    with mesh:
        f(first, second)
    np.testing.assert_array_equal(second.c[...], np.ones(4))
    np.testing.assert_array_equal(shared.bias[...], np.full(4, 2.0))
    assert (second.c.sharding.spec, shared.bias.sharding.spec) == (P("model"), P())


@in_every_style
def test_task_sharding_in_every_style(style):
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("kernel"): tasks[0], mm.path("bias"): tasks[1]})
    with mesh:
        model = mm.jit(linear, out_shardings=placement, **style)()
        assert model.bias.sharding.device_set == {jax.devices()[1]}

        @mm.jit(in_shardings=(placement,), **style)
        def double(model):
            model.kernel[...] *= 2
            model.bias[...] += 1

        other = linear()
        double(other)
    assert [v.sharding.device_set for v in (other.kernel, other.bias)] == [{d} for d in jax.devices()[:2]]
    np.testing.assert_array_equal(other.kernel[...], 2 * model.kernel[...])


# What is refused when the function is made


def test_graph_nodes_are_no_prefix():
    model = linear()
    for options in (GRAPH, FUNCTIONAL):
        for name in ("in_shardings", "out_shardings"):
            with pytest.raises(ValueError, match=rf"{name} is a Linear. Graph nodes are not allowed as pref"):
                mm.jit(lambda x: x, **{name: model}, **options)
    tree = nnx.prefix(model, {...: P()}, graph=False)
    with pytest.raises(ValueError, match=r"in_shardings\[0\] is a Linear.*nnx.prefix"):
        mm.jit(lambda x: x, in_shardings=(tree, None), **FUNCTIONAL)
    for options in (GRAPH, TREE):
        with pytest.raises(ValueError, match="out_shardings is a Param: give a sharding for all of the Var"):
            mm.jit(lambda x: x, out_shardings=nnx.Param(P()), **options)


def test_a_prefix_of_another_mode():
    prefix = nnx.prefix(linear(), {...: P()}, graph=True)
    for options in (GRAPH, TREE):
        with pytest.raises(ValueError, match=r"in_shardings\[0\] was made by nnx.prefix with graph=True"):
            mm.jit(lambda x: x, in_shardings=(prefix,), **options)
    with nnx.set_graph_updates(False):  # the mode is the one that Flax is set to
        mm.jit(lambda x: x, in_shardings=(prefix,))


@without_updates
def test_state_sharding_is_for_graph_updates(style):
    sharding = nnx.StateSharding({...: P()})
    for name in ("in_shardings", "out_shardings"):
        with pytest.raises(ValueError, match=f"{name}.*cannot contain `StateSharding` objects.*nnx.prefix"):
            mm.jit(lambda x: x, **{name: sharding}, **style)


def test_what_is_no_sharding():
    task = pipeline(2)[1][0]
    for wrong in (3, nnx.prefix(linear(), {...: 3}, graph=False)):
        with pytest.raises(TypeError, match=r"in_shardings\[0\] has 3, which is no NamedSharding"):
            mm.jit(lambda x: x, in_shardings=(wrong,), **TREE)
    inside = nnx.prefix(linear(), {...: mm.TaskSharding({...: task})}, graph=True)
    with pytest.raises(TypeError, match="out_shardings has TaskSharding.*, which is no NamedSharding"):
        mm.jit(linear, out_shardings=inside, **FUNCTIONAL)


# What is refused when it is called


@without_updates
def test_a_prefix_of_another_model(style):
    wrong = nnx.prefix(nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0)), {...: P()}, graph=style["graph"])
    f = mm.jit(linear, out_shardings=wrong, **style)
    with (
        pipeline(2)[0],
        pytest.raises(
            ValueError, match="out_shardings (is no prefix of this Linear|has no sharding for bias: call)"
        ),
    ):
        f()
    wrong = nnx.prefix(nnx.Dict(a=linear(), b=linear()), {...: P()}, graph=style["graph"])
    f = mm.jit(lambda: nnx.Dict(a=linear()), out_shardings=wrong, **style)
    with (
        pipeline(2)[0],
        pytest.raises(
            ValueError, match="out_shardings (is no prefix of this Dict|has a sharding for b.bias, wh)"
        ),
    ):
        f()


def test_inconsistent_aliasing(place):
    """One Variable cannot have two shardings, whatever asks for them; None asks for nothing."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    whole, halves = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    by = lambda sharding: nnx.StateSharding({...: sharding})
    cases = [
        (GRAPH, (whole, halves)),
        (FUNCTIONAL, (whole, halves)),
        (GRAPH, (by(whole), by(halves))),
    ]
    for options, pair in cases:
        f = place.jit(lambda a, b: a[...] + b[...], in_shardings=pair, **options)
        v = place.put(nnx.Param(jnp.ones(2)))
        with pytest.raises(ValueError, match="Inconsistent aliasing"):
            f(v, v)
        np.testing.assert_array_equal(f(nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))), np.full(2, 2.0))


def test_inconsistent_aliasing_says_where():
    mesh, tasks = pipeline(2)
    v = nnx.Param(jnp.ones(2))
    tied = nnx.StateSharding({nnx.PathContains("a"): P(), nnx.PathContains("b"): P("stage")})
    with (
        mesh,
        pytest.raises(ValueError, match=r"one Param is asked to be P\(\) .*by in_shardings\[0\] and P\('st"),
    ):
        mm.jit(lambda m: m.a[...], in_shardings=(tied,))(nnx.Dict(a=v, b=v))
    apart = tuple(nnx.prefix(v, {...: spec}, graph=True) for spec in (P(), P("stage")))
    with mesh, pytest.raises(ValueError, match=r"Inconsistent aliasing: one Param"):
        mm.jit(lambda a, b: a[...] + b[...], in_shardings=apart, **FUNCTIONAL)(v, v)
    each = tuple(mm.TaskSharding({...: task}) for task in tasks)
    message = r"one Param .*stage0.* by out_shardings\[0\] and .*stage1.* by out_shardings\[1\]. Ask for one"
    with mesh, pytest.raises(ValueError, match=message):
        mm.jit(lambda: (nnx.Dict(a=(v := nnx.Param(jnp.ones(2)))), nnx.Dict(b=v)), out_shardings=each)()


def test_none_asks_for_nothing():
    """Unlike nnx.jit's: a function may be told where a part of an argument goes, and not the rest."""
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("kernel"): tasks[0], mm.path("bias"): tasks[1]})
    model = linear()
    with mesh:
        mm.jit(lambda model, kernel: None, in_shardings=(placement, None))(model, model.kernel)
    assert model.kernel.sharding.device_set == {jax.devices()[0]}


def test_the_first_rule_decides_for_tied_state():
    """A TaskSharding is one list of rules: a Variable with two paths, or in two arguments, has one home."""
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("a"): tasks[0], mm.path("b"): tasks[1]})
    v = nnx.Param(jnp.ones(2))
    with mesh:
        mm.jit(lambda one, two: None, in_shardings=(placement, placement))(nnx.Dict(b=v), nnx.Dict(a=v))
        assert v.sharding.device_set == {jax.devices()[0]}
