"""What a run leaves on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mmnnx.train.checkpoint.folder import steps_in
from mmnnx.train.config import TrainConfig
from mmnnx.train.errors import UserError


class RunFolder:
    """A folder with config.json, metrics.jsonl, the checkpoints and the pictures of one run.

    metrics.jsonl has one row a step: ``{"step", "loss", "tokens_per_second"}``, the loss in nats a byte, and
    one row a validation: ``{"step", "val_bits_per_byte"}``. Of the processes of a run one alone writes here.
    """

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, config: TrainConfig) -> RunFolder:
        """A new folder with its config. Raises UserError if it holds something, or cannot be written."""
        path = config.folder()
        try:
            # What a process killed in the middle of its first file has left is nothing.
            if path.exists() and (not path.is_dir() or any(p.suffix != ".new" for p in path.iterdir())):
                raise UserError(
                    f"{path} exists; go on with that run by --resume, or choose another --name or --out"
                )
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path)
            folder.begin(config, 0)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); choose another --out") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple[RunFolder, TrainConfig]:
        """The folder of an earlier run, and its config. Raises UserError if it is not one."""
        file = path / "config.json"
        try:
            config = TrainConfig.from_json(file.read_text())
        except FileNotFoundError:
            raise UserError(
                f"{path} is no run to resume: it has no config.json; check --name or --out"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is not the config of a run that can be resumed ({error})") from error
        return cls(path), config

    @property
    def saved(self) -> int | None:
        """The step of the latest checkpoint, told without starting JAX; None without any."""
        return max(steps_in(self.checkpoints), default=None)

    def begin(self, config: TrainConfig, start: int) -> None:
        """Write config.json, and forget the rows of steps after ``start``: they were taken but not saved."""
        _write(self.path / "config.json", config.to_json())
        kept = [row for row in self.rows() if start and row["step"] <= start]
        _write(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, **row: float) -> None:
        """Append a row to metrics.jsonl."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, float]]:
        """The rows of metrics.jsonl; one that was cut off in the middle does not count."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text().split("\n")[:-1]]


def _write(path: Path, text: str) -> None:
    """Puts a text in a file; a process killed at any moment leaves the old one whole, or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)
