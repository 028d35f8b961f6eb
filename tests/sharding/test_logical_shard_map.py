"""Functions that are divided over the mesh of their task by logical names."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.sharding.logical_shard_map import Layout, divided, logical_shard_map
from tests.mpmd.parity import assert_same
from tests.slow import grid

DIVIDED = "shard_map"
LAYOUT = Layout(("in", "rows"), (("rows", "in"), ("in", None)), (("rows", None),), ("rows", "in"))


@dataclasses.dataclass(frozen=True)
class Product:
    def __call__(self, x, w):
        return (jnp.sin(x) @ w,)


def mesh(*sizes: int, names: tuple[str, ...] = ("a", "b")) -> Mesh:
    count = math.prod(sizes)
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), names[: len(sizes)])


def shards(mesh: Mesh, rules, x: tuple[int, ...], w: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes that a device computes with."""
    seen = []

    def spy(x, w):
        seen.append([x.shape, w.shape])
        return (x @ w,)

    task = mm.Task("t", mesh=mesh, logical_axes=rules)
    jax.eval_shape(divided(spy, LAYOUT, [x, w], task, mesh), jnp.ones(x), jnp.ones(w))
    return seen[-1]


def test_outside_of_mm_jit_it_is_the_function():
    x, w = jnp.ones((4, 6)), jnp.ones((6, 2))
    for run in (lambda f: f, jax.jit):
        (y,) = run(lambda x, w: logical_shard_map(Product(), LAYOUT, x, w))(x, w)
        np.testing.assert_allclose(y, jnp.sin(x) @ w, rtol=1e-6)


@pytest.mark.parametrize(
    "sizes, rules, expected",
    [
        ((2, 2), {"in": "a", "rows": "b"}, [(2, 3), (3, 2)]),
        ((2, 2), {"in": "a"}, [(2, 3), (3, 2)]),  # what is left divides the first that it can
        ((3,), {"rows": "a"}, [(4, 2), (2, 2)]),
        ((2, 2), {"in": ("a", "b"), "rows": "b"}, [(1, 6), (6, 2)]),  # 4 do not divide 6
        ((4,), {"in": "a"}, [(1, 6), (6, 2)]),
        ((8,), {"rows": "a"}, [(4, 6), (6, 2)]),
        ((2,), {}, [(2, 6), (6, 2)]),
    ],
)
def test_what_a_device_computes(sizes, rules, expected):
    assert shards(mesh(*sizes), rules, (4, 6), (6, 2)) == expected


@pytest.mark.parametrize(
    "rules, spec",
    [({"in": "a", "rows": "b"}, P("b", "a")), ({"in": "a", "rows": "a"}, P(P.UNCONSTRAINED, "a"))],
)
def test_other_names_say_how_arrays_are_divided_around_it(rules, spec):
    """Where the map's own names leave them an axis; inside, it has all of these dimensions."""
    layout = Layout(("in",), (("rows", "in"),), (("rows", "in"),), ())
    task = mm.Task("t", mesh=mesh(2, 2), logical_axes=rules)
    fun = divided(lambda x: (x * x.shape[0],), layout, [(4, 6)], task, mesh(2, 2))
    jaxpr = jax.make_jaxpr(fun)(jnp.ones((4, 6)))
    around = [e.params["sharding"].spec for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]
    assert around == [spec, spec]
    np.testing.assert_array_equal(jax.jit(fun)(jnp.ones((4, 6)))[0], 4 * np.ones((4, 6)))


def test_a_rule_for_an_axis_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="maps the logical axis 'in' to 'c', and its mesh has no axis 'c'"):
        shards(mesh(2), {"in": "c"}, (4, 6), (6, 2))


@dataclasses.dataclass(frozen=True)
class Turned:
    """Each part goes to the device of the next one."""

    axes: tuple[str, ...] = ()

    def over(self, axes):
        return Turned(axes["rows"])

    def __call__(self, x):
        count = math.prod(jax.lax.axis_size(axis) for axis in self.axes)
        return (jax.lax.ppermute(x, self.axes, [(n, (n + 1) % count) for n in range(count)]),)


def test_parts_that_send_to_each_other_know_their_axes():
    """Their gradients, and those of a batch of them, too."""
    layout, x = Layout(("rows",), (("rows",),), (("rows",),), ("rows",)), jnp.arange(8.0)
    over = mesh(2, 2)
    task = mm.Task("t", mesh=over, logical_axes={"rows": ("a", "b")})
    run = lambda x: logical_shard_map(Turned(), layout, x)[0]
    for fun, given, expected in (
        (run, x, jnp.roll(x, 2)),
        (jax.vmap(run), jnp.stack([x, -x]), jnp.stack([jnp.roll(x, 2), -jnp.roll(x, 2)])),
        (jax.grad(lambda x: jnp.vdot(run(x), jnp.arange(8.0))), x, jnp.roll(x, -2)),
    ):
        np.testing.assert_array_equal(mm.jit(mm.task(fun, task=task))(given), expected)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (6, 6)))

    def __call__(self, x):
        return x + logical_shard_map(Product(), LAYOUT, x, self.w[...])[0]


@pytest.mark.parametrize("how, scoped", grid(["plain", "remat", "scan", "vmap"], [False, True], step=4))
def test_a_pipeline_of_them_is_the_whole(how, scoped):
    """Values and gradients; where the state of a layer says its mesh, and where a scope does."""
    meshes = mm.MultiMesh(axis_sizes=(2, 2, 2), axis_names=("stage", "a", "b"))
    rules = {"in": "a", "rows": "b"}
    tasks = [mm.Task(f"s{n}", mesh_slice={"stage": n}, logical_axes=rules) for n in range(2)]

    def run(layer, x):
        if how == "remat":
            return nnx.remat(lambda layer, x: layer(x))(layer, x)
        if how == "scan":
            return nnx.scan(
                lambda x, layer: layer(x), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2
            )(x, layer)
        if how == "vmap":
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 1), out_axes=1)(layer, x[:, None])[:, 0]
        return layer(x)

    def loss(model, x):
        for layer, task in zip(model, tasks):
            x = (mm.task(run, task=task) if scoped else run)(layer, x)
        return jnp.sum(x**2)

    make = lambda: nnx.List([Layer(nnx.Rngs(n)) for n in range(2)])
    x = jax.random.normal(jax.random.key(3), (4, 6))
    expected = nnx.jit(nnx.value_and_grad(loss))(make(), x)
    placed = mm.TaskSharding({mm.path(n): task for n, task in enumerate(tasks)})
    with meshes:
        model = mm.jit(make, out_shardings=placed)()
        step = mm.jit(lambda model, x: nnx.value_and_grad(loss)(model, x))
        assert_same(step(model, x), expected, rtol=2e-5)
        text = step.lower(model, x).compile().as_text()
    assert len(re.findall(DIVIDED, text)) >= 4  # forward and backward of both


def test_a_layer_alone_is_divided_too():
    """On one mesh, where there is one program."""
    task = mm.Task("t", mesh=mesh(2, 2), logical_axes={"in": "a", "rows": "b"})
    layer = mm.jit(lambda: Layer(nnx.Rngs(0)), out_shardings=mm.TaskSharding({...: task}))()
    x = jnp.ones((4, 6))
    run = mm.jit(lambda layer, x: layer(x))
    assert re.search(DIVIDED, run.lower(layer, x).compile().as_text())
    np.testing.assert_allclose(run(layer, x), Layer(nnx.Rngs(0))(x), rtol=1e-5)
