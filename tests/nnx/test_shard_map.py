"""mm.shard_map: specs for Variables, for parts of modules, and for their State, in every style.

Eagerly, inside of mm.jit, and inside of a task on a part of the devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

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

N = 4  # shards


@dataclasses.dataclass
class Where:
    """How a shard_mapped function is called.

    Attributes:
      shard_map: takes a function, specs and a style.
      call: calls it with state, which may be put somewhere first.
    """

    shard_map: Callable[..., Callable[..., Any]]
    call: Callable[..., Any]


@pytest.fixture(params=["nothing current", "a MultiMesh", "a task"])
def where(request):
    if request.param == "nothing current":
        mesh = Mesh(np.array(jax.devices()[:N]), ("x",))
        yield Where(functools.partial(mm.shard_map, mesh=mesh), lambda f, *args, **style: f(*args))
    elif request.param == "a MultiMesh":
        with mm.MultiMesh(axis_sizes=(N,), axis_names=("x",)):
            yield Where(mm.shard_map, lambda f, *args, **style: mm.jit(f, **style)(*args))
    else:  # that has its state and these devices, beside another
        mesh, (_, task) = pipeline(2, N, axes=("x",))

        def call(f, *args, **style):
            home = NamedSharding(task.to_mesh(), P())
            for _, v in nnx.iter_graph(args, graph=True):
                if isinstance(v, nnx.Variable):
                    v.set_raw_value(jax.device_put(v.get_raw_value(), home))
            out = mm.jit(mm.task(lambda *args: f(*args), task=task), **style)(*args)
            arrays = [x for x in jax.tree.leaves((out, args)) if isinstance(x, jax.Array) and x.ndim]
            assert {x.sharding.device_set == home.device_set for x in arrays} <= {True}
            return out

        with mesh:
            yield Where(mm.shard_map, call)


def linear():
    return nnx.Linear(3, 8, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))


class MLP(nnx.Module):
    def __init__(self):
        layer = functools.partial(nnx.Linear, use_bias=False, kernel_init=nnx.initializers.ones)
        self.up, self.down = layer(2, 8, rngs=nnx.Rngs(0)), layer(8, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def specs(model, rules, style):
    """The rules as each style takes them."""
    return nnx.StateSharding(rules) if style is GRAPH else nnx.prefix(model, rules, graph=style["graph"])


KERNEL_BY_COLUMNS = {nnx.PathContains("kernel"): P(None, "x"), nnx.PathContains("bias"): P()}


@few(2)
@in_every_style
def test_parts_of_a_module(where, style):
    model, seen = linear(), []

    @where.shard_map(in_specs=(specs(model, KERNEL_BY_COLUMNS, style),), out_specs=None, **style)
    def f(model):
        seen.append((model.kernel.shape, model.bias.shape))

    where.call(f, model, **style)
    assert seen and set(seen) == {((3, 8 // N), (8,))}
    np.testing.assert_array_equal(model.kernel[...], np.ones((3, 8)))


def test_what_comes_back_is_sharded():
    """With graph updates all of the state comes back from an eager call, as the specs say."""
    mesh, model = Mesh(np.array(jax.devices()[:N]), ("x",)), linear()
    f = mm.shard_map(
        lambda model: None,
        mesh=mesh,
        in_specs=(specs(model, KERNEL_BY_COLUMNS, GRAPH),),
        out_specs=None,
        **GRAPH,
    )
    f(model)
    assert (model.kernel.sharding.spec, model.bias.sharding.spec) == (P(None, "x"), P())
    by_state = nnx.StateSharding(nnx.State({"kernel": P("x"), "bias": P()}))
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    mm.shard_map(lambda model: None, mesh=mesh, in_specs=(by_state,), out_specs=None, **GRAPH)(model)
    assert (model.kernel.sharding.spec, model.bias.sharding.spec) == (P("x"), P())


@without_updates
def test_state_by_itself(where, style):
    """A State of specs is for the State of a module."""
    graphdef, state = nnx.split(linear())
    seen = []

    @where.shard_map(in_specs=(nnx.State({"kernel": P(None, "x"), "bias": P()}),), out_specs=P(), **style)
    def f(state):
        model = nnx.merge(graphdef, state)
        seen.append((model.kernel.shape, model.bias.shape))
        return jax.lax.psum(model.kernel[...].sum(), "x")

    assert where.call(f, state, **style) == 24
    assert set(seen) == {((3, 8 // N), (8,))}


@few(2)
@in_every_style
def test_variables(where, style):
    """Those that change are updated, whole or by shards."""
    w, b, count = nnx.Param(jnp.zeros((3, 8))), nnx.Param(jnp.ones(8)), nnx.BatchStat(jnp.array(0))

    @where.shard_map(in_specs=(P(None, "x"), P(), P()), out_specs=None, **style)
    def f(w, b, count):
        assert (w.shape, b.shape) == ((3, 8 // N), (8,))
        w[...] += jax.lax.axis_index("x")
        count[...] += 1

    where.call(f, w, b, count, **style)
    np.testing.assert_array_equal(w[...], np.tile(np.repeat(np.arange(4.0), 2), (3, 1)))
    np.testing.assert_array_equal(b[...], np.ones(8))
    assert int(count[...]) == 1


@few(2)
@in_every_style
def test_data_parallel(where, style):
    model, seen = linear(), []

    @where.shard_map(in_specs=(P(), P("x")), out_specs=P("x"), **style)
    def f(model, x):
        seen.append(x.shape)
        return model(x)

    y = where.call(f, model, np.ones((8, 3), np.float32), **style)
    np.testing.assert_array_equal(y, np.full((8, 8), 3.0))
    assert set(seen) == {(8 // N, 3)}


@few(2)
@in_every_style
def test_tensor_parallel(where, style):
    model = MLP()
    rules = {nnx.PathContains("up"): P(None, "x"), nnx.PathContains("down"): P("x", None)}

    @where.shard_map(in_specs=(specs(model, rules, style), P()), out_specs=P(), **style)
    def f(model, x):
        assert (model.up.kernel.shape, model.down.kernel.shape) == ((2, 8 // N), (8 // N, 3))
        return jax.lax.psum(model(x), "x")

    y = where.call(f, model, np.ones((4, 2), np.float32), **style)
    np.testing.assert_array_equal(y, np.full((4, 3), 16.0))


@few(4)
@in_every_style
@pytest.mark.parametrize("changed", [False, True])
def test_variables_with_axis_names(where, style, changed):
    """Flax's own sharding metadata do not get in the way of specs, and stay."""
    mesh = Mesh(np.array(jax.devices()[:N]), ("x",))
    with jax.set_mesh(mesh):
        w = nnx.Param(jnp.ones((8, 4)), out_sharding=("x", None))
        count = nnx.BatchStat(jnp.array(0))

    @where.shard_map(in_specs=(P("x", None), P()), out_specs=P("x", None), **style)
    def f(w, count):
        assert w.shape == (8 // N, 4)
        if changed:
            count[...] += 1
        return w + 1.0

    y = where.call(f, w, count, **style)
    np.testing.assert_array_equal(y, np.full((8, 4), 2.0))
    np.testing.assert_array_equal(w[...], np.ones((8, 4)))
    assert int(count[...]) == changed and w.out_sharding == ("x", None)


@in_every_style
def test_shared_state(where, style):
    """A graph has it once, a tree refuses it."""
    v = nnx.Param(jnp.ones(8))
    one, two = nnx.Dict(v=v), nnx.Dict(v=v)

    @where.shard_map(in_specs=(P("x"), P("x"), P()), out_specs=P("x"), **style)
    def f(one, two, x):
        one.v[...] += x
        return one.v[...] + two.v[...]

    if style is TREE:
        with pytest.raises(ValueError, match="Duplicate Param"):
            where.call(f, one, two, np.float32(1), **style)
        return
    np.testing.assert_array_equal(where.call(f, one, two, np.float32(1), **style), np.full(8, 4.0))
    np.testing.assert_array_equal(v[...], np.full(8, 2.0))


@few(2)
@in_every_style
def test_state_of_a_module_is_updated(where, style):
    model = nnx.Dict(count=nnx.Variable(jnp.array(0)), w=nnx.Param(jnp.ones(8)))

    @where.shard_map(in_specs=(P(), P()), out_specs=P(), **style)
    def f(model, x):
        model.count[...] += 1
        return x * 2

    for count in (1, 2):
        assert where.call(f, model, np.float32(3), **style) == 6
        assert int(model.count[...]) == count


@pytest.mark.parametrize("style", [GRAPH, FUNCTIONAL], ids=["graph", "functional"])
def test_inconsistent_aliasing(where, style):
    v = nnx.Param(jnp.ones(8))
    f = where.shard_map(lambda a, b: a[...], in_specs=(P(), P("x")), out_specs=P(), **style)
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        where.call(f, v, v, **style)


@few(1)
@pytest.mark.parametrize("jit", [nnx.jit, mm.jit])
def test_a_mesh_of_its_own_where_nothing_is_placed(jit):
    """As in the documents of Flax: arguments on the default device go to the mesh of the shard_map."""
    own = Mesh(np.array(jax.devices()), ("data",))

    @nnx.shard_map(mesh=own, in_specs=(P(None), P("data")), out_specs=P("data"))
    def forward(model, x):
        return model(x)

    @jit
    def step(model, x):
        loss, grads = nnx.value_and_grad(lambda model: (forward(model, x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return loss, forward(model, x)

    model, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.arange(32.0).reshape(16, 2)
    plain = nnx.clone(model)
    loss, out = step(model, x)
    assert out.sharding.device_set == set(jax.devices())
    grads = nnx.grad(lambda model: (model(x) ** 2).mean())(plain)
    np.testing.assert_allclose(loss, (plain(x) ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(model.kernel[...], plain.kernel[...] - 0.1 * grads.kernel[...], rtol=1e-4)
