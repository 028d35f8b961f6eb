"""State moves between topologies: each device reads its own part, and training goes on as it would have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.train.checkpoint import Checkpoints, read, write
from mmnnx.train.checkpoint.nnx_state import arrays_of
from tests.train.states import GRIDS, Net, adam, assert_equal, born, losses, placed, values


@pytest.mark.slow
def test_every_topology_to_every_other(tmp_path):
    """The state to the last bit, where it lives there; the next losses, to the last bit on the same.

    Abstract nodes get arrays where `mm.jit` would have placed them; the optimizer may come first.
    """
    runs = {}
    for grid in GRIDS:
        mesh, nodes = born(grid)
        losses(mesh, nodes)
        with mesh, Checkpoints(tmp_path / grid) as checkpoints:
            checkpoints.save(2, nodes)
        runs[grid] = mesh, nodes, values(nodes), losses(mesh, nodes)
    for to, (mesh, nodes, _, _) in runs.items():
        homes = {path: x.sharding for path, x in arrays_of(nodes).items()}
        for grid, (_, _, held, expected) in runs.items():
            Checkpoints(tmp_path / grid).restore(nodes)
            assert_equal(held, values(nodes))
            assert {path: x.sharding for path, x in arrays_of(nodes).items()} == homes
            np.testing.assert_allclose(losses(mesh, nodes), expected, rtol=0 if grid == to else 1e-5)
        _, sharding = placed(to)
        model = nnx.eval_shape(lambda: Net(0))
        optimizer = nnx.eval_shape(lambda: nnx.Optimizer(Net(0), adam(), wrt=nnx.Param))
        with mesh:
            Checkpoints(tmp_path / "4x2").restore({"optimizer": optimizer, "model": model}, sharding=sharding)
        new = {"model": model, "optimizer": optimizer}
        assert_equal(runs["4x2"][2], values(new))
        for path, x in arrays_of(new).items():
            assert not x.shape or x.sharding.is_equivalent_to(homes[path], x.ndim), path
        if to == "2x4":
            np.testing.assert_allclose(losses(mesh, new), runs["4x2"][3], rtol=1e-5)


def test_abstract_nodes(tmp_path):
    """Without rules, on the default device; with rules that do not place them, refused."""
    model = Net(0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model})
    new = nnx.eval_shape(lambda: Net(0))
    few = mm.TaskSharding({mm.path("embed"): mm.Task("stage0", mesh_slice={"stage": 0})})
    with placed("4x2")[0], pytest.raises(mm.PlacementError, match="blocks.0"):
        Checkpoints(tmp_path).restore({"model": new}, sharding=few)
    stage = mm.Task("stage0", mesh_slice={"stage": 0})
    wrong = mm.TaskSharding({mm.path("block", 0): stage, ...: stage})
    with placed("4x2")[0], pytest.raises(mm.PlacementError, match=r"is placed by path\('block', 0\)"):
        Checkpoints(tmp_path).restore({"model": new}, sharding=wrong)
    assert isinstance(new.embed.embedding.get_raw_value(), jax.ShapeDtypeStruct)
    Checkpoints(tmp_path).restore({"model": new})
    assert {d for x in arrays_of({"model": new}).values() for d in x.devices()} == {jax.devices()[0]}
    assert_equal(values({"model": model}), values({"model": new}))


def test_factored_slots_are_on_the_mesh_of_their_parameter(tmp_path):
    """Adafactor's rows and columns have neither the shape of the parameter nor a rule that fits."""

    def make():
        return nnx.Optimizer(Net(0), optax.adafactor(1e-3, min_dim_size_to_factor=4), wrt=nnx.Param)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": Net(0), "optimizer": make()})
    mesh, sharding = placed("4x2")
    model, optimizer = nnx.eval_shape(lambda: Net(0)), nnx.eval_shape(make)
    with mesh:
        Checkpoints(tmp_path).restore({"model": model, "optimizer": optimizer}, sharding=sharding)
    arrays = arrays_of({"optimizer": optimizer})
    found = [x for path, x in arrays.items() if path[-3:] == ("blocks", "1", "kernel")]
    assert {x.shape for x in found} >= {(8,)}
    assert all(x.sharding.device_set == set(mesh.devices[1].flat) for x in found)


