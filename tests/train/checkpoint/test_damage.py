"""Damaged checkpoints: restored to the last bit or refused, with the file and the newest good one named."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from mmnnx.train.checkpoint import CheckpointError, Checkpoints, DamagedError
from tests.slow import all_but
from tests.train.states import assert_equal, values

ROOT = Path(__file__).parents[3]


def build(seed):
    model = nnx.Linear(40, 40, rngs=nnx.Rngs(seed))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}


@pytest.fixture
def folder(tmp_path):
    """Steps 1 and 2 of the same state."""
    with Checkpoints(tmp_path / "run", keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, build(0), data={"at": step}, config={"width": 40}, metrics={"loss": 3.25})
    return tmp_path / "run"


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file):
    file.write_bytes(b"")


def flip(at):
    def flip_at(file):
        content = bytearray(file.read_bytes())
        if content:
            content[int(at * (len(content) - 1))] ^= 1 << 4
        file.write_bytes(content)

    return flip_at


DAMAGES = {"deleted": Path.unlink, "truncated": truncate, "emptied": empty} | {
    f"a bit flipped at {at:.0%}": flip(at) for at in (0, 0.1, 0.33, 0.5, 0.77, 1)
}
# What orbax writes for itself: the state does not depend on it.
UNREAD = ("_METADATA", "commit_success.txt", "ocdbt.process_0/manifest.ocdbt")


@pytest.mark.slow
def test_every_file_damaged_in_every_way(folder):
    """The state and all that came with it are what was saved, or nothing of it is taken."""
    expected, new = values(build(0)), build(1)
    before = values(new)
    files = sorted(path for path in (folder / "2").rglob("*") if path.is_file())
    assert len(files) > 10
    refused, at = set(), {"step": 2}
    for file in files:
        content = file.read_bytes()
        name = file.relative_to(folder / "2").as_posix()
        for kind, damage in DAMAGES.items():
            damage(file)
            try:
                restored = Checkpoints(folder).restore(new)
            except DamagedError as error:
                refused.add((name, kind))
                assert f"{folder / '2'}" in str(error), (name, kind, error)
                assert "step=1" in str(error) and f"move {folder / '2'} out of the way" in str(error)
                assert_equal(before, values(new))
            else:
                assert_equal(expected, values(new))
                assert (restored.data, restored.config, restored.metrics) == (
                    {"at": 2},
                    {"width": 40},
                    {"loss": 3.25},
                ), (name, kind)
                Checkpoints(folder).restore(new, **at)
                new = build(1)
            file.write_bytes(content)
            assert Checkpoints(folder).steps == [1, 2]
    gone = {"deleted", "emptied", "truncated"}
    for name in (file.relative_to(folder / "2").as_posix() for file in files):
        if not name.endswith(UNREAD) and "process_0/d/" not in name:
            assert {kind for n, kind in refused if n == name} >= gone, name
    # Of the files with the arrays, some are whole copies of an index that is no longer used.
    kinds = {kind for name, kind in refused if "process_0/d/" in name}
    assert kinds > gone and any("flipped" in kind for kind in kinds)


def test_what_the_message_says_can_be_done(folder):
    shutil.rmtree(folder / "2" / "state" / "d")
    with pytest.raises(DamagedError, match=r"\.\w+ in .*/2/state cannot be read.*of step 1: restore it"):
        Checkpoints(folder).restore(build(1))
    assert Checkpoints(folder).restore(build(1), step=1).step == 1
    (folder / "2").rename(folder / "damaged")
    assert Checkpoints(folder).restore(build(1)).step == 1


def test_the_good_one_that_is_named_is_good(folder):
    """Step 1 has lost the second half of a file of arrays; nothing but reading its end shows it."""
    (folder / "2" / "placement" / "placement.json").unlink()
    largest = max((folder / "1" / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[: len(content) // 2])
    with pytest.raises(DamagedError, match="placement.json is missing.*no other good checkpoint"):
        Checkpoints(folder).restore(build(1))
    largest.write_bytes(content)
    with pytest.raises(DamagedError, match="The newest good checkpoint .* is that of step 1"):
        Checkpoints(folder).restore(build(1))


def test_foreign_and_empty_and_half_written(tmp_path):
    """Each is refused with what is wrong with it, and is left as it is."""
    (tmp_path / "empty" / "7").mkdir(parents=True)
    with pytest.raises(DamagedError, match="7/_CHECKPOINT_METADATA is missing"):
        Checkpoints(tmp_path / "empty").restore(build(0))
    with ocp.CheckpointManager(tmp_path / "foreign") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": np.ones(3)}))
    with pytest.raises(CheckpointError, match="3/_CHECKPOINT_METADATA is not that of a checkpoint by mmnnx"):
        Checkpoints(tmp_path / "foreign").restore(build(0))
    with Checkpoints(tmp_path / "half") as checkpoints:
        checkpoints.save(5, build(0))
    (tmp_path / "half" / "5").rename(tmp_path / "half" / "5.orbax-checkpoint-tmp")
    half = Checkpoints(tmp_path / "half")
    assert half.latest is None
    with pytest.raises(CheckpointError, match="no checkpoint in .*half; 5.orbax-.*-tmp was not finished"):
        half.restore(build(0))
    assert (tmp_path / "half" / "5.orbax-checkpoint-tmp" / "state").is_dir()
    (tmp_path / "file").write_text("")
    assert Checkpoints(tmp_path / "file").latest is None
    with pytest.raises(CheckpointError, match="step 1 in .* was not written: Not a directory"):
        Checkpoints(tmp_path / "file" / "below").save(1, build(0))


def test_unreadable_metrics_delete_nothing(folder):
    """There is no telling that it was not the best."""
    file = folder / "1" / "metrics" / "metrics.json"
    file.write_text(file.read_text().replace("3", "4"))
    with Checkpoints(folder, best="loss") as checkpoints:
        checkpoints.save(3, build(0), metrics={"loss": 1.0})
    assert checkpoints.steps == [1, 3] and checkpoints.best == 3


SCRIPT = """
import sys, numpy as np, jax.numpy as jnp
from flax import nnx
from mmnnx.train.checkpoint import Checkpoints
node = nnx.List(nnx.Param(jnp.zeros((256, 257))) for _ in range(24))
checkpoints = Checkpoints(sys.argv[1])
for step in range(int(sys.argv[2]), 10**6):
    for i, p in enumerate(node):
        p.set_value(jnp.full((256, 257), step * 100 + i, jnp.float32))
    checkpoints.save(step, {"x": node})
    print(step, flush=True)
