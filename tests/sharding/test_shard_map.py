"""mm.shard_map: which mesh it maps over, and which specs it takes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.slow import few

X = np.arange(16, dtype=np.float32).reshape(4, 4)


@pytest.fixture
def multimesh():
    return mm.MultiMesh(axis_sizes=(2, 4), axis_names=("stage", "model"))


@pytest.fixture
def tasks():
    return [mm.Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(2)]


def sizes(**options):
    """A shard_mapped function that says how large its axes are and what it is given."""

    @mm.shard_map(in_specs=P("model"), out_specs=(P(), P()), **options)
    def f(x):
        axes = [jax.lax.axis_size("model"), x.shape[0]]
        return jnp.array(axes), jax.lax.psum(jnp.sum(x), "model")

    return f


# The mesh


def test_without_any_mesh():
    with pytest.raises(ValueError, match=r"shard_map needs a mesh: give mesh=.*task.*MultiMesh"):
        sizes()(X)


def test_the_current_multimesh(multimesh):
    with multimesh:
        axes, total = sizes()(X)
    assert axes.tolist() == [4, 1] and float(total) == X.sum()
    assert len(axes.sharding.device_set) == 8


def test_the_mesh_is_looked_up_when_called(multimesh):
    """The function may be defined before there is a mesh; each call uses the one that is current then."""
    f = sizes()
    with multimesh:
        assert f(X)[0].tolist() == [4, 1]
    with mm.MultiMesh(axis_sizes=(2,), axis_names=("model",)):
        assert f(X)[0].tolist() == [2, 2]
    with pytest.raises(ValueError, match="needs a mesh"):
        f(X)


def test_the_mesh_of_the_task_around_it(multimesh, tasks):
    """The innermost task wins over the MultiMesh: a slice of it, or a mesh of the task's own."""
    with multimesh:
        axes, total = mm.task(sizes(), task=tasks[1])(X)
        assert axes.sharding.device_set == set(multimesh.slice(stage=1).devices.flat)
        own = mm.Task("own", mesh=mm.TaskMesh(devices=[6, 7], axis_names=("model",)))
        inner, _ = mm.task(mm.task(sizes(), task=own), task=tasks[1])(X)
    assert axes.tolist() == [4, 1] and float(total) == X.sum()
    assert inner.tolist() == [2, 2]
    assert {d.id for d in inner.sharding.device_set} == {6, 7}


def test_the_mesh_of_a_registered_task():
    """A scope that a matcher knows is a task as well."""
    mm.clear_tasks()
    mm.register_task("head", task=mm.Task("head", mesh=mm.TaskMesh(devices=[2, 3], axis_names=("model",))))
    try:
        with jax.named_scope("head"):
            axes, _ = sizes()(X)
    finally:
        mm.clear_tasks()
    assert {d.id for d in axes.sharding.device_set} == {2, 3}


@few(1)
@pytest.mark.parametrize("kind", ["Mesh", "MultiMesh", "AbstractMesh"])
def test_an_explicit_mesh(multimesh, tasks, kind):
    """mesh= wins over the task and the MultiMesh around it."""
    given = Mesh(np.array(jax.devices()[:2]), ("model",))
    x = X
    if kind == "MultiMesh":
        given = mm.MultiMesh(global_mesh=given)
    elif kind == "AbstractMesh":
        x = jax.device_put(X, NamedSharding(given, P("model")))
        given = given.abstract_mesh
    with multimesh:
        axes, total = mm.task(sizes(mesh=given), task=tasks[1])(x)
    assert axes.tolist() == [2, 2] and float(total) == X.sum()
    assert {d.id for d in axes.sharding.device_set} == {0, 1}


def test_what_is_refused_before_there_is_a_mesh():
    """A bound method, and specs that nnx.shard_map does not take."""
    layer = Layer()
    with pytest.raises(ValueError, match="shard_map does not support bound methods"):
        mm.shard_map(layer.up.__call__, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match="in_specs.*Graph nodes are not allowed as prefixes"):
        mm.shard_map(lambda x: x, in_specs=layer, out_specs=P())
    decorator = mm.shard_map(in_specs=P(), out_specs=nnx.StateSharding({...: P()}), graph_updates=False)
    with pytest.raises(ValueError, match="out_specs.*cannot contain `StateSharding`"):
        decorator(lambda x: x)


def test_a_task_that_lacks_its_mesh(tasks):
    """A slice of a MultiMesh that is not there: said of the task."""
    with pytest.raises(ValueError, match="task 'stage0'.*MultiMesh"):
        mm.task(sizes(), task=tasks[0])(X)


def test_a_function_or_a_decorator(multimesh):
    def total(x):
        """The sum over all shards."""
        return jax.lax.psum(jnp.sum(x), "model")

    options = dict(mesh=multimesh, in_specs=P("model"), out_specs=P())
    made = mm.shard_map(total, **options), mm.shard_map(f=total, **options), mm.shard_map(**options)(total)
    for f in made:
        assert (f.__name__, f.__doc__) == ("total", "The sum over all shards.")
        assert float(f(X)) == X.sum()


def test_options_reach_nnx(multimesh):
    """axis_names leaves the other axes to XLA; check_vma finds results that are not what they claim."""
    f = functools.partial(mm.shard_map, mesh=multimesh, in_specs=P("model"), out_specs=P())
    assert float(f(lambda x: jax.lax.psum(jnp.sum(x), "model"), axis_names={"model"})(X)) == X.sum()
    with pytest.raises(ValueError, match="replicated|varying|out_specs"):
        f(lambda x: jnp.sum(x))(X)
    assert float(f(lambda x: jnp.sum(x), check_vma=False)(X)) == X[0].sum()


# Specs


