"""shard_map and custom_partitioning in tasks: each over the mesh of the task that it is used in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from multimesh_compat.jax import with_sharding_constraint
from multimesh_compat.jax.partitioning import custom_partitioning, shard_map
from multimesh_compat.jax.tasks import task

X = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
TWO = {"one": [2, 3], "two": [4, 5]}  # submeshes of the eight devices


def total(x):
    """The sum over all shards, and how many there are."""
    return jax.lax.psum(jnp.sum(x), "x"), jnp.array(jax.lax.axis_size("x"))


SPECS = dict(in_specs=P("x"), out_specs=P())


def device_numbers(mesh):
    return [d.id for d in mesh.devices.flat]


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:4]), ("x",))


# shard_map


def test_shard_map_over_a_given_mesh(mesh):
    """By keyword, or by position as earlier releases of JAX had it."""
    for f in (
        shard_map(total, mesh=mesh, **SPECS),
        shard_map(total, mesh, P("x"), P()),
        shard_map(mesh=mesh, **SPECS)(total),
    ):
        assert [float(v) for v in f(X)] == [X.sum(), 4]
        assert (f.__name__, f.__doc__) == ("total", total.__doc__)


def test_shard_map_over_the_mesh_of_the_task():
    """The devices of the task, also where a MultiMesh is current; without a task it is that."""
    f = shard_map(total, **SPECS)
    on_two = task(f, devices=[6, 7], device_axes=("x",))
    with mm.MultiMesh(axis_sizes=(8,), axis_names=("x",)):
        assert int(f(X)[1]) == 8
        value, count = on_two(X)
    assert float(value) == X.sum() and int(count) == 2
    assert {d.id for d in value.devices()} == {6, 7}


def test_shard_map_in_a_program_of_two_tasks():
    """Forward and backward: rows of a kernel on two devices, and columns of the next on two others."""

    def of(name, fun, in_specs, out_specs):
        mapped = shard_map(fun, in_specs=in_specs, out_specs=out_specs)
        return task(mapped, name, devices=TWO[name], device_axes=("x",))

    rows = of("one", lambda x, w: jax.lax.psum(x @ w, "x"), (P(None, "x"), P("x")), P())
    columns = of("two", lambda x, w: jnp.tanh(x @ w), (P(), P(None, "x")), P(None, "x"))

    def plain(ws, x):
        return jnp.tanh(x @ ws[0] @ ws[1])

    ws = [X[:4], X[:4] + 1]
    loss = lambda ws, x: jnp.sum(columns(rows(x, ws[0]), ws[1]) ** 2)
    step = mm.jit(jax.value_and_grad(loss))
    where = {f.name: device_numbers(f.mesh) for f in step.program(ws, X).fragments}
    assert where["one forward"] == [2, 3] and {tuple(w) for w in where.values()} == {(2, 3), (4, 5)}
    got, wanted = step(ws, X), jax.value_and_grad(lambda ws, x: jnp.sum(plain(ws, x) ** 2))(ws, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


def test_shard_map_options(mesh):
    """check_vma, also by its earlier name, is JAX's check of what out_specs promise."""
    unequal = lambda x: jnp.sum(x)
    with pytest.raises(ValueError, match="out_specs|replicat|varying"):
        shard_map(unequal, mesh, **SPECS)(X)
    for name in ("check_vma", "check_rep"):
        assert float(shard_map(unequal, mesh, **SPECS, **{name: False})(X)) == X[:2].sum()
    f = shard_map(lambda x: jax.lax.psum(jnp.sum(x), "x"), mesh, **SPECS, axis_names={"x"})
    assert float(f(X)) == X.sum()


def test_shard_map_errors(mesh):
    with pytest.raises(TypeError, match="shard_map needs in_specs= and out_specs="):
        shard_map(total, mesh, in_specs=P("x"))
    with pytest.raises(TypeError, match="shard_map needs in_specs= and out_specs="):
        shard_map(total)
    with pytest.raises(ValueError, match="shard_map needs a mesh: give mesh="):
        shard_map(total, **SPECS)(X)


# custom_partitioning


def normalise(x):
    """Each row over its sum of squares."""
    return x / jnp.sum(x * x, axis=-1, keepdims=True)


def partitioned(seen):
    """`normalise` that is split along rows alone, and records what its callbacks are given."""
    f = custom_partitioning(normalise)

    def partition(mesh, args, result):
        seen.append((mesh, args[0].sharding, args[0].shape))
        rows = NamedSharding(mesh, P(args[0].sharding.spec[0], None))

        def of_a_shard(x):
            seen.append(x.shape)
            return normalise(x)

        return mesh, of_a_shard, rows, (rows,)

    def infer_sharding_from_operands(mesh, args, result):  # asked where Shardy is switched off
        seen.append(("infer", mesh))
        return NamedSharding(mesh, P(args[0].sharding.spec[0], None))

    def sharding_rule(mesh, args, results):
        seen.append(("rule", mesh))
        return "rows features -> rows features", {"need_replication_factors": ("features",)}

    f.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer_sharding_from_operands,
        sharding_rule=sharding_rule,
    )
    return f