"""


@pytest.mark.parametrize("times", all_but([1], [1, 6]))
def test_killed_at_any_moment_of_writing(times, tmp_path):
    """The latest checkpoint is whole, at most the one being written is lost, and no rubbish piles up."""
    rng, next_step, told = np.random.default_rng(0), 1, 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(times):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(next_step)]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None and child.stdout.readline()  # the first is being written
            time.sleep(rng.uniform(0.05, 0.6))
        finally:
            child.send_signal(signal.SIGKILL)
            rest = child.communicate()[0].split()
        told = int(rest[-1]) if rest else next_step
        checkpoints = Checkpoints(tmp_path / "run")
        latest = checkpoints.latest
        assert latest in (told - 1, told, told + 1) or (latest is None and told == 1)
        if latest is not None:
            node = nnx.List(nnx.Param(jnp.zeros((256, 257))) for _ in range(24))
            assert checkpoints.restore({"x": node}).step == latest
            assert all((np.asarray(p[...]) == latest * 100 + i).all() for i, p in enumerate(node))
            next_step = latest + 1
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(next_step, {"x": nnx.List([nnx.Param(jnp.ones(3))])})
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", str(next_step)}


def test_checksums_are_of_content(folder):
    """A file that was reformatted, and says the same, is as good."""
    file = folder / "2" / "config" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=2))
    assert Checkpoints(folder).restore(build(1)).config == {"width": 40}
