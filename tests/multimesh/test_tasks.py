"""multimesh.jax.task and register_task: what they accept, which Task they make, and what they refuse."""

from __future__ import annotations

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.sharding.task_scope import current_task, find_task
from multimesh_compat.jax import unsplit, with_sharding_constraint
from multimesh_compat.jax.options import make_task
from multimesh_compat.jax.tasks import register_task, task
from multimesh_compat.jax.unsplit import tracing_shapes

X = np.arange(32, dtype=np.float32).reshape(8, 4) / 32


@pytest.fixture(autouse=True)
def no_warning_yet(monkeypatch):
    monkeypatch.setattr(unsplit, "_warned", False)


@pytest.fixture
def devices():
    return jax.devices()


def ids(mesh):
    return np.vectorize(lambda d: d.id)(mesh.devices).tolist()


def made(**kwargs):
    """The Task of a function made a task."""
    return task(current_task, "t", **kwargs)()


# Where a task runs


def test_mesh(devices):
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    assert made(mesh=mesh) == mm.Task("t", mesh=mesh)


def test_mesh_of_device_numbers():
    mesh = mm.TaskMesh(devices=[4, 5], axis_names=("x",))
    assert ids(made(mesh=mesh).to_mesh()) == [4, 5]


def test_mesh_may_be_a_multimesh():
    mesh = mm.MultiMesh(axis_sizes=(2, 2), axis_names=("a", "b"))
    assert made(mesh=mesh).to_mesh() == mesh.mesh
    assert made(mesh=mesh, device_axes=("x", "y")).to_mesh().axis_names == ("x", "y")


def test_list_of_devices(devices):
    mesh = made(devices=devices[2:6], device_axes=("x",)).to_mesh()
    assert ids(mesh) == [2, 3, 4, 5] and mesh.axis_names == ("x",)


def test_array_of_devices_has_the_shape_of_the_mesh(devices):
    mesh = made(devices=np.array(devices).reshape(2, 4), device_axes=["x", "y"]).to_mesh()
    assert dict(mesh.shape) == {"x": 2, "y": 4} and ids(mesh) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("numbers", [[[4, 5], [6, 7]], np.array([[4, 5], [6, 7]])])
def test_device_numbers_count_devices_of_the_program(devices, numbers):
    chosen = made(devices=numbers, device_axes=("x", "y"))
    assert ids(chosen.to_mesh()) == [[4, 5], [6, 7]]
    with mm.MultiMesh(devices=devices[::-1], axis_names=("all",)):
        assert ids(chosen.to_mesh()) == [[3, 2], [1, 0]]


def test_neither_mesh_nor_devices_is_everything(devices):
    """All devices, or the MultiMesh that is current when the task runs."""
    chosen = made()
    assert ids(chosen.to_mesh()) == list(range(8))
    with mm.MultiMesh(axis_sizes=(2, 2), axis_names=("a", "b")) as mesh:
        assert chosen.to_mesh() == mesh.mesh


def test_device_axes_rename_those_of_the_mesh(devices):
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    renamed = made(mesh=mesh, device_axes=("a", "b")).to_mesh()
    assert renamed.axis_names == ("a", "b") and ids(renamed) == ids(mesh)
    numbers = mm.TaskMesh(devices=[6, 7], axis_names=("x",))
    renamed = made(mesh=numbers, device_axes=("a",)).to_mesh()
    assert renamed.axis_names == ("a",) and ids(renamed) == [6, 7]


def test_device_axes_alone_name_those_of_all_devices():
    assert dict(made(device_axes=("x",)).to_mesh().shape) == {"x": 8}
    with mm.MultiMesh(axis_sizes=(4, 2), axis_names=("a", "b")):
        assert dict(made(device_axes=("x", "y")).to_mesh().shape) == {"x": 4, "y": 2}


def test_mesh_slice_and_other_fields():
    rules = [("mlp", "model")]
    chosen = made(mesh_slice={"stage": 1}, logical_axes=rules, extra_axes={"a": None}, remat=True)
    assert chosen == mm.Task(
        "t", mesh_slice={"stage": 1}, logical_axes=rules, extra_axes={"a": None}, remat=True
    )
    moving = made(loop_dependent_mesh_slice="stage", logical_axes=rules)
    assert moving.loop_dependent_mesh_slice == "stage"


