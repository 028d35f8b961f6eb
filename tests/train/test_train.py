"""Runs of a tiny model: what they leave, how they stop, and that a resumed run is the run it goes on with."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
from itertools import product
from pathlib import Path

import jax.numpy as jnp
import matplotlib.image
import pytest

import mmnnx.train.loop
from mmnnx.train import train
from mmnnx.train.checkpoint import Checkpoints
from mmnnx.train.cli import parse
from mmnnx.train.errors import Diverged, Interrupted, UserError
from mmnnx.train.run_folder import RunFolder
from tests.slow import all_but


def losses(folder: RunFolder) -> list[float]:
    return [row["loss"] for row in folder.rows() if "loss" in row]


def validations(folder: RunFolder) -> dict[int, float]:
    return {row["step"]: row["val_bits_per_byte"] for row in folder.rows() if "val_bits_per_byte" in row}


@pytest.fixture
def at_step(monkeypatch):
    """``at_step(n, action)``: step ``n`` of the next run returns ``action(loss)`` for its loss."""

    def install(number, action):
        make = mmnnx.train.loop.make_train_step

        def make_train_step(config):
            step, count = make(config), iter(range(1, 1000))

            class Step:
                program = getattr(step, "program", None)

                def __call__(self, *args):
                    values = step(*args)
                    return values | ({"loss": action(values["loss"])} if next(count) == number else {})

            return Step()

        monkeypatch.setattr(mmnnx.train.loop, "make_train_step", make_train_step)

    return install


def ask(number):
    def send(loss):
        os.kill(os.getpid(), number)
        return loss

    return send


def crash(loss):
    raise RuntimeError("power cut")


def test_a_run_leaves_its_rows_checkpoints_pictures_and_text(whole):
    rows = whole.rows()
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 8))
    assert all(row["tokens_per_second"] > 0 for row in rows if "loss" in row)
    assert list(validations(whole)) == [0, 3, 6, 7]
    assert validations(whole)[0] == pytest.approx(8, abs=0.2)  # bits a byte, before anything is learnt
    assert losses(whole)[0] == pytest.approx(8 * math.log(2), abs=0.2)  # nats a byte
    assert Checkpoints(whole.checkpoints).latest == 7
    assert json.loads((whole.path / "config.json").read_text())["steps"] == 7
    for name in ("loss.png", "timeline.png"):
        pixels = matplotlib.image.imread(whole.path / name)
        assert min(pixels.shape[:2]) > 150
        assert len({tuple(pixel) for pixel in pixels[::3, ::3].reshape(-1, pixels.shape[-1])}) > 3
    assert len((whole.path / "sample.txt").read_bytes()) >= 8  # a prompt of 4 bytes, and 4 more


def test_it_learns(config):
    folder = train(config(steps=40, eval_every=40, learning_rate=2e-2))
    first, last = validations(folder).values()
    assert last < first - 2


@pytest.mark.slow
def test_the_seed_decides_weights_and_order(config, whole):
    other = losses(train(config(seed=1, steps=2)))
    assert all(a != b for a, b in zip(other, losses(whole)))


@pytest.mark.slow
def test_tied_shared_heads_in_half_precision_by_gpipe(config):
    folder = train(config(steps=2, tied=True, kv_heads=1, precision="bfloat16", schedule="gpipe"))
    assert losses(folder) == pytest.approx([8 * math.log(2)] * 2, abs=0.3)


@pytest.mark.parametrize("stages", all_but([], [2, 3]))  # four blocks: two each, or one, two, one
def test_scanned_blocks_are_divided_between_stages(stages, config, tmp_path):
    one = losses(train(config(scan=True, layers=4, stages=1, steps=4, out=tmp_path / "one")))
    folder = train(config(scan=True, layers=4, stages=stages, steps=4))
    assert losses(folder) == pytest.approx(one, abs=1e-4)


LAYOUTS = {
    "data": dict(stages=2, data_parallel=2),
    "fsdp and tensor": dict(stages=2, data_parallel=2, fsdp=True, tensor=2),
    "interleaved": dict(stages=2, virtual_stages=2, schedule="interleaved-1f1b"),
    "interleaved, scanned": dict(stages=2, virtual_stages=2, schedule="looped-bfs", remat=True),
    "v-shaped": dict(stages=2, schedule="zbv", remat=True),
    "context": dict(stages=2, context=2, tensor=2),
    "context, gathered": dict(stages=2, context=2, attention="xla"),
    "flash": dict(stages=2, tensor=2, attention="flash"),
    "context, data and fsdp, scanned": dict(stages=2, context=2, data_parallel=2, fsdp=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_it_runs_does_not_change_the_losses(layout, config, tmp_path):
    sizes = dict(layers=4, steps=3, batch=8, microbatches=4, scan="scanned" in layout)
    one = losses(train(config(**sizes, stages=1, out=tmp_path / "one")))
    assert losses(train(config(**sizes, **LAYOUTS[layout]))) == pytest.approx(one, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, scan", [*product(["muon", "lion", "adafactor"], [True, False])])
def test_other_optimizers_learn(optimizer, scan, config, tmp_path):
    rate = {"lion": 3e-3, "muon": 2e-2, "adafactor": 5e-2}[optimizer]
    options = dict(optimizer=optimizer, scan=scan, learning_rate=rate, layers=2, steps=16, eval_every=16)
    one = validations(train(config(**options, out=tmp_path / "one")))
    assert one[16] < one[0] - 0.25
    assert validations(train(config(**options, stages=2))) == pytest.approx(one, abs=1e-3)


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(virtual_stages=2), "--schedule 1f1b has --virtual-stages 1 alone"),
        (dict(schedule="zbv", virtual_stages=3), "--schedule zbv has --virtual-stages 2 alone"),
        (dict(schedule="zbv", layers=3), "zbv over --stages 2 has 4 stages, more than the 3 blocks"),
    ],
)
def test_schedules_that_do_not_go_with_other_options(options, said, config):
    with pytest.raises(UserError, match=said):
        train(config(**(dict(stages=2, layers=6, batch=8, microbatches=4) | options)))


@pytest.mark.slow
def test_an_automatic_schedule_is_said_and_kept(config, capsys):
    folder = train(config(stages=2, layers=2, schedule="auto", steps=1))
    assert "--schedule auto: zero-bubble-h1, whose simulated step is the shortest" in capsys.readouterr().out
    assert json.loads((folder.path / "config.json").read_text())["schedule"] == "zero-bubble-h1"


def test_a_row_of_each_step(whole):
    row = next(row for row in whole.rows() if row["step"] == 3)
    assert row.keys() == {
        *("step", "loss", "grad_norm", "learning_rate", "seconds"),
        *("tokens_per_second", "tokens_per_second_per_device", "flops_per_second_per_device"),
    }
    assert row["learning_rate"] == pytest.approx(4e-3) and row["grad_norm"] > 0 and row["seconds"] > 0
    width, mlp, vocab = 16, 32, 256
    weights = 4 * width * width + 3 * width * mlp + 2 * width + width + width * vocab
    flops = 6 * weights + 6 * 1 * width * 16  # and the scores of 16 tokens
    assert row["flops_per_second_per_device"] == pytest.approx(row["tokens_per_second"] * flops, rel=1e-3)


@pytest.mark.slow
def test_microbatches_do_not_change_the_losses(config, whole):
    assert losses(train(config(microbatches=1))) == pytest.approx(losses(whole), abs=1e-4)


@pytest.mark.parametrize("number", all_but([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_saves_and_the_resumed_run_is_the_uninterrupted_one(
    number, config, tmp_path, at_step, monkeypatch, whole
):
    at_step(4, ask(number))
    with pytest.raises(Interrupted, match="stopped after step 4") as error:
        train(config())
    assert error.value.signal == number
    monkeypatch.undo()
    stopped = RunFolder(tmp_path / "run")
    assert len(losses(stopped)) == 4
    assert Checkpoints(stopped.checkpoints).latest == 4

    monkeypatch.setattr(mmnnx.train.loop, "create", None)  # nor does it make weights, to restore over them
    resumed = train(config(resume=True, sample=4))
    assert losses(resumed) == losses(whole)
    assert validations(resumed)[7] == validations(whole)[7]
    assert (resumed.path / "sample.txt").read_bytes() == (whole.path / "sample.txt").read_bytes()


@pytest.mark.slow  # make test sees it by TensorBoard
def test_rows_after_the_checkpoint_are_taken_again(config, at_step, monkeypatch, whole):
    at_step(6, crash)
    with pytest.raises(RuntimeError, match="power cut"):
        train(config())
    monkeypatch.undo()
    resumed = train(config(resume=True))
    assert [row["step"] for row in resumed.rows()] == [row["step"] for row in whole.rows()]
    assert losses(resumed) == losses(whole)


@pytest.mark.slow
def test_a_run_stopped_before_its_first_checkpoint_starts_again(config, at_step, monkeypatch):
    at_step(2, crash)
    with pytest.raises(RuntimeError):
        train(config())
    monkeypatch.undo()
    assert [row["step"] for row in train(config(resume=True, steps=3)).rows()] == [0, 1, 2, 3, 3]


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps_of_the_same_text(config, tmp_path, capsys):
    book = tmp_path / "book.txt"
    book.write_text("a pipeline of stages " * 100)
    train(config(data=book, steps=1))
    capsys.readouterr()
    folder = train(config(data=book, steps=2, resume=True))
    assert (
        "--steps 2 instead of 1: the learning rate falls over all of them, and is" in capsys.readouterr().out
    )
    assert len(losses(folder)) == 2
    assert json.loads((folder.path / "config.json").read_text())["steps"] == 2
    with pytest.raises(UserError, match="has taken 2 steps; to go on give more --steps"):
        train(config(data=book, steps=2, resume=True))
    book.write_text("a pipeline of devices" * 100)
    with pytest.raises(UserError, match="has changed since"):
        train(config(data=book, steps=3, resume=True))


@pytest.mark.slow
def test_a_run_whose_text_has_moved_goes_on_with_checkpoints_that_were_kept(config, tmp_path):
    book, moved = tmp_path / "book.txt", tmp_path / "moved.txt"
    book.write_text("a pipeline of stages " * 100)
    folder = train(config(data=book, steps=4, eval_every=1, keep=3))
    assert set(Checkpoints(folder.checkpoints).steps) >= {2, 3, 4}
    book.rename(moved)
    out = ["--resume", "--out", str(tmp_path / "run"), "--steps", "5"]
    with pytest.raises(UserError, match="there is no such file"):
        train(parse(out))
    assert len(losses(train(parse([*out, "--data", str(moved)])))) == 5
    with pytest.raises(
        UserError, match="started with --data .*moved.txt, and --resume cannot go on without --data"
    ):
        dataclasses.replace(parse(out), data=None).check_resumes(parse(out))


def copied(run: RunFolder, to: Path) -> Path:
    """The folder of a run once more, as if the first had been moved there."""
    return shutil.copytree(run.path, to)


def test_a_file_where_checkpoints_are_to_be(whole, tmp_path):
    """Is seen at the start, not when the first one is written."""
    folder = copied(whole, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").touch()
    with pytest.raises(UserError, match="run/checkpoints is a file, where a folder is to be: move it away"):
        train(parse(["--resume", "--out", str(folder), "--steps", "8"]))


@pytest.mark.slow
def test_a_run_that_was_moved_goes_on_where_it_is(whole, tmp_path):
    """And what a process that was killed there had half written counts for nothing."""
    moved, first = copied(whole, tmp_path / "moved"), whole.rows()
    with (moved / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 7, \x00\n[]\n{"step": 8, "lo')
    (moved / "metrics.jsonl.new").write_text("")
    folder = train(parse(["--resume", "--out", str(moved), "--steps", "8"]))
    assert folder.path == moved
    assert [row["step"] for row in folder.rows()] == [row["step"] for row in first] + [8, 8]
    assert whole.rows() == first and not list(whole.path.glob("checkpoints/8"))


@pytest.mark.slow
def test_stacked_layers_that_are_divided_unevenly_go_on(config):
    options = dict(stages=3, tensor=1, layers=4, scan=True, optimizer="adafactor", eval_every=1)
    train(config(steps=1, **options))
    assert len(losses(train(config(steps=2, resume=True, **options)))) == 2


def test_a_loss_that_is_not_finite_stops_the_run(config, tmp_path, at_step):
    (tmp_path / "run").mkdir()  # an empty folder may be used, or one that a killed process has half made
    (tmp_path / "run" / "config.json.new").write_text('{"name": "l')
    at_step(5, lambda loss: loss * jnp.nan)
    with pytest.raises(Diverged, match="the loss is nan at step 5") as error:
        train(config())
    assert (error.value.step, error.value.saved) == (5, 3)
    folder = RunFolder(tmp_path / "run")
    assert len(losses(folder)) == 4
    assert Checkpoints(folder.checkpoints).latest == 3


@pytest.mark.slow
def test_weights_whose_loss_is_not_finite_are_not_saved(config, tmp_path, monkeypatch):
    bits = iter([8.0, 7.0, math.inf])
    monkeypatch.setattr(mmnnx.train.loop, "make_validate", lambda held_out: lambda model: next(bits))
    with pytest.raises(Diverged, match="validation loss is inf at step 2") as error:
        train(config(eval_every=1))
    assert error.value.saved == 1
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps == [1]


def test_a_run_that_is_going_on_is_left_alone(config, tmp_path, at_step, monkeypatch, whole):
    told = []

    def resume(loss):
        with pytest.raises(UserError, match=f"the run in {tmp_path / 'run'} is going on in another process"):
            train(config(resume=True))
        told.append(loss)
        return loss

    at_step(4, resume)
    assert losses(train(config())) == losses(whole) and len(told) == 1


@pytest.mark.slow
def test_a_run_without_a_checkpoint_says_so(config, tmp_path, at_step, monkeypatch, capsys):
    at_step(2, crash)
    with pytest.raises(RuntimeError):
        train(config())
    monkeypatch.undo()
    (tmp_path / "run" / "checkpoints" / "9.replaced").mkdir(parents=True)
    with pytest.raises(UserError, match="no checkpoint in .*: to restore 9.replaced rename it to 9"):
        train(config(resume=True))
    (tmp_path / "run" / "checkpoints" / "9.replaced").rmdir()
    train(config(resume=True, steps=2))
    assert "no checkpoint to resume: this run begins at its first step" in capsys.readouterr().out


def test_a_folder_with_something_in_it_is_refused_and_left_alone(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("draft")
    with pytest.raises(UserError, match="run exists"):
        train(config())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_bad_input_leaves_nothing_behind(config, tmp_path):
    for options in (dict(batch=3), dict(data=Path("/nowhere")), dict(batch=4000)):
        with pytest.raises(UserError):
            train(config(**options))
    assert not (tmp_path / "run").exists()
