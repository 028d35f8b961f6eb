"""Checkpoints: what comes back is what was saved, and no more is kept than is wanted."""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from filelock import FileLock
from flax import nnx

import mmnnx as mm
from mmnnx.train.checkpoint import CheckpointError, Checkpoints, write
from mmnnx.train.checkpoint import checkpoints as module
from tests.train.states import assert_equal, values


class Small(nnx.Module):
    def __init__(self, seed: int):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)


def build(seed: int) -> dict:
    model = Small(seed)
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer):
    grads = nnx.grad(lambda model: sum((layer.kernel[...] ** 2).sum() for layer in model.layers))(model)
    optimizer.update(model, grads)


def save(folder, nodes, number=1, **options):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(number, nodes, **options)


def test_round_trip(tmp_path):
    nodes = build(0)
    step(*nodes.values())
    expected = values(nodes)
    extras = {"data": {"next_index": 7}, "config": {"width": 8, "names": ["a"]}, "metrics": {"loss": 3.0}}
    folder = tmp_path / "new" / "a folder, #1 of 50%20"
    save(folder, nodes, **extras)
    other = build(1)
    restored = Checkpoints(folder).restore(other)
    assert (restored.step, restored.data, restored.config, restored.metrics) == (1, *extras.values())
    assert not restored.left
    assert_equal(expected, values(other))
    step(*nodes.values())
    step(*other.values())  # and it can go on
    assert_equal(values(nodes), values(other))


def test_the_state_may_change_and_be_donated_while_it_is_written(tmp_path):
    nodes = build(0)
    expected = values(nodes)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, nodes)
        for _ in range(5):
            step(*nodes.values())
    other = build(1)
    Checkpoints(tmp_path).restore(other)
    assert_equal(expected, values(other))


def test_all_types_come_back_bit_by_bit(tmp_path):
    """Every bit pattern of small types, NaNs included; empty arrays; numbers; a tree in one Variable."""

    class Odd(nnx.Module):
        def __init__(self, filled: bool):
            bits = np.arange(256, dtype=np.uint8) if filled else np.zeros(256, np.uint8)
            self.kinds = nnx.Dict()
            for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint16", "float32"):
                self.kinds[name] = nnx.Variable(jnp.asarray(bits.view(jnp.dtype(name))))
            self.kinds["bool"] = nnx.Variable(jnp.asarray(bits > 3))
            self.kinds["int4"] = nnx.Variable(jnp.arange(8, dtype=jnp.int4) * filled)
            self.kinds["complex64"] = nnx.Variable(jnp.asarray([1j, 2.0]) * filled)
            self.empty = nnx.Variable(jnp.zeros((0, 3)))
            self.tree = nnx.Variable({"a": jnp.ones(2) * filled, "b": (3 * filled, 0.5 * filled, filled)})
            self.numpy = nnx.Variable(np.arange(3.0) * filled)
            self.number = nnx.Variable(np.float64(1.5 * filled))
            self.plain = nnx.data(jnp.ones(3) * filled)  # in no Variable at all

    node, other = Odd(True), Odd(False)
    save(tmp_path, {"odd": node})
    Checkpoints(tmp_path).restore({"odd": other})
    assert_equal(values({"odd": node}), values({"odd": other}))
    assert other.tree.get_raw_value()["b"] == (3, 0.5, True)
    assert [type(x) for x in other.tree.get_raw_value()["b"]] == [int, float, bool]
    assert type(other.numpy.get_raw_value()) is np.ndarray
    assert type(other.number.get_raw_value()) is np.float64


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_and_counters_go_on(tmp_path, impl):
    def make(seed):
        return nnx.Rngs(jax.random.key(seed, impl=impl), dropout=jax.random.split(jax.random.key(seed), 3)[2])

    rngs, other = make(1), make(2)
    rngs.dropout()
    save(tmp_path, {"rngs": rngs})
    Checkpoints(tmp_path).restore({"rngs": other})
    for _ in range(2):
        np.testing.assert_array_equal(jax.random.bits(rngs.dropout()), jax.random.bits(other.dropout()))
        np.testing.assert_array_equal(jax.random.bits(rngs.params()), jax.random.bits(other.params()))
    assert jax.random.key_impl(other.params()) == impl


def test_metrics_and_stateless_optimizers(tmp_path):
    model = Small(0)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    metrics.update(loss=jnp.array([1.0, 3.0]))
    nodes = {"metrics": metrics, "optimizer": nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)}
    save(tmp_path, nodes)
    other = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    Checkpoints(tmp_path).restore({"metrics": other})
    assert other.compute()["loss"] == 2.0