def test_each_device_reads_its_own_part(tmp_path, monkeypatch):
    """Saved whole on one device, an array is read in slices; no slice twice, none that is not wanted."""
    monkeypatch.setattr(write, "CHUNK", 512)
    whole = jnp.arange(64 * 48, dtype=jnp.float32).reshape(64, 48)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": nnx.Dict(w=nnx.Param(whole))})
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    for spec, count in ((P("a", "b"), 8), (P(None, "b"), 4), (P("b"), 4), (P(("b", "a")), 8), (P(), 1)):
        taken: list[tuple] = []

        def spy(store, region, taken=taken):
            taken.append(region)
            return store[region].read()

        monkeypatch.setattr(read, "_read", spy)
        sharding = NamedSharding(mesh, spec)
        node = nnx.Dict(w=nnx.Param(jax.device_put(jnp.zeros((64, 48)), sharding)))
        Checkpoints(tmp_path).restore({"x": node})
        assert node["w"].get_raw_value().sharding == sharding
        np.testing.assert_array_equal(node["w"].get_raw_value(), whole)
        covered = np.zeros((64, 48), int)
        for region in taken:
            covered[region] += 1
        assert len(taken) == count and (covered == 1).all()


def test_little_is_read_at_one_time(tmp_path, monkeypatch):
    """However much there is to read: here at most three arrays of 4 kB."""
    node = nnx.List(nnx.Param(jnp.full((1024,), i, jnp.float32)) for i in range(20))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": node})
    flying, most = set(), 0

    def start(stores, source, part, real=read._start):
        nonlocal most
        flying.add(source.pieces[0][0])
        most = max(most, len(flying))
        return real(stores, source, part)

    def finish(state, wanted, reading, found, real=read._finish):
        flying.remove(reading[0])
        return real(state, wanted, reading, found)

    monkeypatch.setattr(read, "IN_FLIGHT", 3 * 4096)
    monkeypatch.setattr(read, "_start", start)
    monkeypatch.setattr(read, "_finish", finish)
    other = nnx.List(nnx.Param(jnp.zeros((1024,))) for _ in range(20))
    Checkpoints(tmp_path).restore({"x": other})
    assert [int(p[0]) for p in other] == list(range(20))
    assert most == 4 and not flying  # the one that is too much is started before another is waited for


@pytest.mark.parametrize(
    "shape, shard, expected",
    [
        ((8192, 8192), (8192, 4096), (1024, 1024)),
        ((50257, 4096), (50257, 1024), (786, 1024)),  # an odd dimension may be cut where it is not sharded
        ((3 * 4099, 4096), (4099, 4096), (4099, 128)),  # and not where it is
        ((100,), (100,), (100,)),
        ((), (), ()),
        ((0, 5), (0, 5), (1, 5)),
    ],
)
def test_chunks(shape, shard, expected):
    chunk = write.chunk_shape(shape, shard, 4)
    assert chunk == expected
    assert all(n % c == 0 for n, c, whole in zip(shard, chunk, shape) if n != whole)


