"""Checkpoints in a bucket: what holds on a file system holds there, but for what a bucket has not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from mmnnx.train import TrainConfig, eval_cli
from mmnnx.train.checkpoint import CheckpointError, Checkpoints, DamagedError, write
from mmnnx.train.checkpoint.contents import contents_of
from mmnnx.train.errors import UserError
from mmnnx.train.run_folder import RunFolder, read_run
from tests.train.checkpoint.bucket import serving
from tests.train.checkpoint.test_damage import ROOT, SCRIPT
from tests.train.command import MODEL, ONE_DEVICE, rows, run
from tests.train.states import assert_equal, values


def build(seed):
    model = nnx.Linear(40, 40, rngs=nnx.Rngs(seed))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}


@pytest.fixture(scope="module")
def server():
    """The process keeps the first one that it finds, as gcsfs does."""
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def objects(server):
    server.objects.clear()
    return server.objects


def steps_of(objects):
    return sorted({name.split("/")[1] for name in objects})


@pytest.mark.slow
def test_saves_restores_lists_keeps_the_best(objects):
    url = "gs://bucket/a run, 1 of 50%20"
    with Checkpoints(url, keep=2, best="loss") as checkpoints:
        assert (checkpoints.steps, checkpoints.latest, checkpoints.best) == ([], None, None)
        for step, loss in enumerate([5.0, 2.0, 3.0, 4.0, 6.0], start=1):
            checkpoints.save(step, build(step), data={"at": step}, metrics={"loss": loss})
    assert (checkpoints.steps, checkpoints.latest, checkpoints.best) == ([2, 4, 5], 5, 2)
    assert steps_of(objects) == ["2", "4", "5"], "and nothing is left of the others"
    nodes = build(0)
    restored = Checkpoints(url + "/").restore(nodes)
    assert (restored.step, restored.data, restored.metrics) == (5, {"at": 5}, {"loss": 6.0})
    assert_equal(values(build(5)), values(nodes))
    alone = ocp.PyTreeCheckpointer().restore(checkpoints.folder / "2" / "state")
    np.testing.assert_array_equal(alone["model"]["kernel"], build(2)["model"].kernel[...])
    for place in (url, f"{url}/5"):
        assert (contents_of(place).step, contents_of(place).steps) == (5, [2, 4, 5])


@pytest.mark.slow
def test_what_another_process_has_written_is_seen(objects):
    with Checkpoints("gs://bucket/run") as checkpoints:
        checkpoints.save(1, build(0))
    reader = Checkpoints("gs://bucket/run")
    assert reader.latest == 1
    objects |= {name.replace("run/1/", "run/2/"): value for name, value in objects.items()}
    assert reader.latest == 2


@pytest.mark.slow
def test_one_without_the_marker_is_none(objects):
    """It was not finished, or is half deleted: the next save removes it, and no other folder."""
    with Checkpoints("gs://bucket/run") as checkpoints:
        checkpoints.save(1, build(0))
    whole = dict(objects)
    del objects["run/1/commit_success.txt"]
    objects["run/notes/today"] = (1, b"")
    with pytest.raises(CheckpointError, match="no checkpoint in gs://bucket/run; 1 was not finished"):
        Checkpoints("gs://bucket/run").restore(build(0))
    del whole["run/1/commit_success.txt"]
    objects |= {name.replace("run/1/", "run/3/"): value for name, value in whole.items()}
    with Checkpoints("gs://bucket/run") as checkpoints:
        checkpoints.save(3, build(0))
    assert checkpoints.steps == [3] and steps_of(objects) == ["3", "notes"]


@pytest.mark.slow
def test_damage(objects):
    with Checkpoints("gs://bucket/run", keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, build(0))
    del objects["run/2/placement/placement.json"]
    largest = max((n for n in objects if "run/3/state" in n and "/d/" in n), key=lambda n: len(objects[n][1]))
    generation, content = objects[largest]
    middle = len(content) // 2
    objects[largest] = (generation, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    new = build(1)
    before = values(new)
    with pytest.raises(
        DamagedError, match="run/3/state cannot be read.*The newest good .* of step 1: restore it"
    ):
        Checkpoints("gs://bucket/run").restore(new)
    assert_equal(before, values(new))


@pytest.mark.slow
def test_going_back_keeps_what_came_later_under_another_name(objects):
    with Checkpoints("gs://bucket/run", keep=2) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, build(step))
        assert checkpoints.restore(build(0), step=10).step == 10
        checkpoints.save(15, build(15))
    assert checkpoints.steps == [10, 15] and steps_of(objects) == ["10", "15", "20.replaced"]


@pytest.mark.slow
def test_what_a_failed_write_would_have_replaced_is_named(objects, monkeypatch):
    """It is not renamed back: that is file by file, and the bucket has just failed."""
    with Checkpoints("gs://bucket/run", keep=2) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, build(step))

    async def fail(folder, named):
        raise OSError("the bucket is gone")

    monkeypatch.setattr(write, "_write", fail)
    says = "step 10 is the latest; 20.replaced was set aside: to restore it rename it to 20$"
    with pytest.raises(CheckpointError, match=says):
        Checkpoints("gs://bucket/run").save(15, build(15))
    assert checkpoints.steps == [10]


def test_copied_from_a_file_system_and_back(objects, tmp_path):
    with Checkpoints(tmp_path / "here") as checkpoints:
        checkpoints.save(1, build(1))
    for file in (tmp_path / "here" / "1").rglob("*"):
        if file.is_file():
            objects[f"run/{file.relative_to(tmp_path / 'here')}"] = (1, file.read_bytes())
    for name, (_, content) in objects.items():
        copy = tmp_path / "back" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    for folder in ("gs://bucket/run", tmp_path / "back" / "run"):
        nodes = build(0)
        assert Checkpoints(folder).restore(nodes).step == 1
        assert_equal(values(build(1)), values(nodes))


def test_no_such_bucket(server):
    checkpoints = Checkpoints("gs://other/run")
    with pytest.raises(CheckpointError, match="step 1 in gs://other/run was not written: .*no other"):
        checkpoints.save(1, build(0))
        checkpoints.wait()


def test_no_access(server, tmp_path):
    """It is not taken for a folder without checkpoints, in which a run would begin anew."""
    url = "gs://forbidden/run"
    for call in (lambda: Checkpoints(url).latest, lambda: contents_of(url)):
        with pytest.raises(CheckpointError, match="gs://forbidden/run cannot be listed: no access, 401"):
            call()
    with pytest.raises(UserError, match="config.json is not the config of a run .* .no access, 401"):
        read_run(url)


@pytest.mark.slow
def test_killed_at_any_moment_of_writing(objects):
    """The latest checkpoint is whole, at most the one being written is lost, and no rubbish piles up."""
    rng, next_step = np.random.default_rng(0), 1
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(2):
        command = [sys.executable, "-c", SCRIPT, "gs://bucket/run", str(next_step)]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() and child.stdout.readline()  # the first is written by now
            time.sleep(rng.uniform(0, 0.3))
        finally:
            child.send_signal(signal.SIGKILL)
            rest = child.communicate()[0].split()
        told = int(rest[-1]) if rest else next_step + 1
        checkpoints = Checkpoints("gs://bucket/run")
        latest = checkpoints.latest
        assert latest in (told - 1, told, told + 1)
        node = nnx.List(nnx.Param(jnp.zeros((256, 257))) for _ in range(24))
        assert checkpoints.restore({"x": node}).step == latest
        assert all((np.asarray(p[...]) == latest * 100 + i).all() for i, p in enumerate(node))
        next_step = latest + 1
    with Checkpoints("gs://bucket/run") as checkpoints:
        checkpoints.save(next_step, {"x": nnx.List([nnx.Param(jnp.ones(3))])})
    assert steps_of(objects) == [str(next_step)]


@pytest.mark.slow
def test_a_run_goes_on_from_the_bucket_alone(objects, tmp_path, capsys):
    """As on another machine; what another run has there is refused, before anything runs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    text = tmp_path / "text"
    text.write_text("a bucket of text. " * 200)
    options = [*MODEL, *ONE_DEVICE, "--data", text, "--eval-every", "2"]
    bucket = ["--checkpoints", "gs://bucket/lm"]
    status, _, errors = run(environment, *options, "--steps", "2", "--out", tmp_path / "one", *bucket)
    assert status == 0, errors
    assert not (tmp_path / "one" / "checkpoints").exists()
    assert steps_of(objects) == ["2", "config.json"]
    with pytest.raises(UserError, match="gs://bucket/lm is not empty; go on with that run by --resume"):
        RunFolder.create(TrainConfig(out=tmp_path / "two", checkpoints="gs://bucket/lm"))
    status, _, errors = run(environment, "--resume", "--steps", "4", "--out", tmp_path / "two", *bucket)
    assert status == 0, errors
    assert [row["step"] for row in rows(tmp_path / "two") if "loss" in row] == [3, 4]
    assert steps_of(objects) == ["2", "4", "config.json"]
    printed = []
    for model in ("gs://bucket/lm", str(tmp_path / "one")):
        assert eval_cli.run([model, "--data", str(text), "--sequence", "16"], print) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "bits per byte" in printed[0]