def test_the_latest_and_the_best_are_kept(tmp_path):
    nodes = build(0)
    with Checkpoints(tmp_path, keep=2, best="loss") as checkpoints:
        assert (checkpoints.latest, checkpoints.best, checkpoints.steps) == (None, None, [])
        for number, loss in enumerate([5.0, 2.0, float("nan"), 3.0, 4.0], start=1):
            checkpoints.save(number, nodes, metrics={"loss": np.float32(loss)})
        checkpoints.save(6, nodes)
    again = Checkpoints(tmp_path, keep=2, best="loss")
    assert (again.steps, again.latest, again.best) == ([2, 5, 6], 6, 2)
    with again:
        again.save(7, nodes, metrics={"loss": 1.0})  # what came before the restart counts
    assert (again.steps, again.best) == ([6, 7], 7)
    with Checkpoints(tmp_path) as one:
        one.save(8, nodes)
    assert one.steps == [8] and one.best is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "8"]


def test_going_back_keeps_what_came_later_under_another_name(tmp_path):
    """Else the checkpoints of the run that was given up would be taken for the newest."""
    nodes = build(0)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for number in (10, 20, 30):
            checkpoints.save(number, nodes)
        checkpoints.wait()
        assert checkpoints.restore(nodes, step=10).step == 10
        checkpoints.save(20, nodes)
    assert checkpoints.steps == [10, 20]
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "10", "20", "20.replaced", "30.replaced"}
    (tmp_path / "30.replaced").rename(tmp_path / "30")
    assert Checkpoints(tmp_path).restore(nodes).step == 30


@pytest.mark.parametrize("parameters", [lambda m: nnx.state(m), lambda m: nnx.to_pure_dict(nnx.state(m))])
def test_a_pytree_in_a_variable(parameters, tmp_path):
    """As the message says that refuses the pytree itself: state of optax, whose tuples cannot be set."""
    make = lambda seed: nnx.Dict(state=nnx.Variable(optax.adam(1e-2).init(parameters(Small(seed)))))
    with Checkpoints(tmp_path) as checkpoints:
        saved, other = make(0), jax.tree.map(lambda x: x + 1, make(1))
        checkpoints.save(1, {"optimizer": saved})
        checkpoints.restore({"optimizer": other})
    jax.tree.map(np.testing.assert_array_equal, other, saved)


def test_what_cannot_be_saved(tmp_path, monkeypatch):
    checkpoints, model = Checkpoints(tmp_path / "none"), Small(0)
    with pytest.raises(TypeError, match="data= is saved as JSON"):
        checkpoints.save(1, {"model": model}, data={"state": b"bytes"})
    with pytest.raises(TypeError, match="'model' must be an NNX object"):
        checkpoints.save(1, {"model": nnx.state(model).to_pure_dict()})
    for step in (-1, "2"):
        with pytest.raises(ValueError, match=f"step={step!r}: steps are counted from 0"):
            checkpoints.save(step, {"model": model})
    best = Checkpoints(tmp_path / "none", best="loss")
    with pytest.raises(ValueError, match=r"no 'loss', .* \(did you mean 'losss'\?\): it has 'losss', 'a'"):
        best.save(1, {"model": model}, metrics={"losss": 1.0, "a": 2.0})
    with pytest.raises(TypeError, match='as in {"model": model}, not Small'):
        checkpoints.save(1, model)
    with pytest.raises(ValueError, match="no state in rngs"):
        checkpoints.save(1, {"rngs": nnx.Dict({})})
    with pytest.raises(TypeError, match=r"model\.bias is a ShapeDtypeStruct, which has no values"):
        checkpoints.save(1, {"model": nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))})
    with pytest.raises(TypeError, match=r"quantised\.0 is uint4, for which Zarr has no type"):
        checkpoints.save(1, {"quantised": nnx.List([nnx.Variable(jnp.arange(4).astype(jnp.uint4))])})
    with pytest.raises(ValueError, match=r"\('odd', 'a', 'b'\) are both odd\.a\.b on disk"):
        checkpoints.save(1, {"odd": nnx.Dict({"a": nnx.Dict(b=nnx.Param(1.0)), "a/b": nnx.Param(2.0)})})
    with pytest.raises(ValueError, match=r"\('odd', 'a\.b'\) and .* are both odd\.a\.b on disk"):
        checkpoints.save(1, {"odd": nnx.Dict({"a": nnx.Dict(b=nnx.Param(1.0)), "a.b": nnx.Param(2.0)})})
    for keep in (0, "2", 1.5):
        with pytest.raises(ValueError, match=f"keep={keep!r}: it is how many are kept"):
            Checkpoints(tmp_path, keep=keep)
    with pytest.raises(TypeError, match="best=3: it is the name of a metric"):
        Checkpoints(tmp_path, best=3)
    with Checkpoints(tmp_path / "none") as closed:
        pass
    with pytest.raises(ValueError, match="none is closed: step 2 must be saved before that"):
        closed.save(2, {"model": model})
    with pytest.raises(ValueError, match="s3://bucket/run: .* orbax writes to no other .* not to S3"):
        Checkpoints("s3://bucket/run")
    with pytest.raises(ValueError, match="gs:/bucket/run: .* a string .pathlib makes one slash of two"):
        Checkpoints(Path("gs://bucket/run"))
    with pytest.raises(ValueError, match="/gs/run: orbax would take it for gs://run; choose another"):
        Checkpoints("/gs/run")
    for name in (tmp_path / "lr=[1e-3]", tmp_path / "what?", "run*/checkpoints", "gs://bucket/run#1"):
        with pytest.raises(ValueError, match="for a pattern, .* choose another folder, or a link to it"):
            Checkpoints(name)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match="gs://bucket/run: .* gcsfs; pip install 'mmnnx.gcs.'"):
        Checkpoints("gs://bucket/run")
    assert not (tmp_path / "none").exists()


