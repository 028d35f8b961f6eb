"""Kills a run at random moments, resumes it each time, and compares it with one that nobody killed.

`python -m tests.train.kill --times 20` does it twenty times; the tests do it a few times.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from mmnnx.train.run_folder import RunFolder
from tests.train.command import MODEL, ONE_DEVICE, losses, rows, run, started, validations, wait_until

EVERY = 5  # steps from one checkpoint to the next


def compare(environment: dict[str, str], folder: Path, data: Path, times: int, seed: int) -> list[str]:
    """What became of it each time; AssertionError if anything but steps since a checkpoint was lost.

    Every other time it is killed while a checkpoint is being written, else a random while after a step.
    """
    rng, whole, killed = random.Random(seed), folder / "whole", folder / "killed"
    options = [*MODEL, *ONE_DEVICE, "--data", data, "--steps", 25 * times + 25, "--eval-every", EVERY]
    status, _, errors = run(environment, *options, "--out", whole)
    assert status == 0, errors
    found = []
    for number in range(times):
        target, now = (RunFolder(killed).saved or 0) + rng.randrange(1, 20), time.time()
        with started(environment, *options, "--out", killed, *(["--resume"] if number else [])) as process:
            process.stdout.readline()  # from here on the rows are those of this process
            wait_until(lambda target=target: last_step(killed) >= target, process)
            if number % 2:
                wait_until(lambda now=now: is_saving(killed, now), process)
            else:
                time.sleep(rng.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
            process.wait()
        saving, taken, kept = is_saving(killed, now), last_step(killed), RunFolder(killed).saved or 0
        assert taken - 2 * EVERY <= kept <= taken, f"step {taken} was taken, and step {kept} is saved"
        found.append(f"killed after step {taken}{' while saving' if saving else ''}, resumed from {kept}")
    status, _, errors = run(environment, *options, "--out", killed, "--resume")
    assert status == 0, errors
    assert losses(killed) == losses(whole), "every step once, and its loss to the last bit"
    assert validations(killed) == validations(whole)
    return found


def last_step(folder: Path) -> int:
    """The last step that was written down."""
    return int(max((row["step"] for row in rows(folder)), default=0))


def is_saving(folder: Path, since: float) -> bool:
    """Whether a checkpoint has been begun since then, and is not whole."""
    partial = [path for path in (folder / "checkpoints").glob("*") if not path.name.isdecimal()]
    with contextlib.suppress(FileNotFoundError):  # it has become whole just now
        return any(path.stat().st_mtime > since for path in partial)
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="how often it is killed")
    parser.add_argument("--seed", type=int, default=0, help="decides when")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        kept = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": f"{scratch}/compiled",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        text = Path(scratch, "text.txt")
        text.write_text("a pipeline of stages and of devices in turn\n" * 200)
        for line in compare(os.environ | kept, Path(scratch), text, asked.times, asked.seed):
            print(line)
    print("every restart went on, and the losses are those of a run that nobody killed")