def test_task_is_used_as_it_is():
    given = mm.Task("given", mesh_slice={"stage": 0})
    assert task(current_task, task=given)() == given
    assert task(current_task, "other", task=given)() == mm.Task("other", mesh_slice={"stage": 0})


def test_name_defaults_to_that_of_the_function():
    def attention():
        return current_task().name

    assert task(attention)() == "attention"
    assert task(attention, "named")() == "named"
    assert task(functools.partial(attention))() == "partial"


# What is refused: before anything runs


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"logical_axes": [("a", "x")]}, r"task 't' has logical_axes= but no mesh= or device_axes="),
        (
            {"logical_axes": [("a", "x")], "devices": [0, 1]},
            r"task 't' has logical_axes= but no mesh= or device",
        ),
        (
            {"devices": [0, 1], "mesh": mm.TaskMesh(devices=[0])},
            r"task 't' has mesh= and devices=: one says where",
        ),
        ({"devices": [0, 1], "mesh_slice": {"stage": 0}}, r"task 't' has devices= and mesh_slice="),
        (
            {"mesh": mm.TaskMesh(devices=[0]), "loop_dependent_mesh_slice": "stage"},
            "mesh= and loop_dependent_mesh_slice=",
        ),
        (
            {"device_axes": ("x",), "mesh_slice": {"stage": 0}},
            r"device_axes= and mesh_slice=.*keeps the axis",
        ),
        (
            {"devices": [[0, 1], [2, 3]], "device_axes": ("x",)},
            r"device_axes=\('x',\) of task 't'.*\(2, 2\): give 2",
        ),
        (
            {"devices": [0, 1], "device_axes": ("x", "y")},
            r"device_axes=\('x', 'y'\).*shape \(2,\): give 1 ",
        ),
        (
            {"mesh": mm.TaskMesh(devices=[0, 1]), "device_axes": ("x", "y")},
            r"device_axes=.*shape \(2,\)",
        ),
        ({"device_axes": ("x", "y")}, r"device_axes=\('x', 'y'\).*shape \(8,\)"),
        ({"devices": [[0, 1], [2, 3]], "device_axes": ("x", "x")}, r"\('x', 'x'\).*differ"),
        ({"devices": [0, 1, 1]}, r"devices= of task 't' repeats 1"),
        ({"devices": []}, r"task 't' has 0 devices"),
    ],
)
def test_value_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        task(jnp.sin, "t", **kwargs)


def test_jax_devices_that_repeat(devices):
    with pytest.raises(ValueError, match=f"task 't' repeats {re.escape(str(devices[1]))}"):
        task(jnp.sin, "t", devices=[devices[1], devices[1]])


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (
            {"devices": 4},
            "devices= of task 't' is a list or array of jax devices, or of device numbers, not 4",
        ),
        ({"devices": ["cpu:0"]}, r"not \['cpu:0'\]"),
        (
            {"devices": [0, 1], "device_axes": "x"},
            r"device_axes= of task 't' is a name for each axis.*not 'x'",
        ),
        ({"devices": [0, 1], "device_axes": (0,)}, r"device_axes= of task 't' is a name for each axis"),
        ({"mesh": "x"}, r"mesh= of task 't'.*not 'x'"),
        ({"mesh": "x", "device_axes": ("x",)}, r"mesh= of task 't'.*not 'x'"),
        (
            {"axes": ("x",), "shape": 3},
            "task 't' has no option axes, shape: there are devices, device_axes, mesh",
        ),
        ({"task": "stage0"}, "task= is a Task, not 'stage0'"),
        ({"task": mm.Task("a"), "devices": [0], "remat": True}, "not both: devices, remat"),
    ],
)
def test_type_errors(kwargs, message):
    with pytest.raises(TypeError, match=message):
        task(jnp.sin, "t", **kwargs)


def test_what_cannot_be_a_task():
    class Plain:
        pass

    with pytest.raises(TypeError, match="a function or a class with __call__, not 3"):
        task(3)
    with pytest.raises(TypeError, match="Plain has none"):
        task(Plain)
    with pytest.raises(TypeError, match="linen Module class Dense, not of an instance"):
        task(linen.Dense(4))
    with pytest.raises(TypeError, match="second argument of task is a name: give a Task as task="):
        task(jnp.sin, mm.Task("stage0"))