def in_two_tasks(f, axes=("x", "y")):
    """`f` in two tasks on two submeshes, each with its rows split."""

    def of(name, axis):
        def rows(x):
            return f(with_sharding_constraint(x, P(axis)) + 1)

        return task(rows, name, devices=jax.devices()[TWO[name][0] :][:2], device_axes=(axis,))

    return lambda x: of("two", axes[1])(of("one", axes[0])(x))


def plain(x):
    return normalise(normalise(x + 1) + 1)


@pytest.mark.parametrize("axes", [("x", "y"), ("x", "x")])
@pytest.mark.parametrize("within", [None, "MultiMesh"])
def test_each_task_partitions_over_its_own_mesh(axes, within):
    """Whether the meshes have equal names or not, and whatever mesh is current."""
    seen = []
    mesh = mm.MultiMesh(axis_sizes=(8,), axis_names=("all",)) if within else None
    step = mm.jit(in_two_tasks(partitioned(seen), axes), mesh=mesh)
    assert [device_numbers(f.mesh) for f in step.program(X).fragments] == [[2, 3], [4, 5]]
    np.testing.assert_allclose(step(X), plain(X), rtol=1e-6)
    calls = [entry for entry in seen if isinstance(entry[0], Mesh)]
    assert [device_numbers(mesh) for mesh, _, _ in calls] == [[2, 3], [4, 5]]
    for (mesh, sharding, shape), axis in zip(calls, axes):
        assert mesh.axis_names == (axis,) and sharding == NamedSharding(mesh, P(axis, None))
        assert shape == X.shape
    assert [device_numbers(entry[1]) for entry in seen if entry[0] == "rule"] == [[2, 3], [4, 5]]
    assert {entry for entry in seen if entry[0] == 4} == {(4, 4)}  # half of the rows each


def test_without_shardy_the_other_callback_has_the_mesh_of_the_task():
    seen = []
    step = mm.jit(in_two_tasks(partitioned(seen)))
    shardy = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        np.testing.assert_allclose(step(X), plain(X), rtol=1e-6)
    finally:
        jax.config.update("jax_use_shardy_partitioner", shardy)
    asked = [tuple(device_numbers(entry[1])) for entry in seen if entry[0] == "infer"]
    assert set(asked) == {(2, 3), (4, 5)}


def test_gradients_through_it():
    """custom_partitioning has no derivative of its own: both rules are custom-partitioned functions."""
    forward_seen, backward_seen = [], []
    f = partitioned(forward_seen)
    backward = custom_partitioning(lambda x, g: jax.vjp(normalise, x)[1](g)[0])

    def partition(mesh, args, result):
        backward_seen.append(mesh)
        rows = NamedSharding(mesh, P(mesh.axis_names[0], None))
        return mesh, lambda x, g: jax.vjp(normalise, x)[1](g)[0], rows, (rows, rows)

    backward.def_partition(
        partition=partition,
        sharding_rule="rows features, rows features -> rows features",
        need_replication_factors=("features",),
    )

    @jax.custom_vjp
    def differentiable(x):
        return f(x)

    differentiable.defvjp(lambda x: (f(x), x), lambda x, g: (backward(x, g),))
    step = mm.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(in_two_tasks(differentiable)(x)))))
    for got, wanted in zip(step(X), jax.value_and_grad(lambda x: jnp.sum(jnp.sin(plain(x))))(X)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    where = [device_numbers(entry[0]) for entry in forward_seen if isinstance(entry[0], Mesh)]
    assert sorted(where) == [[2, 3], [4, 5]]
    assert sorted(map(device_numbers, backward_seen)) == [[2, 3], [4, 5]]


def test_in_a_microbatch_loop():
    seen = []
    fun = in_two_tasks(partitioned(seen))
    step = mm.jit(mm.microbatch(lambda x: jnp.sum(fun(x)), 0, 4, schedule="gpipe"))
    np.testing.assert_allclose(step(X), plain(X).sum(), rtol=1e-5)
    where = {tuple(device_numbers(entry[0])) for entry in seen if isinstance(entry[0], Mesh)}
    assert where == {(2, 3), (4, 5)}
    assert {entry for entry in seen if isinstance(entry[0], int)} == {(2, 4)}


def test_unsplit_it_is_the_function():
    seen = []
    f = partitioned(seen)
    np.testing.assert_allclose(jax.jit(f)(X), normalise(X), rtol=1e-6)
    np.testing.assert_allclose(f(X), normalise(X), rtol=1e-6)
    assert not seen


def test_gradient_of_a_sum_over_shards_in_a_program_of_two_tasks():
    total = shard_map(lambda x: jax.lax.psum(x.sum(), "x"), in_specs=P("x"), out_specs=P())
    second = task(total, "two", devices=[4, 5], device_axes=("x",))
    first = task(jnp.sin, "one", devices=[2, 3])
    np.testing.assert_allclose(mm.jit(jax.grad(lambda x: second(first(x))))(X), np.cos(X), rtol=1e-6)
