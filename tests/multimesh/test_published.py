"""Names and arguments of published programs: mjit, register_task by name and mesh, microbatch by position."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mmnnx
import multimesh_compat.jax
from multimesh_compat.jax import (
    MeshWrapper,
    MultiMesh,
    TaskMesh,
    microbatch,
    mjit,
    parallelize,
    register_task,
    task,
    with_sharding_constraint,
)
from tests.multimesh.test_parallelize import batch, devices, expected_loss, init, two_tasks


def grid(*shape, names=("x", "y")):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names[: len(shape)])


def named(*names):
    """The loss of layers in scopes of these names."""

    def loss(params, x):
        for name, w in zip(names, params):
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
        return (x**2).mean()

    return loss


def test_there_is_a_version():
    assert re.match(r"\d+\.\d+", multimesh_compat.jax.__version__)


# mjit and what parallelize returns


def test_mjit_splits():
    step = mjit(jax.value_and_grad(two_tasks()))
    program = step.program(init(), batch())
    assert {f.task for f in program.fragments} == {"first", "second"}
    got, want = step(init(), batch()), jax.value_and_grad(two_tasks())(init(), batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    assert step.__name__ == two_tasks().__name__ and step.eval_shape(init(), batch())[0].shape == ()


def test_mjit_decorates_and_takes_options():
    @mjit(static_argnums=1, donate_argnums=0)
    def power(x, n):
        """To a power."""
        return x**n

    x = jnp.arange(4.0)
    np.testing.assert_allclose(power(x, 3), np.arange(4.0) ** 3)
    assert power.__doc__ == "To a power." and x.is_deleted()
    with pytest.raises(TypeError, match="compiles a function, not 3"):
        mjit(3)


class Model:
    @mjit
    def __call__(self, x):
        return 2 * x


jax.tree_util.register_pytree_node(Model, lambda m: ((), None), lambda *_: Model())


def test_mjit_of_a_method():
    assert Model()(3.0) == 6.0


@pytest.mark.parametrize("tasks", [True, False])
def test_what_parallelize_returns_has_what_compiled_has(tasks):
    loss = two_tasks() if tasks else expected_loss
    sharded, sharded_init, get_batch = parallelize(jax.value_and_grad(loss), init, batch)
    params, x = sharded_init(), get_batch()
    (of_params, of_batch), keywords = sharded.input_shardings
    assert keywords == {} and of_batch == x.sharding
    assert of_params == [p.sharding for p in params]
    assert sharded.in_tree == jax.tree.structure(((params, x), {}))
    assert sharded.out_tree == jax.tree.structure(sharded(params, x))
    assert [a.shape for a in jax.tree.leaves(sharded.in_avals)] == [(8, 8), (8, 8), (16, 8)]
    assert isinstance(sharded.as_text(), str)
    for name in ("cost_analysis", "memory_analysis", "runtime_executable"):
        getattr(sharded, name)()
    with pytest.raises(AttributeError, match="no_such_thing"):
        sharded.no_such_thing  # noqa: B018


# MeshWrapper


def test_a_wrapped_mesh_is_a_multimesh():
    mesh = grid(2, 4, names=("stage", "model"))
    assert MeshWrapper(mesh) == MultiMesh(global_mesh=mesh) and MeshWrapper(mesh).shape == mesh.shape
    register_task("first", task=mmnnx.Task("first", mesh_slice={"stage": 1}))
    with MeshWrapper(mesh):
        _, sharded_init, _ = parallelize(named("first"), init, batch)
    assert devices(sharded_init()[0]) == [4, 5, 6, 7]


# register_task


@pytest.mark.parametrize(
    "how, where",
    [
        ({"name": "layer", "devices": [2, 3]}, [2, 3]),
        ({"regex": "lay.*", "devices": [2, 3]}, [2, 3]),
        ({"name": "layer", "mesh": grid(2, 2)}, [0, 1, 2, 3]),
        ({"regex": "l[a-z]+", "mesh": TaskMesh(devices=[5, 6])}, [5, 6]),
        ({"name": "layer", "mesh": MultiMesh(axis_sizes=(2, 4), axis_names=("a", "b"))}, list(range(8))),
    ],
)
def test_registered_by_name_or_regex_and_mesh(how, where):
    register_task(**how)
    _, sharded_init, _ = parallelize(named("layer"), init, batch)
    assert devices(sharded_init()[0]) == where


def test_a_name_is_no_regex_and_must_be_the_whole_name():
    register_task(name="lay.r", devices=[2])
    register_task(name="lay", devices=[3])
    assert mmnnx.jit(named("layer")).tasks(init(), batch()) == []
    assert [t.name for t in mmnnx.jit(named("lay.r")).tasks(init(), batch())] == ["lay.r"]


def test_axes_of_a_registered_mesh():
    register_task(name="layer", mesh=grid(2, 2), device_axes=("a", "b"), logical_axes=[("rows", "a")])

    def f(params, x):
        with jax.named_scope("layer"):
            return x @ with_sharding_constraint(params[0], P("rows", "b"))

    _, sharded_init, _ = parallelize(f, init, batch)
    assert sharded_init()[0].sharding.spec == P("a", "b")


ROTATING = [
    {"devices": range(8), "dims": (2,), "device_axes": ("x",)},
    {"devices": jax.devices(), "loop_submesh_size": 2},
    {"mesh": grid(4, 2), "loop_submesh_size": 2},
    {"callback": lambda name: range(8), "dims": (2, 1)},
]


@pytest.mark.parametrize("how", ROTATING)
def test_devices_beyond_one_submesh_are_for_other_microbatches(how):
    register_task("layer", **how)
    step = mjit(microbatch(jax.value_and_grad(named("layer")), 0, 4, argnum=1, reduce="mean"))
    got = step(init()[:1], batch())
    want = jax.value_and_grad(lambda p, x: expected_loss(p, x))(init()[:1], batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    calls = [c for c in step.program(init()[:1], batch()).calls if c.microbatch is not None]
    ran = {c.microbatch: sorted(d.id for d in c.mesh.devices.flat) for c in calls}
    assert ran == {m: [2 * m, 2 * m + 1] for m in range(4)}


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"devices": [0]}, ValueError, "one of matcher, name= and regex=, not none"),
        ({"matcher": "a", "name": "b", "devices": [0]}, ValueError, "one of matcher, name= and regex="),
        ({"name": "a", "devices": [0], "mesh": grid(2)}, ValueError, "not mesh= and devices="),
        ({"name": "a", "mesh": grid(2), "dims": (2,)}, ValueError, "dims= .*not of mesh="),
        (
            {"name": "a", "devices": range(5), "dims": (2,)},
            ValueError,
            r"5 devices for a mesh of shape \(2,\)",
        ),
        ({"name": "a", "devices": range(8), "loop_submesh_size": 3}, ValueError, "loop_submesh_size=3"),
        ({"name": "a", "mesh": grid(4, 2), "loop_submesh_size": 3}, ValueError, "loop_submesh_size=3"),
        ({"name": "a", "devices": range(8), "loop_submesh_size": 0}, TypeError, "a number of devices, not 0"),
        ({"regex": "(", "devices": [0]}, ValueError, "is not a regex"),
        ({"name": "a", "mesh": 3}, TypeError, "mesh= of task"),
    ],
)
def test_what_register_task_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        register_task(**arguments)


# microbatch, with_sharding_constraint


def test_microbatch_by_position():
    grad = jax.value_and_grad(two_tasks())
    loop = microbatch(grad, 0, 4, 1, "gpipe", 2, None, None, None, None, reduce="mean")
    value, grads = mjit(loop)(init(), batch())
    want, wanted = grad(init(), batch())
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for a, b in zip(grads, wanted):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="num_stages=3"):
        mjit(microbatch(grad, 0, 4, 1, "gpipe", 3))(init(), batch())


@pytest.mark.parametrize(
    "spec, found",
    [
        (("x", None), P("x")),
        ((None, ("x", "y")), P(None, ("x", "y"))),
        ((("x", "y"), None), P(("x", "y"))),
        (P(("x", "rows"), None), P(("x", "y"))),
        ((None, None), P()),
    ],
)
def test_tuples_of_names_in_constraints(spec, found):
    f = task(
        lambda w, x: x @ with_sharding_constraint(w, spec), "f", mesh=grid(2, 2), logical_axes=[("rows", "y")]
    )
    _, sharded_init, _ = parallelize(f, lambda: init()[0], batch)
    assert sharded_init().sharding.spec == found


def test_a_tuple_of_specs_is_a_tree():
    f = task(
        lambda w, x: sum(x @ v for v in with_sharding_constraint(w, (P("x"), ("y", "x")))),
        "f",
        mesh=grid(2, 2),
    )
    _, sharded_init, _ = parallelize(f, lambda: tuple(init()), batch)
    assert [w.sharding.spec for w in sharded_init()] == [P("x"), P("y", "x")]
