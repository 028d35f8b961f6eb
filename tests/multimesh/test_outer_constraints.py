"""Logical constraints outside of tasks: they shard a value in each task that reads it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from multimesh_compat.jax import (
    MultiMesh,
    TaskMesh,
    autoshard,
    microbatch,
    parallelize,
    task,
    with_sharding_constraint,
)
from tests.multimesh.test_parallelize import batch, devices, init, shards
from tests.slow import grid


def first(w, x):
    return jnp.tanh(x @ w)


def second(w, x):
    return x @ w


def device_lists():
    return [
        task(f, devices=jax.devices()[4 * n : 4 * n + 4], device_axes=("x",))
        for n, f in enumerate((first, second))
    ], "x"


def task_meshes():
    meshes = [TaskMesh(devices=range(4 * n, 4 * n + 4), axis_names=("x",)) for n in range(2)]
    return [
        task(f, mesh=mesh, logical_axes=[("model", "x")]) for f, mesh in zip((first, second), meshes)
    ], "model"


def loss_of(tasks, name):
    """Parameters by rows and by columns, the batch by rows, all constrained outside of the tasks."""
    one, two = tasks

    def loss(params, x):
        w = with_sharding_constraint(params, [P(name, None), P(None, name)])
        return (two(w[1], one(w[0], with_sharding_constraint(x, P(name, None)))) ** 2).mean()

    return loss


def expected(params, x):
    return (second(params[1], first(params[0], x)) ** 2).mean()


def test_an_entry_beyond_the_dimensions():
    """It is refused by the mesh of the task that reads the array."""
    (one, _), name = task_meshes()

    def loss(params, x):
        return one(params[0], with_sharding_constraint(x, P(None, None, name))).mean()

    with pytest.raises(ValueError, match="there is no dimension to shard over 'x', which 'model' stands for"):
        parallelize(loss, init_params=init, get_input_batch=batch)


ROWS = {d: (slice(2 * d, 2 * d + 2, 1), slice(0, 8, 1)) for d in range(4)}
COLUMNS = {d + 4: (slice(0, 8, 1), slice(2 * d, 2 * d + 2, 1)) for d in range(4)}


@pytest.mark.parametrize(
    "derive, tasks",
    grid([lambda f: f, jax.value_and_grad, jax.checkpoint, jax.jit], [device_lists, task_meshes], step=4),
)
def test_parameters_and_batch_are_sharded_for_the_task_that_reads_them(tasks, derive):
    sharded, sharded_init, get_batch = parallelize(
        derive(loss_of(*tasks())), init_params=init, get_input_batch=batch
    )
    params, x = sharded_init(), get_batch()
    assert [shards(p) for p in params] == [ROWS, COLUMNS]
    assert shards(x) == {d: (slice(4 * d, 4 * d + 4, 1), slice(0, 8, 1)) for d in range(4)}
    got, want = sharded(params, x), derive(expected)(init(), batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    if isinstance(got, tuple):
        assert [g.sharding.spec for g in got[1]] == [P("x"), P(None, "x")]


def test_a_loop_over_microbatches():
    """The tasks are slices of a MultiMesh, whose axes the logical names are not."""
    rules = [("rows", "batch"), ("hidden", "model")]
    one, two = (task(f, mesh_slice={"stage": n}, logical_axes=rules) for n, f in enumerate((first, second)))

    def loss(params, x):
        w = with_sharding_constraint(params, [P(None, "hidden"), P("hidden", None)])
        return (two(w[1], one(w[0], with_sharding_constraint(x, P("rows")))) ** 2).mean()

    def step(params, x):
        grad = jax.value_and_grad(loss)
        value, grads = microbatch(grad, 0, 4, argnum=1, schedule="1f1b", reduce="mean")(params, x)
        return value, [p - 0.1 * g for p, g in zip(params, grads)]

    with MultiMesh(axis_sizes=(2, 2, 2), axis_names=("stage", "batch", "model")):
        sharded, sharded_init, get_batch = parallelize(step, init, batch)
    params, x = sharded_init(), get_batch()
    assert [devices(p) for p in params] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [p.sharding.spec for p in params] == [P(None, "model"), P("model")]
    assert devices(x) == [0, 1, 2, 3] and x.sharding.spec[0] == "batch"
    value, new = sharded(params, x)
    want, grads = jax.value_and_grad(expected)(init(), batch())
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for a, p, g, old in zip(new, init(), grads, params):
        np.testing.assert_allclose(a, p - 0.1 * g, rtol=1e-5, atol=1e-6)
        assert a.sharding == old.sharding


def test_a_constraint_before_the_loop():
    """On what all microbatches share, and on the batch before it is sliced."""
    (one, two), name = task_meshes()

    def step(params, x):
        w = with_sharding_constraint(params, [P(name, None), P(None, name)])
        x = with_sharding_constraint(x, P(name))
        grad = jax.value_and_grad(lambda w, x: (two(w[1], one(w[0], x)) ** 2).mean())
        value, grads = microbatch(grad, 0, 4, argnum=1, reduce="mean")(w, x)
        return value, [p - 0.1 * g for p, g in zip(params, grads)]

    sharded, sharded_init, get_batch = parallelize(step, init, batch)
    params, x = sharded_init(), get_batch()
    assert [shards(p) for p in params] == [ROWS, COLUMNS]
    assert x.sharding.spec[0] == "x"
    value, new = sharded(params, x)
    want, grads = jax.value_and_grad(expected)(init(), batch())
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for a, p, g in zip(new, init(), grads):
        np.testing.assert_allclose(a, p - 0.1 * g, rtol=1e-5, atol=1e-6)


def test_each_task_that_reads_it_shards_it_by_its_own_rules():
    meshes = [TaskMesh(devices=range(4), axis_names=("a",)), TaskMesh(devices=range(4, 8), axis_names=("b",))]
    one = task(lambda t, x: x @ t, "one", mesh=meshes[0], logical_axes=[("rows", "a")])
    two = task(lambda t, x: x @ t.T, "two", mesh=meshes[1], logical_axes=[("columns", "b")])

    def f(table, x):
        t = with_sharding_constraint(table, P("rows", "columns"))
        return (two(t, one(t, x)) ** 2).mean()

    sharded, sharded_init, get_batch = parallelize(jax.value_and_grad(f), lambda: init()[0], batch)
    table = sharded_init()
    assert devices(table) == [0, 1, 2, 3] and table.sharding.spec == P("a")
    got, grad = sharded(table, get_batch())
    want, wanted = jax.value_and_grad(lambda t: ((batch() @ t @ t.T) ** 2).mean())(init()[0])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-4)
    assert grad.sharding == table.sharding
    sharded, _, _ = parallelize(f, lambda: init()[0], batch)
    assert specs(sharded.program(init()[0], batch())) == {"one": P("a"), "two": P(None, "b")}


def specs(program):
    """By task, the spec of the constraint in its fragment."""
    return {
        f.task: e.params["sharding"].spec
        for f in program.fragments
        for e in f.jaxpr.jaxpr.eqns
        if e.primitive.name == "sharding_constraint"
    }


def test_an_activation_is_constrained_where_it_is_read():
    (one, two), name = task_meshes()

    def f(params, x):
        h = one(params[0], x)
        return two(params[1], with_sharding_constraint(h, P(name)))

    sharded, _, _ = parallelize(f, init, batch)
    assert specs(sharded.program(init(), batch())) == {"second": P("x")}


def test_a_result_that_no_task_reads_is_constrained_where_it_is_made():
    (one, _), name = task_meshes()
    sharded, sharded_init, get_batch = parallelize(
        lambda p, x: with_sharding_constraint(one(p[0], x) + 1, P(None, name)), init, batch
    )
    y = sharded(sharded_init(), get_batch())
    assert devices(y) == [0, 1, 2, 3] and y.sharding.spec == P(None, "x")


def test_vmap_leaves_the_new_dimension_free():
    (one, two), name = task_meshes()
    f = jax.vmap(lambda w, x: two(w, one(with_sharding_constraint(w, P(name, None)), x)), in_axes=(0, None))
    sharded, sharded_init, get_batch = parallelize(f, lambda: jnp.stack(init()), batch)
    assert sharded_init().sharding.spec == P(None, "x")
    want = jax.vmap(lambda w: second(w, first(w, batch())))(jnp.stack(init()))
    np.testing.assert_allclose(sharded(sharded_init(), get_batch()), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", [None, MultiMesh(axis_sizes=(8,), axis_names=("x",))])
def test_under_autoshard_mm_jit_does_the_same(mesh):
    loss = loss_of(*task_meshes())

    def f(params, x):
        with autoshard():
            return loss(params, x)

    (shardings, _), _ = mm.jit(f, mesh=mesh).input_shardings(init(), batch())
    assert [s.spec for s in shardings] == [P("x"), P(None, "x")]
    np.testing.assert_allclose(mm.jit(f, mesh=mesh)(init(), batch()), expected(init(), batch()), rtol=1e-6)


def test_where_no_task_is_it_does_nothing_without_a_multimesh():
    def f(x):
        with autoshard():
            return with_sharding_constraint(x, P("rows", "rows")) * 2

    np.testing.assert_allclose(mm.jit(f)(batch()), 2 * batch())
    np.testing.assert_allclose(mm.jit(jax.grad(lambda x: f(x).sum()))(batch()), np.full((16, 8), 2.0))


def test_in_a_scan_around_a_task():
    (one, _), name = task_meshes()

    def f(w, x):
        return jax.lax.scan(lambda c, w: (one(with_sharding_constraint(w, P(None, name)), c), None), x, w)[0]

    sharded, sharded_init, get_batch = parallelize(f, lambda: jnp.stack(init()), batch)
    w = sharded_init()
    assert devices(w) == [0, 1, 2, 3] and w.sharding.spec == P(None, None, "x")
    want = first(init()[1], first(init()[0], batch()))
    np.testing.assert_allclose(sharded(w, get_batch()), want, rtol=1e-5, atol=1e-6)


def test_in_a_cond_over_two_tasks():
    (one, two), name = task_meshes()

    def f(params, x):
        def yes(x):
            return two(with_sharding_constraint(params[1], P(None, name)), one(params[0], x))

        return jax.lax.cond(x[0, 0] < 0, yes, lambda x: x, x).sum()

    sharded, sharded_init, get_batch = parallelize(jax.value_and_grad(f), init, batch)
    params = sharded_init()
    assert [devices(p) for p in params] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert params[1].sharding.spec == P(None, "x")
    got = sharded(params, get_batch())
    want = jax.value_and_grad(lambda p, x: second(p[1], first(p[0], x)).sum())(init(), batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_in_a_while_over_two_tasks():
    """What enters it is sharded for the task that reads it there; what an iteration makes, too."""

    def iterate(one, two, constrain):
        def f(params, x):
            w = constrain(params, [P("model", None), P(None, "model")])

            def body(carry):
                n, x = carry
                return n + 1, two(w[1], one(w[0], constrain(x, P("model", None))))

            return jax.lax.while_loop(lambda carry: carry[0] < 4, body, (1, x))

        return f

    tasks, _ = task_meshes()
    sharded, sharded_init, get_batch = parallelize(iterate(*tasks, with_sharding_constraint), init, batch)
    params, x = sharded_init(), get_batch()
    assert [shards(p) for p in params] == [ROWS, COLUMNS]
    (times, got), (expected_times, want) = (
        sharded(params, x),
        iterate(first, second, lambda x, _: x)(init(), batch()),
    )
    assert times == expected_times
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_integers_and_slices_of_the_batch():
    """`arg_shardings` are such constraints too: on each slice, for the task that reads it."""
    (one, two), name = task_meshes()

    def loss(params, ids):
        x = one(params[0][:, :8], jax.nn.one_hot(ids, 8))
        return (two(params[1], x) ** 2).mean()

    def step(params, ids):
        grad = jax.value_and_grad(loss)
        return microbatch(grad, 0, 4, 1, arg_shardings=P(name), reduce="mean")(params, ids)

    ids = np.arange(16) % 8
    sharded, sharded_init, get_batch = parallelize(step, init, lambda: ids)
    assert devices(get_batch()) == [0, 1, 2, 3] and get_batch().sharding.spec == P("x")
    got, want = sharded(sharded_init(), get_batch()), jax.value_and_grad(loss)(init(), ids)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


def test_for_a_task_that_moves_with_the_microbatch():
    one = task(first, loop_dependent_mesh_slice="stage", logical_axes=[("rows", "batch")])

    def step(params, x):
        def loss(params, x):
            return (one(params[0], with_sharding_constraint(x, P("rows"))) ** 2).mean()

        return microbatch(jax.value_and_grad(loss), 0, 4, argnum=1, reduce="mean")(params, x)

    with MultiMesh(axis_sizes=(2, 4), axis_names=("stage", "batch")):
        sharded, sharded_init, get_batch = parallelize(step, lambda: init()[:1], batch)
    value, (grad,) = sharded(sharded_init(), get_batch())
    want, (wanted,) = jax.value_and_grad(lambda p, x: (first(p[0], x) ** 2).mean())(init()[:1], batch())
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-6)