def test_make_task_is_what_task_makes():
    given = {"devices": [0, 1], "device_axes": ("x",), "logical_axes": [("a", "x")]}
    assert make_task("default", None, None, given) == mm.Task(
        "default", mesh=mm.TaskMesh(devices=[0, 1], axis_names=("x",)), logical_axes=[("a", "x")]
    )
    assert make_task("default", "name", None, {}).name == "name"
    assert given.keys() == {"devices", "device_axes", "logical_axes"}  # left as they were


# What a task does


def loss(params, x):
    """Two layers, on devices 0-3 and 4-7."""
    hidden = first(params[0], x)
    return jnp.sum(second(params[1], hidden) ** 2)


def layer(kernel, x):
    return with_sharding_constraint(jnp.tanh(x @ kernel), P("batch", "features"))


rules = [("batch", "x"), ("features", "y")]
first = task(layer, "first", devices=[[0, 1], [2, 3]], device_axes=("x", "y"), logical_axes=rules)
second = task(layer, "second", devices=[[4, 5], [6, 7]], device_axes=("x", "y"), logical_axes=rules)


def params():
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.normal(keys[0], (4, 6)), jax.random.normal(keys[1], (6, 2))]


def plain(params, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]) ** 2)


def test_forward_and_backward_run_on_the_devices_of_the_tasks():
    step = mm.jit(jax.value_and_grad(loss))
    found = {
        (f.name, tuple(sorted(d.id for d in f.mesh.devices.flat)))
        for f in step.program(params(), X).fragments
    }
    assert found >= {("first forward", (0, 1, 2, 3)), ("second forward", (4, 5, 6, 7))}
    assert {where for name, where in found if name.startswith("first")} == {(0, 1, 2, 3)}
    assert {where for name, where in found if name.startswith("second")} == {(4, 5, 6, 7)}
    assert any("backward" in name for name, _ in found)
    value, grads = step(params(), X)
    wanted, wanted_grads = jax.value_and_grad(plain)(params(), X)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for got, want, first_device in zip(grads, wanted_grads, (0, 4)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert {d.id for d in got.devices()} <= set(range(first_device, first_device + 4))


def constraints(fun):
    """The specs of all constraints in the program of `fun`."""
    eqns = [e for fragment in fun.program(X).fragments for e in fragment.jaxpr.eqns]
    return [e.params["sharding"].spec for e in eqns if e.primitive.name == "sharding_constraint"]


def test_constraints_are_logical_or_name_device_axes():
    def of(**kwargs):
        f = task(
            lambda x: with_sharding_constraint(x * 2, P("rows", "y")), devices=[[4, 5], [6, 7]], **kwargs
        )
        return mm.jit(lambda x: task(jnp.sin, devices=[0])(f(x)))

    assert constraints(of(device_axes=("x", "y"), logical_axes=[("rows", "x")])) == [P("x", "y")]
    assert constraints(of(device_axes=("x", "y"))) == [P(None, "y")]


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("kind", ["devices", "numbers"])
def test_without_device_axes_constraints_are_replication(devices, shape, kind):
    """Whatever names a constraint has."""
    given = np.array(devices[2:6] if kind == "devices" else [2, 3, 4, 5]).reshape(shape)
    f = task(lambda x: with_sharding_constraint(x * 2, P("x", "axis0")), devices=given)
    g = mm.jit(lambda x: task(jnp.sin, devices=[0])(f(x)))
    (spec,) = constraints(g)
    assert all(entry is None for entry in spec)
    assert {2, 3, 4, 5} in [{d.id for d in fragment.mesh.devices.flat} for fragment in g.program(X).fragments]
    np.testing.assert_allclose(g(X), np.sin(X * 2), rtol=1e-6)


def test_function_keeps_its_name_and_arguments():
    def scale(x, by=2, *, shift=0):
        """Scales."""
        return x * by + shift

    f = task(scale, devices=[0, 1])
    assert (f.__name__, f.__doc__) == ("scale", "Scales.")
    assert f(3) == 6 and f(3, 4, shift=1) == 13
    assert f(X).dtype == np.float32


class Affine:
    """A class of arrays and a function: nobody's framework."""

    def __init__(self, scale, shift=0.0):
        self.scale, self.shift = scale, shift

    def __call__(self, x):
        return self.scale * x + self.shift, current_task()

    def plus(self, x):
        return x + self.shift, current_task()


def test_class_task():
    AffineTask = task(Affine, devices=[4, 5])
    assert AffineTask.__name__ == "Task[Affine]" and issubclass(AffineTask, Affine)
    assert AffineTask.__doc__ == Affine.__doc__ and AffineTask.__module__ == Affine.__module__
    model = AffineTask(2.0, shift=1.0)
    value, inside = model(3.0)
    assert value == 7.0 and inside == mm.Task("Affine", mesh=inside.mesh) and inside.mesh.devices == (4, 5)
    assert model.plus(1.0) == (2.0, None)  # __call__ alone is the task
    assert Affine(2.0)(1.0)[1] is None  # the class itself is as it was
    assert task(Affine, devices=[4, 5]) is AffineTask


def test_class_task_is_split_forward_and_backward():
    one, two = task(Affine, "one", devices=[0, 1]), task(Affine, "two", devices=[2, 3])

    def f(scales, x):
        return jnp.sum(two(scales[1], 1.0)(one(scales[0])(x)[0])[0] ** 2)

    def g(scales, x):
        return jnp.sum((scales[1] * (scales[0] * x) + 1.0) ** 2)

    scales = (jnp.float32(2), jnp.float32(3))
    step = mm.jit(jax.value_and_grad(f))
    where = {
        f.name.split()[0]: {d.id for d in f.mesh.devices.flat} for f in step.program(scales, X).fragments
    }
    assert (where["one"], where["two"]) == ({0, 1}, {2, 3})
    np.testing.assert_allclose(
        jax.tree.leaves(step(scales, X)), jax.tree.leaves(jax.value_and_grad(g)(scales, X)), rtol=1e-6
    )


class Scale(nnx.Module):
    def __init__(self, size, rngs=None):
        self.kernel, self.made_in = nnx.Param(jnp.full(size, 2.0)), current_task()

    def __call__(self, x):
        return x * self.kernel[...], current_task()


def test_nnx_class_and_instance():
    ScaleTask = task(Scale, devices=[0, 1])
    assert ScaleTask.__name__ == "Task[Scale]" and task(Scale, devices=[0, 1]) is ScaleTask
    model = ScaleTask(4)
    assert model.made_in == model(X)[1] and model.made_in.name == "Scale"
    np.testing.assert_array_equal(model(X)[0], 2 * X)
    original = Scale(4)
    wrapped = task(original, "late", devices=[2, 3])
    assert wrapped.kernel is original.kernel and original(X)[1] is None
    assert wrapped(X)[1].name == "late" and type(wrapped).__name__ == "Task[Scale]"


def test_linen_class_is_left_to_flax():
    DenseTask = task(linen.Dense, "dense", devices=[0, 1])
    assert DenseTask.__name__ == "Task[Dense]" and issubclass(DenseTask, linen.Module)
    model = DenseTask(features=3)
    variables = model.init(jax.random.key(0), X)
    assert model.apply(variables, X).shape == (8, 3)


# Outside mm.jit


def fresh(fun):
    """The same function, of which JAX has kept no trace."""
    return lambda *args: fun(*args)


def warned(fun, *args):
    """What warnings a call gives, and its result."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = fun(*args)
    return [w for w in caught if "unsplit" in str(w.message)], out


def test_plain_jit_is_right_and_warns_once():
    found, value = warned(jax.jit(fresh(loss)), params(), X)
    np.testing.assert_allclose(value, plain(params(), X), rtol=1e-6)
    assert len(found) == 1 and found[0].category is UserWarning
    message = str(found[0].message)
    assert "task 'first'" in message and "parallelize" in message and "mmnnx.jit" in message
    assert found[0].filename == __file__
    found, grads = warned(jax.jit(jax.grad(fresh(loss))), params(), X)
    assert not found
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), grads, jax.grad(plain)(params(), X)
    )


@pytest.mark.parametrize("kind", ["class", "nnx class", "nnx instance"])
def test_class_tasks_warn_too(kind):
    if kind == "class":
        model = task(Affine, "c", devices=[0, 1])(2.0)
    else:
        model = (
            task(Scale, "c", devices=[0, 1])(4) if kind == "nnx class" else task(Scale(4), "c", devices=[0])
        )
    found, _ = warned(jax.jit(lambda x: model(x)[0]), X)
    assert len(found) == 1 and "task 'c'" in str(found[0].message)


@pytest.mark.parametrize(
    "how, fun",
    [
        ("eager", loss),
        ("eager gradient", jax.grad(loss)),
        ("eager vmap", jax.vmap(loss, (None, 0))),
        ("mm.jit", mm.jit(fresh(loss))),
        ("mm.jit of a gradient", mm.jit(jax.grad(fresh(loss)))),
        ("mm.jit of a jit", mm.jit(jax.jit(fresh(loss)))),
        ("one task under mm.jit", mm.jit(lambda params, x: first(params[0], x))),
        ("made inside jit", jax.jit(lambda params, x: Scale(4).kernel[...] * plain(params, x))),
    ],
)
def test_does_not_warn(how, fun):
    found, _ = warned(fun, params(), X)
    assert not found, how


def test_does_not_warn_where_told_not_to():
    with tracing_shapes():
        found, shape = warned(jax.eval_shape, fresh(loss), params(), X)
    assert not found and shape.shape == ()
    assert len(warned(jax.jit(fresh(loss)), params(), X)[0]) == 1


def test_initialising_an_nnx_task_does_not_warn():
    found, _ = warned(nnx.eval_shape, lambda: task(Scale, devices=[0, 1])(4))
    assert not found


def test_ignore_transforms():
    """Nothing is split or said; afterwards all is as it was, though JAX has kept what it traced."""
    step = mm.jit(fresh(loss))
    with mm.ignore_transforms():
        found, value = warned(step, params(), X)
        assert not warned(jax.jit(fresh(loss)), params(), X)[0]
    assert not found and len(value.devices()) == 1
    np.testing.assert_allclose(value, plain(params(), X), rtol=1e-6)
    assert len({f.mesh for f in step.program(params(), X).fragments}) == 2
    np.testing.assert_allclose(step(params(), X), value, rtol=1e-6)


# register_task


def found(name, backprop=False):
    return find_task(f"transpose(jvp({name}))" if backprop else f"jvp({name})")


def test_register_a_task():
    head = mm.Task("head", mesh_slice={"stage": 1})
    register_task("head", task=head)
    assert found("head") is head and found("header") is None
    mm.clear_tasks()
    assert found("head") is None


@pytest.mark.parametrize("matcher", [r"layer\d+", re.compile(r"layer\d+")])
def test_register_a_callback(matcher):
    register_task(
        matcher,
        callback=lambda name, backprop: mm.Task(f"{name} {backprop}", mesh_slice={"stage": int(name[5:])}),
    )
    assert found("layer3") == mm.Task("layer3 False", mesh_slice={"stage": 3})
    assert found("layer3", backprop=True).name == "layer3 True"
    assert found("my layer3") is None


def test_register_devices(devices):
    register_task(
        "numbers", devices=[4, 5, 6, 7], dims=(2, 2), device_axes=("x", "y"), logical_axes=[("a", "x")]
    )
    register_task("array", devices=np.array(devices[:4]).reshape(2, 2), device_axes=("x", "y"))
    register_task(r"bare\d", devices=devices[:2])
    numbers, array, bare = found("numbers"), found("array"), found("bare1")
    assert ids(numbers.to_mesh()) == [[4, 5], [6, 7]] and numbers.axis_rules == (("a", "x"),)
    assert dict(array.to_mesh().shape) == {"x": 2, "y": 2} and ids(array.to_mesh()) == [[0, 1], [2, 3]]
    assert ids(bare.to_mesh()) == [0, 1] and bare.to_mesh().axis_names[0].startswith("__")
    assert [t.name for t in (numbers, array, bare)] == ["numbers", "array", "bare1"]  # of the scope


def both(name, backprop):
    first = 2 * int(name[5:]) + 4 * backprop
    return [first, first + 1]


@pytest.mark.parametrize("callback", [both, lambda name: both(name, False), lambda *args: both(*args)])
def test_register_a_callback_that_returns_devices(callback):
    """It may or may not ask for the second argument."""
    register_task(
        r"layer\d+", callback=callback, dims=(2, 1), device_axes=("x", "y"), logical_axes=[("a", "x")]
    )
    chosen = found("layer1")
    assert ids(chosen.to_mesh()) == [[2], [3]] and chosen.to_mesh().axis_names == ("x", "y")
    assert (chosen.name, chosen.axis_rules) == ("layer1", (("a", "x"),))
    asked = callback is both or callback.__code__.co_flags & 4  # of two arguments, or of any number
    assert ids(found("layer1", backprop=True).to_mesh()) == ([[6], [7]] if asked else [[2], [3]])


def test_callback_may_return_jax_devices(devices):
    register_task("a", callback=lambda name, backprop: devices[6:], device_axes=("x",))
    assert ids(found("a").to_mesh()) == [6, 7]


def test_registered_names_are_split():
    register_task("one", devices=[0, 1], device_axes=("x",))
    register_task("two", callback=lambda name: [2, 3])

    def f(x):
        with jax.named_scope("one"):
            x = with_sharding_constraint(jnp.sin(x), P("x"))
        with jax.named_scope("two"):
            return jnp.sum(jnp.cos(x))

    step = mm.jit(jax.value_and_grad(f))
    assert {tuple(ids(fragment.mesh)) for fragment in step.program(X).fragments} == {(0, 1), (2, 3)}
    value, grad = step(X)
    np.testing.assert_allclose(value, np.sum(np.cos(np.sin(X))), rtol=1e-6)
    np.testing.assert_allclose(grad, -np.sin(np.sin(X)) * np.cos(X), rtol=1e-5, atol=1e-6)


A_TASK = mm.Task("t")


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({}, "register 'm' with one of callback=, task=, mesh= and devices=, not none"),
        ({"dims": (2,)}, "with one of callback=, task=, mesh= and devices=, not none"),
        ({"task": A_TASK, "devices": [0]}, "not task= and devices="),
        ({"task": A_TASK, "callback": both}, "not callback= and task="),
        (
            {"task": A_TASK, "dims": (1,), "device_axes": ("x",)},
            "dims=, device_axes= for matcher 'm' are options of",
        ),
        (
            {"devices": [0], "logical_axes": [("a", "x")]},
            "logical_axes= for matcher 'm' without device_axes=",
        ),
        (
            {"callback": both, "logical_axes": [("a", "x")]},
            "logical_axes= for matcher 'm' without device_axes=",
        ),
        ({"devices": [0, 1, 2], "dims": (2, 2)}, r"task 'm' has 3 devices for a mesh of shape \(2, 2\)"),
        (
            {"devices": [0, 1], "device_axes": ("x", "y")},
            r"device_axes=\('x', 'y'\) of task 'm'.*\(2,\): give 1",
        ),
        ({"devices": [0, 0]}, "devices= of task 'm' repeats 0"),
    ],
)
def test_register_value_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        register_task("m", **kwargs)
    assert found("m") is None


@pytest.mark.parametrize(
    "matcher, kwargs, message",
    [
        ("m", {"task": "stage0"}, "task= for matcher 'm' is a Task"),
        ("m", {"callback": 3}, "callback= for matcher 'm' cannot be called: 3"),
        ("m", {"devices": "cpu"}, "devices= of task 'm' is a list or array"),
        (
            "m",
            {"devices": [0, 1], "dims": 2},
            r"dims= of task 'm' is a size for each axis, like \(2, 2\), not 2",
        ),
        ("m", {"devices": [0, 1], "device_axes": "x"}, "device_axes= of task 'm' is a name for each axis"),
        (3, {"task": A_TASK}, "matcher.*3"),
    ],
)
def test_register_type_errors(matcher, kwargs, message):
    with pytest.raises(TypeError, match=message):
        register_task(matcher, **kwargs)


def test_no_regex():
    with pytest.raises(ValueError, match="not a regex"):
        register_task("layer(", devices=[0])


def test_callbacks_that_return_something_else():
    """Said when a name is matched: with the name, and what came."""
    register_task("nothing", callback=lambda name: None)
    register_task("text", callback=lambda name: "cpu")
    register_task("many", callback=lambda name: [0, 1, 2], dims=(2,))
    with pytest.raises(TypeError, match="matcher 'nothing' returned no Task or devices for 'nothing'"):
        found("nothing")
    with pytest.raises(TypeError, match="task 'text' is a list.*not 'cpu'"):
        found("text")
    with pytest.raises(ValueError, match=r"task 'many' has 3 devices for a mesh of shape \(2,\)"):
        found("many")
