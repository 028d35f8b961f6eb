"""The command ``mmnnx train``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tyro

from mmnnx.train.config import TrainConfig
from mmnnx.train.errors import Diverged, Interrupted, UserError
from mmnnx.train.folder import RunFolder
from mmnnx.train.loop import train


def run(options: Sequence[str], tell: Callable[[str], None]) -> int:
    """Run ``mmnnx train`` with these options; `tell` is given what went wrong.

    Returns the exit status: 0; 1 if training diverged; 2 for a mistake in what was asked; 130 after Ctrl-C.
    """
    try:
        config = parse(options)
    except UserError as error:
        tell(str(error))
        return 2
    folder = config.folder()
    try:
        train(config)
    except UserError as error:
        tell(str(error))
        return 2
    except Diverged as error:
        saved = (
            "there was no checkpoint yet"
            if error.saved is None
            else f"the checkpoint of step {error.saved} is kept"
        )
        tell(f"{error}; stopped, {saved} in {folder}. A lower --learning-rate or --clip may help")
        return 1
    except Interrupted as error:
        tell(f"{error}; to go on: mmnnx train --resume --out {folder}")
        return 130
    except KeyboardInterrupt:
        tell("stopped at once; what was not in a checkpoint is lost")
        return 130
    return 0


def parse(options: Sequence[str]) -> TrainConfig:
    """The config that command-line ``options`` describe; in a run resumed, what they leave out is as it was.

    Raises UserError for a run that cannot be resumed so, SystemExit for options that make no sense.
    """
    config = tyro.cli(TrainConfig, args=options, prog="mmnnx train")
    if not config.resume:
        return config
    _, saved = RunFolder.open(config.folder())
    resumed = tyro.cli(TrainConfig, args=options, default=saved, prog="mmnnx train")
    resumed.check_resumes(saved)
    return resumed
