"""Rows of metrics for those who watch a run: TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from mmnnx.train.config import TrainConfig
from mmnnx.train.errors import UserError

PATIENCE = 60.0  # seconds that Weights & Biases may take at the start and at the end of a run


class Tracker(Protocol):
    def add(self, row: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Events in the run's folder, in tensorboard/; those of steps after `start` are hidden."""

    def __init__(self, config: TrainConfig, folder: Path, start: int):
        from tensorboardX import SummaryWriter

        purge = start + 1 if start else 0  # which row of a step is in no checkpoint
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def add(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, whose id is kept in the run's folder: a resumed run goes on with it.

    Steps that are taken again are sent again, with the same values.
    """

    def __init__(self, config: TrainConfig, folder: Path, start: int):
        import wandb

        file = folder / "wandb_id.txt"
        known = file.read_text() if file.exists() else None
        self._run = wandb.init(
            project=config.wandb,
            id=known,
            resume="allow" if known else None,
            name=folder.name,
            dir=folder,
            config=json.loads(config.to_json()),
            allow_val_change=True,  # more steps, other devices
            settings=wandb.Settings(console="off", init_timeout=PATIENCE, finish_timeout=PATIENCE),
        )
        file.write_text(self._run.id)
        self._run.define_metric("*", step_metric="step")

    def add(self, row: Mapping[str, float]) -> None:
        self._run.log(dict(row))

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


TRACKERS: dict[str, Callable[[TrainConfig, Path, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
"""By the name of the option that asks for it, which is that of the extra that installs what it needs."""


def check_installed(config: TrainConfig) -> None:
    """Raises UserError if a library is missing that the config asks for."""
    option = ""
    try:
        if config.tensorboard:
            option = "tensorboard"
            from tensorboardX import SummaryWriter  # noqa: F401
        if config.wandb:
            option = "wandb"
            from wandb import init  # noqa: F401  # a folder called wandb is a module, too
    except ImportError as error:
        raise UserError(
            f'--{option} needs another package: pip install "mmnnx[{option}]" ({error})'
        ) from error


class Trackers:
    """Those that a config asks for; a context manager.

    One that fails, as without a network, ends no run: it is warned of once, and left out from there on.

    Args:
      folder: of the run; None if another process writes.
      start: the step of the checkpoint that the run goes on from.
      say: shows a warning.
    """

    def __init__(self, config: TrainConfig, folder: Path | None, start: int, say: Callable[[str], None]):
        self._config, self._folder, self._start, self._say = config, folder, start, say
        self._open: dict[str, Tracker] = {}

    def __enter__(self) -> Trackers:
        for name, make in TRACKERS.items():
            if self._folder is not None and getattr(self._config, name):
                with self._warned(name):
                    self._open[name] = make(self._config, self._folder, self._start)
        return self

    def add(self, row: Mapping[str, float]) -> None:
        """A row of metrics.jsonl."""
        for name, tracker in [*self._open.items()]:
            with self._warned(name):
                tracker.add(row)

    def __exit__(self, kind: Any, *_: object) -> None:
        for name, tracker in [*self._open.items()]:
            with self._warned(name):
                tracker.close(failed=kind is not None)

    @contextlib.contextmanager
    def _warned(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any library, in any state of the network
            self._open.pop(name, None)
            why = (str(error).splitlines() or [type(error).__name__])[0]
            self._say(f"--{name} failed, and is left out from here on; metrics.jsonl has all rows: {why}")
