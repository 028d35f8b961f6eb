"""The command line, as a user meets it: processes, their exit status, and one line for each mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY = [
    *("--stages", "1", "--tensor", "1", "--microbatches", "2", "--batch", "4", "--sequence", "16"),
    *("--steps", "6", "--eval-every", "3", "--warmup", "2", "--sample", "4"),
    *("--layers", "1", "--width", "16", "--heads", "2", "--kv-heads", "2", "--mlp", "32"),
]


def start(*options: str | Path, cwd: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "mmnnx", *map(str, options)],
        cwd=cwd,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.getenv("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*options: str | Path, cwd: Path) -> tuple[int, str, str]:
    """Exit status, output and errors of ``mmnnx`` with ``options``."""
    process = start(*options, cwd=cwd)
    out, errors = process.communicate(timeout=300)
    return process.returncode, out, errors


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_help_explains_every_option(tmp_path):
    status, out, _ = run("train", "--help", cwd=tmp_path)
    assert status == 0
    shape = ["stages", "tensor", "microbatches", "schedule", "layers", "width", "heads", "kv-heads", "mlp"]
    for option in [*shape, "data", "steps", "precision", "seed", "out", "resume"]:
        assert f"--{option}" in out
    assert out.count("(default:") >= out.count("\n│ --")


def test_usage(tmp_path):
    status, out, _ = run("--help", cwd=tmp_path)
    assert status == 0 and "mmnnx train" in out
    status, _, errors = run("fly", cwd=tmp_path)
    assert status == 2 and "usage: mmnnx train" in errors


def test_mistakes_are_told_in_one_line(tmp_path, capsys, monkeypatch):
    """In this process, where each takes milliseconds; `main` is all there is to the command."""
    from mmnnx.cli import main

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
        "--data short.txt --batch 1 --microbatches 1 --sequence 1 --stages 1 --tensor 1": "runs/lm exists",
        "--resume --name other": "runs/other is no run to resume",
        "--resume": "not the config of a run that can be resumed",
    }.items():
        assert main(["train", *options.split()]) == 2
        errors = capsys.readouterr().err
        assert says in errors
        assert errors.startswith("mmnnx: ") and errors.count("\n") == 1


@pytest.mark.parametrize("options", ["--steps many", "--colour red", "--schedule 2f2b"])
def test_options_that_make_no_sense(options, capsys):
    from mmnnx.cli import main

    with pytest.raises(SystemExit) as error:
        main(["train", *options.split()])
    assert error.value.code == 2
    assert options.split()[0] in capsys.readouterr().err


def test_a_run_that_diverges(tmp_path, text):
    # A warm-up of many steps to an absurd rate: fine at first, then not.
    options = [
        *TINY,
        "--steps",
        "60",
        "--eval-every",
        "1",
        "--warmup",
        "40",
        "--learning-rate",
        "1e38",
        "--clip",
        "1e38",
    ]
    status, out, errors = run("train", *options, "--data", text, cwd=tmp_path)
    assert status == 1
    assert errors.startswith("mmnnx: the ") and " at step " in errors and errors.count("\n") == 1
    assert "Traceback" not in out + errors


def test_ctrl_c_then_resume(tmp_path, text):
    options = ["train", *TINY, "--data", text, "--steps", "300", "--eval-every", "1000"]
    process = start(*options, "--out", "run", cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 4:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    taken = len(losses(tmp_path / "run"))
    assert 3 <= taken < 300
    assert f"stopped after step {taken}; to go on: mmnnx train --resume --out run" in errors

    status, _, errors = run("train", "--resume", "--out", "run", cwd=tmp_path)
    assert status == 0, errors
    assert run(*options, "--out", "whole", cwd=tmp_path)[0] == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_the_pipeline_learns_as_one_device_does(tmp_path, text):
    """Four stages of two devices, and one device: the same job, step by step."""
    options = [
        "train",
        *TINY,
        "--data",
        text,
        "--layers",
        "4",
        "--batch",
        "8",
        "--microbatches",
        "4",
        "--steps",
        "20",
    ]
    for stages, tensor in ((1, 1), (4, 2)):
        out = tmp_path / f"{stages}x{tensor}"
        status, said, errors = run(
            *options, "--stages", str(stages), "--tensor", str(tensor), "--out", out, cwd=tmp_path
        )
        assert status == 0, errors
        assert f"{stages} x {tensor} cpu devices" in said
    one, pipeline = losses(tmp_path / "1x1"), losses(tmp_path / "4x2")
    assert len(one) == 20 and one[-1] < one[0] - 0.5
    assert pipeline == pytest.approx(one, abs=1e-3)
