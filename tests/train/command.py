"""The command ``mmnnx train`` in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL = [
    *("--microbatches", "2", "--batch", "4", "--sequence", "16", "--warmup", "2", "--sample", "0"),
    *("--layers", "2", "--width", "16", "--heads", "2", "--kv-heads", "2", "--mlp", "32"),
]
ONE_DEVICE = ["--stages", "1", "--tensor", "1"]


@contextmanager
def started(environment: dict[str, str], *options: str | Path) -> Iterator[subprocess.Popen[str]]:
    """``mmnnx train`` with these options; it is killed where it is left before it ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mmnnx", "train", *map(str, options)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(environment: dict[str, str], *options: str | Path, timeout: float = 180) -> tuple[int, str, str]:
    """Exit status, output and errors of ``mmnnx train``."""
    with started(environment, *options) as process:
        out, errors = process.communicate(timeout=timeout)
    return process.returncode, out, errors


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str], timeout: float = 120) -> None:
    """Looks again and again; AssertionError with what the process wrote if it ends, or time runs out."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"status {process.returncode}: {process.communicate()}")
        time.sleep(0.001)


def rows(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl that are whole."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step; AssertionError unless each is there once, in order, from the first on."""
    found = [(row["step"], row["loss"]) for row in rows(folder) if "loss" in row]
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    return dict(found)


def validations(folder: Path) -> dict[int, float]:
    """The validation loss after each step that has one."""
    return {row["step"]: row["val_bits_per_byte"] for row in rows(folder) if "val_bits_per_byte" in row}
