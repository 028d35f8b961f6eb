"""A dimension that is divided between tasks: the rules, and the arrays."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.sharding.divided_array import PiecewiseSharding, divide_array
from mmnnx.sharding.division import ways_to_divide

STAGES = [mm.Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(4)]


@pytest.fixture
def mesh():
    with mm.MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model")) as mesh:
        yield mesh


def lookup(rule, shape=(8, 4, 6)):
    return mm.TaskSharding({mm.path("layers"): rule}).lookup(("layers",), jax.ShapeDtypeStruct(shape, "f4"))


def test_several_tasks_divide_the_first_dimension(mesh):
    for rule in (STAGES, tuple(STAGES), (STAGES, P()), mm.Division(STAGES), (mm.Division(STAGES), P())):
        found = lookup(rule)
        assert found.task == mm.Division(STAGES)
        assert found.sharding == NamedSharding(mesh.mesh, P("stage"))
    assert lookup((STAGES, P(None, None, "model"))).sharding.spec == P("stage", None, "model")
    assert lookup((STAGES, P("model")), (8, 4)).sharding.spec == P(("stage", "model"))
    assert lookup(([STAGES[0]], P())).task == STAGES[0]


def test_some_of_the_stages_and_another_dimension(mesh):
    found = lookup((mm.Division(STAGES[1:3], dim=1), P("model"))).sharding
    assert found.mesh.devices.tolist() == mesh.devices[1:3].tolist()
    assert found.spec == P("model", "stage")


def test_meshes_that_are_no_slices(mesh):
    tasks = [mm.Task(f"t{i}", mesh=mm.TaskMesh(devices=[i, i + 4], axis_names=("x",))) for i in range(4)]
    found = lookup((tasks, P(None, None, "x"))).sharding
    assert found.spec == P("tasks", None, "x") and dict(found.mesh.shape) == {"tasks": 4, "x": 2}
    (way, _) = ways_to_divide(found)
    assert way.meshes == tuple(task.to_mesh() for task in tasks) and way.spec == P(None, None, "x")


def test_unequal_pieces_and_meshes_that_come_twice(mesh):
    (way, *_) = ways_to_divide(lookup(STAGES, (10, 4)).sharding)
    assert way.sizes == (3, 3, 2, 2) and way.meshes == tuple(mesh.slice(stage=i) for i in range(4))
    (way, *_) = ways_to_divide(lookup(mm.Division(STAGES[:2], sizes=(1, 3)), (4,)).sharding)
    assert way.sizes == (1, 3)
    (way, *_) = ways_to_divide(lookup([*STAGES[:2], *STAGES[:2]], (8, 2)).sharding)
    assert way.sizes == (2, 2, 2, 2) and way.meshes == tuple(mesh.slice(stage=i) for i in (0, 1, 0, 1))


def test_logical_names_are_those_of_a_piece(mesh):
    tasks = [mm.Task(f"s{i}", mesh_slice={"stage": i}, logical_axes={"mlp": "model"}) for i in range(4)]
    names = dict(out_sharding=("layers", "embed", "mlp"), eager_sharding=False)
    param = nnx.Param(jax.ShapeDtypeStruct((8, 4, 6), jnp.float32), **names)
    found = mm.TaskSharding({mm.path("layers"): tasks}).lookup(("layers",), param)
    assert found.sharding.spec == P("stage", None, "model")


@pytest.mark.parametrize(
    "rule, shape, message",
    [
        (
            mm.Division(STAGES, sizes=(1, 2, 3, 4)),
            (8, 4),
            r"sizes= of 1, 2, 3, 4 add up to 10, .* 0 has size 8",
        ),
        (mm.Division(STAGES, dim=2), (8, 4), r"no dimension 2 to divide between 4 tasks"),
        (STAGES, (), r"no dimension 0 to divide between 4 tasks"),
        (STAGES, (3, 4), r"dimension 0 has size 3, too small for 4 tasks"),
        ((STAGES, P(None, None, "modle")), (8, 4, 6), r"no axis 'modle'"),
        (
            (STAGES, P(None, "model")),
            (8, 3),
            r"cannot place a piece of layers.*dimension 1 has size 3, which model=2",
        ),
        ((STAGES, P("model")), (12, 3), r"dimension 0 has size 3, which model=2 does not divide"),
        (
            [STAGES[0], mm.Task("other", mesh=mm.TaskMesh(devices=[1, 2], axis_sizes=(1, 2)))],
            (8, 4),
            r"task 'other' has a mesh of .*, and task 'stage0' one of",
        ),
        (
            [mm.Task("a", mesh=mm.TaskMesh(devices=[0, 1])), mm.Task("b", mesh=mm.TaskMesh(devices=[1, 2]))],
            (8, 4),
            r"task 'a' and task 'b' are both on device 1, and their meshes differ",
        ),
    ],
)
def test_wrong_divisions_are_refused_by_name(mesh, rule, shape, message):
    with pytest.raises(mm.PlacementError, match=message):
        lookup(rule, shape)


def test_what_is_no_division():
    for tasks, error in (([], "has none"), (["stage0"], "between Tasks")):
        with pytest.raises((ValueError, TypeError), match=error):
            mm.Division(tasks)
    for sizes in ((1, 2), (1, 2, 3, 0)):
        with pytest.raises(ValueError, match="a size of at least 1 for each of its 4 tasks"):
            mm.Division(STAGES, sizes=sizes)
    with pytest.raises(ValueError, match="counted from the front"):
        mm.Division(STAGES, dim=-1)


def make(mesh, shape=(10, 4), spec=P(None, "model"), dtype=jnp.float32):
    x = jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)
    sharding = PiecewiseSharding(mm.Division(STAGES).sharding(spec, shape[0]))
    return x, divide_array(x, sharding, jax.device_put)


def test_a_divided_array_is_an_array(mesh):
    x, divided = make(mesh)
    assert isinstance(divided, jax.Array) and len(divided) == 10
    for name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "weak_type"):
        assert getattr(divided, name) == getattr(x, name)
    np.testing.assert_array_equal(divided, x)
    np.testing.assert_array_equal(divided[3], x[3])
    np.testing.assert_array_equal(jax.jit(jnp.sin)(divided), jnp.sin(x))
    np.testing.assert_array_equal(divided * 2 + jnp.ones(4), x * 2 + 1)
    assert float(jnp.linalg.norm(divided)) == float(jnp.linalg.norm(x))
    assert [row.tolist() for row in divided] == x.tolist()
    assert (
        divided.sum() == x.sum() and divided.T.shape == (4, 10) and jnp.zeros_like(divided).shape == x.shape
    )
    assert jax.tree.leaves({"w": divided}) == [divided]
    assert "DividedArray(float32[10, 4]" in repr(divided)
    assert {s.device for s in divided.addressable_shards} == set(mesh.devices.flat)
    everywhere = jax.device_put(divided, NamedSharding(mesh.mesh, P()))
    np.testing.assert_array_equal(everywhere, x)
    assert divided.devices() == set(mesh.devices.flat) and jax.block_until_ready(divided).is_ready()
    assert divided.tolist() == x.tolist() and divided.tobytes() == np.asarray(x).tobytes()
    for again in (pickle.loads(pickle.dumps(divided)), copy.copy(divided), copy.deepcopy(divided)):
        assert isinstance(again, jax.Array)
        np.testing.assert_array_equal(again, x)


def test_its_life(mesh):
    x, divided = make(mesh)
    another = divided.copy()
    assert jax.block_until_ready(divided) is divided
    divided.copy_to_host_async()
    divided.delete()
    assert divided.is_deleted() and not another.is_deleted()
    np.testing.assert_array_equal(another, x)


def test_of_keys(mesh):
    keys = jax.random.split(jax.random.key(0), 10)
    sharding = PiecewiseSharding(mm.Division(STAGES).sharding(P(), 10))
    divided = divide_array(keys, sharding, jax.device_put)
    np.testing.assert_array_equal(jax.random.key_data(divided), jax.random.key_data(keys))
    np.testing.assert_array_equal(jax.random.bits(divided[9]), jax.random.bits(keys[9]))


def test_what_jax_cannot_do_is_said(mesh):
    x, divided = make(mesh)
    with pytest.raises(ValueError, match="let mm.jit do it"):
        jax.device_put(x, divided.sharding)
    with pytest.raises(NotImplementedError, match="see its .pieces"):
        divided.sharding.devices_indices_map((10, 4))
    with pytest.raises(NotImplementedError, match="stay in device memory"):
        divided.sharding.with_memory_kind("pinned_host")
    assert divided.sharding == make(mesh)[1].sharding != make(mesh, (9, 4))[1].sharding
