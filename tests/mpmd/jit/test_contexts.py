"""What changes around a function that was split before: the debugging context, registered tasks, layouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests import models
from tests.mpmd.parity import pipeline, place


def split_model(stages=2):
    mesh, tasks = pipeline(stages)
    rules = place(tasks, [("layers", range(0, 2))], [("layers", range(2, 4))])
    with mesh:
        return mesh, mm.jit(lambda: models.MLP(rngs=nnx.Rngs(0)), out_shardings=rules)()


def devices(model):
    return [v.get_raw_value().sharding.device_set for _, v in nnx.to_flat_state(nnx.state(model))]


def test_ignoring_transforms_gives_the_same_and_leaves_state_at_home():
    """On one device the numbers are the same; afterwards the model is on its stages again, updated."""
    batch = models.vectors()

    def step(model, batch):
        loss, grads = nnx.value_and_grad(models.squared_error)(model, batch)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    mesh, model = split_model()
    _, other = split_model()
    homes = devices(model)
    with mesh:
        jitted = mm.jit(step)
        with mm.ignore_transforms():
            plain = [float(jitted(model, batch)) for _ in range(2)]
        assert devices(model) == homes
        split = [float(jitted(other, batch)) for _ in range(2)]
        np.testing.assert_allclose(plain, split, rtol=1e-5)
        assert plain[1] < plain[0]
        np.testing.assert_allclose(float(jitted(model, batch)), float(jitted(other, batch)), rtol=1e-5)


def test_tasks_registered_after_a_call_are_seen_by_the_next():
    mesh, tasks = pipeline(2)

    def f(x):
        with jax.named_scope("first"):
            y = jnp.sin(x)
        with jax.named_scope("second"):
            return jnp.cos(y)

    x = np.ones(4, np.float32)
    with mesh:
        jitted = mm.jit(f)
        before = jitted(x)
        mm.register_task("first", task=tasks[0])
        mm.register_task("second", task=tasks[1])
        after = jitted(x)
    assert after.sharding.device_set == set(mesh.slice(stage=1).devices.flat)
    assert before.sharding.device_set != after.sharding.device_set
    np.testing.assert_allclose(before, after, rtol=1e-6)


def test_meshes_of_equal_devices_may_name_their_axes_otherwise():
    """Two pieces of state on the same devices are on the same TaskMesh, whatever its axes are called."""
    here, there = jax.devices()[:2], jax.devices()[2:4]
    a = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(Mesh(np.array(here), ("x",)), P("x")))
    b = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(Mesh(np.array(here), ("z",)), P(None, "z")))
    c = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(Mesh(np.array(there), ("x",)), P()))
    f = mm.jit(lambda a, b, c, x: (x @ a) @ b @ c)
    program = f.program(a, b, c, np.ones((2, 4), np.float32))
    assert len(program.transfers) == 1 and len(program.fragments) == 2
    np.testing.assert_allclose(f(a, b, c, np.ones((2, 4), np.float32)), np.full((2, 4), 64.0))


def test_slices_are_sharded_as_asked():
    """arg_shardings spreads each microbatch over the data axis of every stage that reads it."""
    mesh = mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "data"), devices=jax.devices()[:4])
    homes = [NamedSharding(mesh.slice(stage=i), P()) for i in range(2)]
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(4, 4)).astype(np.float32) for _ in range(2))
    x = rng.normal(size=(8, 4)).astype(np.float32)
    with mesh:
        placed = [jax.device_put(w, home) for w, home in zip((a, b), homes)]

        seen = []

        def keep(x, a, b):
            h = jnp.tanh(x @ a)
            jax.debug.inspect_array_sharding(h, callback=seen.append)
            return h @ b

        @mm.jit
        def f(a, b, x):
            return mm.microbatch(keep, 0, 4, reduce="concat", arg_shardings=P("data"))(x, a, b)

        y = f(*placed, x)
    np.testing.assert_allclose(y, np.tanh(x @ a) @ b, rtol=1e-5, atol=1e-6)
    assert seen and not any(sharding.is_fully_replicated for sharding in seen)


def test_printing_from_inside_a_fragment(capfd):
    """An effect without results runs where what it reads is."""
    mesh, model = split_model()

    @mm.jit
    def f(model, batch):
        loss, grads = nnx.value_and_grad(models.squared_error)(model, batch)
        jax.debug.print("norm {n:.3f}", n=optax.tree.norm(grads))
        return loss

    with mesh:
        loss = f(model, models.vectors())
    jax.effects_barrier()
    assert "norm" in capfd.readouterr().out
    assert np.isfinite(float(loss))


def test_ignored_tasks_need_no_devices():
    """A program for more devices than there are can be debugged on one."""
    far = mm.task(
        lambda x: mm.with_sharding_constraint(x * 2, P("model")), "far", mesh=mm.TaskMesh(devices=[200, 201])
    )

    def f(x):
        return mm.with_sharding_constraint(far(x), P("model")) + 1

    jitted = mm.jit(f)
    with mm.ignore_transforms():
        np.testing.assert_array_equal(jitted(np.ones(2)), np.full(2, 3.0))
        with mm.MultiMesh(axis_sizes=(2,), axis_names=("model",)):
            np.testing.assert_array_equal(mm.jit(f)(np.ones(2)), np.full(2, 3.0))
