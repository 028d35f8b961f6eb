"""``--profile``: a trace of some steps, and the measured timeline below the simulated one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import matplotlib.image
import pytest

from mmnnx.train import train
from mmnnx.train.cli import parse


@pytest.fixture(autouse=True)
def without_pictures() -> None:
    """In place of that of all tests: here a picture is compared with another."""


def traced(folder: Path) -> list[int]:
    """The steps in the trace of a run."""
    (trace,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted(int(e["args"]["step_num"]) for e in events if e.get("name") == "train_step")


@pytest.mark.slow
def test_some_steps_are_traced_and_one_is_measured(config):
    plain = train(config(stages=2, layers=2, steps=5))
    folder = train(config(stages=2, layers=2, steps=5, profile=2, out=plain.path.with_name("profiled")))
    losses = lambda run: [row.get("loss") or row["val_loss"] for row in run.rows()]
    assert losses(folder) == losses(plain)  # what is measured is no step of the run
    profile = folder.path / "profile"
    assert traced(profile) == [3, 4]
    one, both = (matplotlib.image.imread(run.path / "timeline.png").shape for run in (plain, folder))
    assert both[1] == one[1] and both[0] > 1.8 * one[0]  # the same width, one below the other
    table = (profile / "fragments.txt").read_text()
    assert table.startswith("step ") and "stage1 backward" in table and "transfers: " in table


@pytest.mark.slow
def test_one_stage_is_traced_alone_and_a_resumed_run_is_not_asked_again(config, tmp_path):
    train(config(steps=2))
    run = ["--resume", "--out", str(tmp_path / "run")]
    resumed = parse([*run, "--steps", "5", "--profile", "2"])
    folder = train(resumed)
    assert traced(folder.path / "profile") == [4, 5]  # the last two, as few are left
    assert [f.name for f in (folder.path / "profile").iterdir()] == ["plugins"]
    assert (resumed.profile, parse(run).profile) == (2, 0)