def test_paths_with_dots_and_links(tmp_path, monkeypatch):
    """A link has the name that its folder must not have."""
    (tmp_path / "here").mkdir()
    (tmp_path / "lr=[1e-3]").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "lr=[1e-3]")
    monkeypatch.chdir(tmp_path / "here")
    nodes = build(0)
    for folder in ("../there", "../link"):
        save(folder, nodes)
        other = build(1)
        Checkpoints(folder).restore(other)
        assert_equal(values(nodes), values(other))
    assert (tmp_path / "there" / "1").is_dir() and (tmp_path / "lr=[1e-3]" / "1").is_dir()


def test_keys_with_slashes_and_dots(tmp_path):
    def make(factor):
        return nnx.Dict({"a/b": nnx.Param(jnp.ones(3) * factor), "c.d": nnx.Dict({"e/0": nnx.Param(factor)})})

    save(tmp_path, {"odd": make(2.0)})
    other = make(0.0)
    Checkpoints(tmp_path).restore({"odd": other})
    assert_equal(values({"odd": make(2.0)}), values({"odd": other}))


def test_what_a_killed_deletion_left_is_no_hindrance(tmp_path):
    nodes = build(0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, nodes)
        (tmp_path / "1.deleted" / "state").mkdir(parents=True)
        checkpoints.save(2, nodes)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "2"]


def test_where_there_is_none(tmp_path):
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path / 'none'}"):
        Checkpoints(tmp_path / "none").restore(build(0))
    assert not (tmp_path / "none").exists()
    save(tmp_path, build(0), 3)
    with pytest.raises(CheckpointError, match="no checkpoint of step 4 .*there are those of 3"):
        Checkpoints(tmp_path).restore(build(0), step=4)
    with pytest.raises(CheckpointError, match="no checkpoint of step '3' .*there are those of 3"):
        Checkpoints(tmp_path).restore(build(0), step="3")
    with pytest.raises(TypeError, match="sharding= is a TaskSharding, which names tasks, not Task"):
        Checkpoints(tmp_path).restore(build(0), sharding=mm.Task("stage0"))


def test_an_error_while_writing_is_raised_later(tmp_path, monkeypatch):
    """Where nobody waits for it, at once. The checkpoint before it is as it was."""
    nodes = build(0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, nodes)
    assert checkpoints.steps == [1]  # it is there, as nothing would wait for it

    async def fill(folder, named):
        raise OSError(28, "No space left on device")

    says = (
        "step {} in "
        + str(tmp_path)
        + " was not written: No space left on device; that of step 1 is the latest"
    )
    with monkeypatch.context() as patch:
        patch.setattr(write, "_write", fill)
        with pytest.raises(CheckpointError, match=says.format(2)):
            checkpoints.save(2, nodes)
        with checkpoints:
            checkpoints.save(3, nodes)
            with pytest.raises(CheckpointError, match=says.format(3)):
                checkpoints.save(4, nodes)
    assert checkpoints.steps == [1] and checkpoints.restore(build(1)).step == 1
    with checkpoints:
        checkpoints.save(4, nodes)  # there is room again
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "4"]


