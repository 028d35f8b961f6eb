"""The command ``mmnnx``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro
from rich.console import Console

from mmnnx.train.config import TrainConfig
from mmnnx.train.errors import Diverged, Interrupted, UserError
from mmnnx.train.folder import RunFolder
from mmnnx.train.loop import train

USAGE = """usage: mmnnx train [OPTIONS]

Commands:
  train    train a language model as a pipeline over devices; `mmnnx train --help` lists its options"""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line ``args`` (default: the process's own).

    Returns the exit status: 0; 1 if training diverged; 2 for a mistake in what was asked; 130 after Ctrl-C.
    """
    command, *options = list(sys.argv[1:] if args is None else args) or [""]
    errors = Console(stderr=True, highlight=False)

    def tell(text: str) -> None:
        errors.print(f"mmnnx: {text}", markup=False, soft_wrap=True)

    if command != "train":
        print(USAGE, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
        return 0 if command in ("-h", "--help") else 2
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
