"""TensorBoard and Weights & Biases get the rows of metrics.jsonl, and can end no run."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from mmnnx.train import trackers, train
from mmnnx.train.errors import UserError
from mmnnx.train.metrics import Meter


@pytest.fixture
def stopped_and_resumed(config, monkeypatch):
    """A run with these options that is killed at step 5, and resumed from its checkpoint of step 3."""

    def run(**options):
        usual = Meter.step

        def step(self, number, values):
            usual(self, number, values)
            if number == 5:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Meter, "step", step)
            train(config(**options))
        return train(config(**options, resume=True))

    return run


@pytest.mark.slow
def test_tensorboard_shows_each_step_once(stopped_and_resumed, whole):
    """Also those after the checkpoint, which the resumed run takes again."""
    folder = stopped_and_resumed(tensorboard=True)
    of_each = lambda run: [(row["step"], row.get("loss"), row.get("val_loss")) for row in run.rows()]
    assert of_each(folder) == of_each(whole)
    found = EventAccumulator(str(folder.path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    rows = folder.rows()
    names = {name for row in rows for name in row} - {"step"}
    assert {*found.Tags()["scalars"]} == names and {"loss", "val_loss", "grad_norm"} <= names
    for name in names:
        shown = [(event.step, pytest.approx(event.value)) for event in found.Scalars(name)]
        assert [(row["step"], row[name]) for row in rows if name in row] == shown


def history(file: Path) -> Iterator[Record]:
    """The records of an offline run: a header of 7 bytes, then for each a checksum, its size and its kind."""
    content, at = file.read_bytes(), 7
    while at < len(content):
        _, size, kind = struct.unpack_from("<IHB", content, at)
        assert kind == 1  # a whole one, as all are in a file below 32 KB
        yield Record.FromString(content[at + 7 : at + 7 + size])
        at += 7 + size


@pytest.mark.slow
def test_wandb_goes_on_with_the_run(stopped_and_resumed, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = stopped_and_resumed(wandb="pipelines")
    records = [[*history(file)] for file in sorted(folder.path.glob("wandb/offline-run-*/*.wandb"))]
    runs = [r.run for part in records for r in part if r.HasField("run")]
    assert [run.project for run in runs] == ["pipelines"] * 2
    assert {run.run_id for run in runs} == {(folder.path / "wandb_id.txt").read_text()}
    assert [r.exit.exit_code for part in records for r in part if r.HasField("exit")] == [1, 0]
    before, after = (
        [
            {
                item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                for item in r.history.item
            }
            for r in part
            if r.HasField("history")
        ]
        for part in records
    )
    rows = folder.rows()
    sent = lambda found: [{name: row[name] for name in row if not name.startswith("_")} for row in found]
    assert sent(after) == [row for row in rows if row["step"] > 3]
    assert [row["loss"] for row in before if "loss" in row] == [row["loss"] for row in rows if "loss" in row][
        :4
    ]


@pytest.mark.parametrize("option, module", [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_what_is_missing_is_said_before_anything_runs(option, module, config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf'--{option} needs .*: pip install "mmnnx\[{option}\]"'):
        train(config(**{option: "project"}))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["__init__", "add", "close"])
def test_one_that_fails_is_warned_of_once(where, config, monkeypatch, capsys):
    def fail(self, *args, **kwargs):
        raise ConnectionError("no route to host")

    class Tracker:
        def __init__(self, config, folder, start): ...
        def add(self, row): ...
        def close(self, failed): ...

    monkeypatch.setattr(Tracker, where, fail)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Tracker)
    folder = train(config(wandb="project", steps=3))
    assert len(folder.rows()) == 5
    warned = [line for line in capsys.readouterr().out.splitlines() if "--wandb failed" in line]
    assert len(warned) == 1 and warned[0].endswith("metrics.jsonl has all rows: no route to host")
