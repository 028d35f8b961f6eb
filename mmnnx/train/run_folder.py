"""The folder of a run on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

from etils import epath
from filelock import FileLock

from mmnnx.train.checkpoint.lock import NAME as LOCK
from mmnnx.train.checkpoint.lock import claim
from mmnnx.train.checkpoint.paths import folder_at, in_bucket
from mmnnx.train.checkpoint.step_folders import listed, steps_in
from mmnnx.train.config import TrainConfig
from mmnnx.train.errors import UserError


class RunFolder:
    """A folder with config.json, metrics.jsonl, the checkpoints and the pictures of one run.

    metrics.jsonl has a row for each step, with ``step``, ``loss`` in nats per token, ``grad_norm``,
    ``learning_rate``, ``seconds`` and speeds, and one for each validation, with ``step``, ``val_loss``,
    ``val_bits_per_byte`` and, after a step, the memory of each mesh; docs/runs.md has all fields. Only one
    process of a run writes it.

    The checkpoints may be in a bucket instead, by a gs:// URL, with another config.json.
    """

    def __init__(self, path: Path, checkpoints: str | None = None):
        self.path = path
        self.bucket = None if checkpoints is None else folder_at(checkpoints)
        self.checkpoints = self.bucket or epath.Path(path / "checkpoints")
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, config: TrainConfig) -> RunFolder:
        """A new folder with its config. Raises UserError if it, or that in the bucket, is not empty or cannot
        be written."""
        path = config.folder()
        with _written(path, "; choose another --out"):
            # A .new file is left of a process that was killed while it wrote its first file.
            names = {p.name for p in path.iterdir() if p.suffix != ".new"} if path.is_dir() else set()
            if names - {LOCK} or (path.exists() and not path.is_dir()):
                raise UserError(
                    f"{path} exists; go on with that run by --resume, or choose another --name or --out"
                )
            path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, config.checkpoints)
        if folder.bucket is not None and listed(folder.bucket):
            raise UserError(
                f"{folder.bucket} is not empty; go on with that run by --resume, or choose another "
                "--checkpoints"
            )
        folder.begin(config, 0)
        return folder

    @property
    def saved(self) -> int | None:
        """The step of the latest checkpoint, found without starting JAX; None without checkpoints."""
        return max(steps_in(self.checkpoints), default=None)

    def claim(self) -> FileLock:
        """Locks the run until the lock is released or this process ends.

        Raises UserError if another process holds the lock, or the folder cannot be written.
        """
        with self.written():
            self.path.mkdir(parents=True, exist_ok=True)  # on another machine there is only the bucket
            lock = claim(self.path)
        if lock is None:
            raise UserError(f"the run in {self.path} is going on in another process")
        return lock

    def begin(self, config: TrainConfig, start: int) -> None:
        """Write config.json, and drop the metrics of steps after ``start``, which are in no checkpoint.

        Raises UserError if they cannot be written.
        """
        kept = [row for row in self.rows() if start and row["step"] <= start]
        if self.bucket is not None:
            try:
                (self.bucket / "config.json").write_text(config.to_json())
            except Exception as error:  # gcsfs has many types
                why = "no such bucket" if isinstance(error, FileNotFoundError) else error
                raise UserError(f"--checkpoints {self.bucket} cannot be written ({why})") from error
        elif self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise UserError(f"{self.checkpoints} is a file, where a folder is to be: move it away")
        with _written(self.path, "; choose another --out"):
            _write(self.path / "config.json", config.to_json())
            _write(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, **row: float) -> None:
        """Append a row to metrics.jsonl. Raises UserError if it cannot be written."""
        with self.written(), self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def written(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an OSError, as on a full disk, is a UserError."""
        return _written(self.path)

    def rows(self) -> list[dict[str, float]]:
        """The rows of metrics.jsonl without those that are incomplete or damaged."""
        if not self.metrics.exists():
            return []
        found = []
        for line in self.metrics.read_text(errors="replace").split("\n")[:-1]:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [row for row in found if isinstance(row, dict) and "step" in row]


def read_run(place: str | Path) -> tuple[epath.Path, TrainConfig]:
    """The checkpoints and the config of an earlier run.

    Args:
      place: its folder, or the gs:// URL of its checkpoints.

    Raises:
      UserError, CheckpointError: if it is not one, or in a place where there are no checkpoints.
    """
    folder = folder_at(place)
    file = folder / "config.json"
    try:
        config = TrainConfig.from_json(file.read_text())
    except FileNotFoundError:
        lacks = "it has no config.json" if folder.exists() else "there is no such folder"
        raise UserError(f"{place} is not the folder of a run: {lacks}; check its name") from None
    except Exception as error:  # gcsfs has many types
        raise UserError(f"{file} is not the config of a run that can be resumed ({error})") from error
    if in_bucket(folder):
        return folder, dataclasses.replace(config, checkpoints=str(folder))
    return RunFolder(Path(place), config.checkpoints).checkpoints, config


@contextlib.contextmanager
def _written(path: Path, advice: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}){advice}") from error


def _write(path: Path, text: str) -> None:
    """Writes a file atomically: a process killed at any moment leaves the old content or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)