class Layer(nnx.Module):
    """A layer split along its hidden features, and a count of calls."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(8, 4, use_bias=False, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))


def apply(layer, x):
    """On one shard: its part of the hidden features, summed over all."""
    layer.calls[...] += 1
    hidden = jnp.tanh(x @ layer.up.kernel[...])
    assert hidden.shape[-1] in (2, 8)
    return jax.lax.psum(hidden @ layer.down.kernel[...], "model")


def expected(layer):
    return np.tanh(X @ np.asarray(layer.up.kernel[...])) @ np.asarray(layer.down.kernel[...])


def state_sharding(task=None):
    """Megatron's: the hidden features are sharded. Of a task if one is given."""
    specs = {mm.path("up"): P(None, "model"), mm.path("down"): P("model"), ...: P()}
    if task is None:
        return nnx.StateSharding(specs)
    return mm.TaskSharding({filter: (task, spec) for filter, spec in specs.items()})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["StateSharding", "TaskSharding"])
def test_specs_of_state(multimesh, tasks, kind):
    """State goes in as shards, and what is updated inside comes out."""
    specs = state_sharding(tasks[1] if kind == "TaskSharding" else None)
    with multimesh:
        f = mm.task(mm.shard_map(apply, in_specs=(specs, P()), out_specs=P()), task=tasks[1])
        layer = Layer()
        for n in (1, 2):
            np.testing.assert_allclose(f(layer, X), expected(layer), rtol=1e-5, atol=1e-6)
            assert int(layer.calls[...]) == n
    assert layer.up.kernel[...].shape == (4, 8)


def test_specs_that_do_not_divide(multimesh):
    with multimesh, pytest.raises(ValueError, match=r"(?s)3.*model|model.*3"):
        sizes()(X[:3])


# Under mm.jit


class Net(nnx.Module):
    def __init__(self):
        self.first, self.second = Layer(), Layer()


@few(1)
@pytest.mark.parametrize("kind", ["StateSharding", "TaskSharding"])
def test_split_over_two_tasks(multimesh, tasks, kind):
    """Each task maps over its own mesh, with its state where it lives; the values are those of one device."""

    def of(n):
        specs = state_sharding(tasks[n] if kind == "TaskSharding" else None)
        return mm.task(mm.shard_map(apply, in_specs=(specs, P()), out_specs=P()), task=tasks[n])

    first, second = of(0), of(1)
    placement = mm.TaskSharding(
        {
            mm.path({"first"}, "up"): (tasks[0], P(None, "model")),
            mm.path({"first"}, "down"): (tasks[0], P("model")),
            mm.path("first"): tasks[0],
            mm.path("second", "up"): (tasks[1], P(None, "model")),
            mm.path("second", "down"): (tasks[1], P("model")),
            mm.path("second"): tasks[1],
        }
    )

    def loss(net, x):
        return jnp.sum(second(net.second, first(net.first, x)) ** 2)

    def plain(net, x):
        for layer in (net.first, net.second):
            x = jnp.tanh(x @ layer.up.kernel[...]) @ layer.down.kernel[...]
        return jnp.sum(x**2)

    with multimesh:
        net = mm.jit(Net, out_shardings=placement)()
        step = mm.jit(lambda net, x: nnx.value_and_grad(loss)(net, x))
        program = step.program(net, X)
        value, grads = step(net, X)
    meshes = {f.mesh for f in program.fragments}
    assert meshes == {multimesh.slice(stage=0), multimesh.slice(stage=1)}
    wanted, wanted_grads = nnx.value_and_grad(plain)(Net(), X)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for name, stage in (("first", 0), ("second", 1)):
        for kernel in ("up", "down"):
            got = grads[name][kernel]["kernel"][...]
            np.testing.assert_allclose(got, wanted_grads[name][kernel]["kernel"][...], rtol=1e-4, atol=1e-5)
            assert got.sharding.device_set == set(multimesh.slice(stage=stage).devices.flat)
    assert int(net.first.calls[...]) == int(net.second.calls[...]) == 1


# jax.shard_map itself


@pytest.mark.parametrize("axes", [{"expert": 2, "tensor": 2}, {"expert": 1, "tensor": 4}])
def test_over_a_mesh_in_axes_of_its_own(axes, tasks):
    """As a package makes it, once, of the devices of one task, and uses it in the layers of all."""
    multimesh = mm.MultiMesh(axis_sizes=(2, 2, 2), axis_names=("stage", "data", "model"))
    own = Mesh(multimesh.slice(stage=0).devices.reshape(*axes.values()), tuple(axes))
    specs = {"in_specs": (P("expert", "tensor"), P("tensor")), "out_specs": P("expert")}
    product = jax.shard_map(lambda x, w: jax.lax.psum(x @ w, "tensor"), mesh=own, **specs)

    def layer(w, x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(own, P(("expert", "tensor"))))
        return jnp.sin(product(x, w))

    def loss(weights, x):
        for task, w in zip(tasks, weights):
            x = mm.task(layer, task=task)(w, x)
        return jnp.mean(x**2)

    def step(weights, x):
        return mm.microbatch(jax.value_and_grad(loss), dim=0, size=4, argnum=1, schedule="1f1b")(weights, x)

    weights = [np.cos(np.arange(16, dtype=np.float32) + n).reshape(4, 4) for n in range(2)]
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
    with multimesh:
        value, grads = mm.jit(step)(weights, x)
    expected, expected_grads = jax.jit(jax.value_and_grad(loss))(weights, x)
    np.testing.assert_allclose(value / 4, expected, rtol=1e-6)
    for n, (grad, wanted) in enumerate(zip(grads, expected_grads)):
        np.testing.assert_allclose(grad / 4, wanted, rtol=1e-5, atol=1e-7)
        assert grad.sharding.device_set == {*multimesh.slice(stage=n).devices.flat}
