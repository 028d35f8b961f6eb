"""The command line, as a user meets it: exit status, and one line for each mistake.

Most of it runs in this process, where it takes milliseconds; `main` is all there is to the command.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from mmnnx.cli import main
from mmnnx.train.config import DEVICES
from tests.train.command import MODEL, ONE_DEVICE, losses, rows, started, wait_until
from tests.train.kill import compare

TINY = [*MODEL, *ONE_DEVICE, "--eval-every", "1000"]


def test_help_explains_every_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as error:
        main(["train", "--help"])
    assert error.value.code == 0
    out = capsys.readouterr().out
    shape = ["stages", "tensor", "microbatches", "schedule", "layers", "width", "heads", "kv-heads", "mlp"]
    for option in [*shape, "processes", "cluster", "data", "steps", "precision", "seed", "out", "resume"]:
        assert f"--{option}" in out
    assert out.count("(default:") >= out.count("\n│ --")


def test_mistakes_are_told_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("image.png").write_bytes(b"\x89PNG\0\0")
    Path("short.txt").write_text("in brief " * 10)
    Path("runs/lm").mkdir(parents=True)
    Path("runs/lm/config.json").write_text("{}")
    for options, says in {
        "--data nowhere": "--data nowhere: there is no such file or folder",
        "--data empty.txt": "the file is empty",
        "--data image.png": "this is not UTF-8 text",
        "--data short.txt": "less than one batch",
        "--batch 12": "--batch 12 must be a multiple of --microbatches 8",
        "--stages 9": "--stages 9 is more than there are blocks",
        "--processes 3": f"3 processes cannot share 8 devices ({DEVICES})",
        "--processes 2 --cluster": "--cluster joins processes that were started elsewhere",
        "--data short.txt --batch 1 --microbatches 1 --sequence 1 --stages 1 --tensor 1": "runs/lm exists",
        f"--warmup {10**20}": "--warmup must be below 2**31",
        "--name ../up": "--name '../up': it is a folder in runs; --out is for others",
        "--name=": "--name '': it is a folder in runs",
        "--resume --name other": "runs/other is not the folder of a run",
        "--resume": "not the config of a run that can be resumed",
    }.items():
        assert main(["train", *options.split()]) == 2
        errors = capsys.readouterr().err
        assert says in errors
        assert errors.startswith("mmnnx: ") and errors.count("\n") == 1


@pytest.mark.parametrize("options", ["--steps many", "--colour red", "--schedule 2f2b"])
def test_options_that_make_no_sense(options, capsys):
    with pytest.raises(SystemExit) as error:
        main(["train", *options.split()])
    assert error.value.code == 2
    assert options.split()[0] in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_diverges(tmp_path, text, capsys):
    # A warm-up of many steps to an absurd rate: fine at first, then not.
    options = [*TINY, "--data", text, "--steps", "60", "--eval-every", "1", "--out", tmp_path / "run"]
    options += ["--warmup", "40", "--learning-rate", "1e38", "--clip", "1e38"]
    assert main(["train", *map(str, options)]) == 3
    errors = capsys.readouterr().err
    assert errors.startswith("mmnnx: the ") and " at step " in errors and errors.count("\n") == 1


@pytest.mark.slow
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, text, environment):
    """Ctrl-C, then SIGTERM to the run that goes on."""
    options, out = [*TINY, "--data", text, "--steps", "300"], tmp_path / "the run"
    for number, status in {signal.SIGINT: 130, signal.SIGTERM: 143}.items():
        resume = ["--resume"] if out.exists() else []
        with started(environment, *options, "--out", out, *resume) as process:
            process.stdout.readline()  # from here on the rows are those of this process
            before = len(losses(out))
            wait_until(lambda before=before: len(losses(out)) >= before + 3, process)
            process.send_signal(number)
            _, errors = process.communicate(timeout=120)
        assert process.returncode == status
        taken = len(losses(out))
        assert before + 3 <= taken < 300 and rows(out)[-1].keys() == {"step", "val_loss", "val_bits_per_byte"}
        assert errors == f"mmnnx: stopped after step {taken}; to go on: mmnnx train --resume --out '{out}'\n"


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_kills_then_resume(times, tmp_path, text, environment):
    """Kill -9 at random moments; `python -m tests.train.kill --times 20` does it more often."""
    assert len(compare(environment, tmp_path, text, times, seed=0)) == times


@pytest.mark.slow
def test_the_pipeline_learns_as_one_device_does(tmp_path, text, capsys):
    """Two stages of two devices, and one device: the same job, step by step."""
    options = ["train", *MODEL, "--data", str(text), "--layers", "2", "--batch", "8", "--microbatches", "4"]
    for stages, tensor in ((1, 1), (2, 2)):
        out = tmp_path / f"{stages}x{tensor}"
        devices = ["--stages", str(stages), "--tensor", str(tensor), "--out", str(out)]
        assert main([*options, "--steps", "20", *devices]) == 0
        assert f"{stages} x {tensor} cpu devices" in capsys.readouterr().out
    one, pipeline = losses(tmp_path / "1x1"), losses(tmp_path / "2x2")
    assert len(one) == 20 and one[20] < one[1] - 0.5
    assert pipeline == pytest.approx(one, abs=1e-3)