def test_uncommitted_arrays_stay_uncommitted(tmp_path):
    """They go along with whatever they meet, as those of a model that was just made."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0))})
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    Checkpoints(tmp_path).restore({"model": model})
    assert not model.kernel.get_raw_value().committed
    elsewhere = jax.device_put(jnp.ones((1, 2)), jax.devices()[3])
    assert model(elsewhere).devices() == {jax.devices()[3]}


def test_an_optimizer_that_comes_alone(tmp_path):
    """Its slots are where the rules put its parameters, or where those are that are there already."""
    mesh, nodes = born("4x2")
    _, sharding = placed("4x2")
    homes = {path: x.sharding for path, x in arrays_of({"optimizer": nodes["optimizer"]}).items()}
    with mesh, Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, nodes)
        for others in ({}, {"model": nodes["model"]}):
            optimizer = nnx.eval_shape(lambda: nnx.Optimizer(Net(0), adam(), wrt=nnx.Param))
            checkpoints.restore({"optimizer": optimizer, **others}, sharding=sharding)
            for path, x in arrays_of({"optimizer": optimizer}).items():
                assert not x.shape or x.sharding.is_equivalent_to(homes[path], x.ndim), path


@pytest.mark.parametrize("start", [("opt_state", ...), (..., {"mu", "nu"})], ids=["whole", "middle"])
def test_slots_by_rules_of_their_own(tmp_path, start):
    """As with mm.jit: moments sharded over a data axis, of weights that are not (ZeRO, arXiv:1910.02054)."""
    mesh = mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "data"), devices=jax.devices()[:4])
    tasks = [mm.Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(2)]

    def make():
        model = nnx.Dict({name: nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for name in "ab"})
        return model, nnx.Optimizer(model, adam(), wrt=nnx.Param)

    rules = {mm.path(*start, name): (t, P("data")) for name, t in zip("ab", tasks)}
    rules |= {mm.path(name): (t, P()) for name, t in zip("ab", tasks)}
    with mesh, Checkpoints(tmp_path) as checkpoints:
        made = mm.jit(make, out_shardings=mm.TaskSharding(rules))()
        checkpoints.save(1, dict(zip("mo", made)))
        new = dict(zip("mo", nnx.eval_shape(make)))
        checkpoints.restore({"m": nnx.eval_shape(make)[0]}, sharding=mm.TaskSharding(rules))
        checkpoints.restore(new, sharding=mm.TaskSharding(rules))
    saved = arrays_of(dict(zip("mo", made)))
    assert any(x.shape and x.sharding.spec == P("data") for x in saved.values())
    for path, x in arrays_of(new).items():
        assert not x.shape or x.sharding.is_equivalent_to(saved[path].sharding, x.ndim), path


def test_rules_are_for_abstract_nodes(tmp_path):
    mesh, sharding = placed("4x2")
    about = nnx.List([nnx.BatchStat(np.arange(4.0))])
    with mesh, Checkpoints(tmp_path) as checkpoints:
        model = mm.jit(lambda: Net(0), out_shardings=sharding)()
        checkpoints.save(1, {"model": model, "about": about})
        new = nnx.eval_shape(lambda: Net(0))
        about[0].set_value(np.zeros(4))
        checkpoints.restore({"model": new, "about": about}, sharding=sharding)
    np.testing.assert_array_equal(about[0][...], np.arange(4.0))


@pytest.mark.parametrize("grid", ["1x1", "4x2"])
def test_weak_types(tmp_path, grid):
    """What is bfloat16 with a weak number is float32 with another."""

    class Scaled(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones((8, 8), jnp.bfloat16))
            self.scale = nnx.Variable(jnp.array(0.7))
            self.strong = nnx.Variable(jnp.float32(0.7))

    mesh, _ = placed(grid)
    stage = mm.Task("first", mesh_slice={"stage": 0})
    with mesh, Checkpoints(tmp_path) as checkpoints:
        model = mm.jit(Scaled, out_shardings=mm.TaskSharding({mm.path("weight"): (stage, P())}))()
        checkpoints.save(1, {"model": model})
        for new in (Scaled(), nnx.eval_shape(Scaled)):
            new.strong.set_value(jnp.array(0.1))  # what was saved counts
            checkpoints.restore({"model": new})
            assert (new.weight * new.scale[...]).dtype == jnp.bfloat16
            assert (new.weight * new.strong[...]).dtype == jnp.float32
            assert float(new.scale[...]) == np.float32(0.7)