def test_what_a_failed_write_would_have_replaced_is_there_again(tmp_path, monkeypatch):
    """Whether it fails at once, or later in the background."""
    nodes = build(0)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for number in (10, 20, 30):
            checkpoints.save(number, nodes)

    def full(*_):
        raise OSError(28, "No space left on device")

    async def fill(folder, named):
        full()

    says = "step 20 .* was not written: No space left on device; that of step 30 is the latest$"
    for where, name, failing in (
        (write, "_write", fill),
        (module, "set_aside", full),
        (module, "clear", full),
    ):
        with monkeypatch.context() as patch, checkpoints:
            patch.setattr(where, name, failing)
            with pytest.raises(CheckpointError, match=says):
                checkpoints.save(20, nodes)
                assert checkpoints.steps == [10], "it is being written"
                checkpoints.wait()
        assert checkpoints.steps == [10, 20, 30] and checkpoints.restore(nodes).step == 30
        assert not [*tmp_path.glob("*.replaced*")]
    with checkpoints:
        checkpoints.save(20, nodes)
        checkpoints.wait()
        monkeypatch.setattr(module, "claim", full)
        with pytest.raises(CheckpointError, match="step 25 .* was not written"):
            checkpoints.save(25, nodes)
    assert checkpoints.steps == [10, 20], "nothing was set aside for that"


def test_a_disk_that_takes_no_more(tmp_path):
    nodes = {"w": nnx.List(nnx.Param(jnp.full((64, 1024), i, jnp.float32)) for i in range(4))}
    checkpoints = Checkpoints(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="step 1 .* File too large; there is no other$"):
            checkpoints.save(1, nodes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    checkpoints.save(2, nodes)
    checkpoints.close()
    assert checkpoints.steps == [2]


def test_no_write_goes_on_when_one_has_failed():
    """Each would come back to an event loop that is closed, and print a traceback."""
    done = []

    async def fails():
        raise OSError("full")

    async def takes_a_while():
        await asyncio.sleep(0.01)
        done.append("written")

    with pytest.raises(OSError, match="full"):
        asyncio.run(write._all([fails(), takes_a_while()]))
    assert done == ["written"]


def test_two_that_write_to_one_folder(tmp_path):
    """Of one process they take turns; another process is refused, and nothing is lost."""
    nodes = build(0)
    for number in (1, 2, 3):
        Checkpoints(tmp_path, keep=3).save(number, nodes)  # nobody waits for it
    last = Checkpoints(tmp_path, keep=3)
    last.save(4, nodes)
    last.wait()
    assert last.steps == [2, 3, 4]
    busy = pytest.raises(CheckpointError, match=f"another process is writing a checkpoint in {tmp_path}")
    with FileLock(tmp_path / ".lock"), busy:  # as another process holds it
        last.save(5, nodes)
    assert last.steps == [2, 3, 4]
    with last:
        last.save(5, nodes)
    assert last.steps == [3, 4, 5]


def test_one_that_was_set_aside_is_named(tmp_path):
    save(tmp_path, build(0), 3)
    (tmp_path / "3").rename(tmp_path / "3.replaced")  # as if the new one had not been finished
    with pytest.raises(CheckpointError, match="to restore 3.replaced rename it to 3"):
        Checkpoints(tmp_path).restore(build(0))


def test_a_metric_that_is_infinite_is_not_kept(tmp_path):
    nodes = build(0)
    with Checkpoints(tmp_path, best="loss") as checkpoints:
        for number, loss in enumerate([float("inf"), 2.0, float("inf"), 3.0], start=1):
            checkpoints.save(number, nodes, metrics={"loss": loss})
    assert checkpoints.steps == [2, 4] and checkpoints.best == 2


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
def test_what_a_variable_keeps_is_saved(tmp_path):
    """And not what it shows to those who read it."""

    class Doubled(nnx.Variable):
        def on_get_value(self, value):
            return 2 * value

    node = nnx.List([Doubled(jnp.ones(2))])
    for _ in range(2):
        save(tmp_path, {"node": node})
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.restore({"node": node})
    np.testing.assert_array_equal(node[0].get_raw_value(), np.ones(2))
