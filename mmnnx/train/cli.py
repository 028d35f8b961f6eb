"""The command ``mmnnx train``."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from mmnnx.exit_status import DIVERGED, MISTAKE
from mmnnx.options import parse_options
from mmnnx.train.checkpoint import CheckpointError
from mmnnx.train.config import TrainConfig
from mmnnx.train.errors import Diverged, Interrupted, ReportedElsewhere, UserError
from mmnnx.train.local_processes import follow_launcher, supervise
from mmnnx.train.lockstep import VARIABLES, is_first, join
from mmnnx.train.loop import train
from mmnnx.train.run_folder import read_run


def run(options: Sequence[str], print_error: Callable[[str], None]) -> int:
    """Run ``mmnnx train`` with these options; errors are passed to `print_error`.

    Returns the exit status: 0; 1 if a process of several failed; 2 for a mistake in the options; 3 if
    training diverged; 130 after Ctrl-C; 143 after SIGTERM.
    """
    follow_launcher()
    started = any(name in os.environ for name in VARIABLES)
    try:
        config = parse(options)
        if config.processes > 1 and not started:
            config.validate()
            return supervise(options, config, print_error)
        join(config.cluster)
    except (UserError, CheckpointError) as error:
        print_error(str(error))
        return MISTAKE
    return _train(config, print_error)


def _train(config: TrainConfig, print_error: Callable[[str], None]) -> int:
    folder = config.folder()
    print_error_once = print_error if is_first() else lambda text: None  # for what all processes raise
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # errors that orbax logs are printed in a line below
    try:
        train(config)
    except ReportedElsewhere:
        return MISTAKE
    except (UserError, CheckpointError) as error:
        print_error(str(error))
        return MISTAKE
    except Diverged as error:
        saved = (
            "there was no checkpoint yet"
            if error.saved is None
            else f"the checkpoint of step {error.saved} is kept"
        )
        print_error_once(
            f"{error}; stopped, {saved} in {config.checkpoints or folder}. A lower --learning-rate or --clip "
            "may help"
        )
        return DIVERGED
    except Interrupted as error:
        print_error_once(f"{error}; to go on: mmnnx train --resume --out {shlex.quote(str(folder))}")
        return 128 + error.signal
    except KeyboardInterrupt:
        print_error_once("stopped at once; what was not in a checkpoint is lost")
        return 130
    return 0


def parse(options: Sequence[str]) -> TrainConfig:
    """The config of command-line ``options``, above those of a TOML file; in a resumed run, options that are
    left out are as they were.

    Raises UserError or CheckpointError for a file without options, or a run that cannot be resumed with them,
    SystemExit for options that cannot be parsed.
    """

    def above(default: TrainConfig) -> TrainConfig:
        return parse_options(TrainConfig, "train", options, pairs=True, default=default)

    config = given = above(TrainConfig())
    if given.config is not None:
        config = above(TrainConfig().with_file(given.config))
    if not config.resume:
        return config
    place: str | Path = config.folder()
    if config.checkpoints is not None and not (config.folder() / "config.json").exists():
        place = config.checkpoints  # all there is on another machine
    _, saved = read_run(place)
    # How this process was started is not kept, nor what it was to measure.
    before = dataclasses.replace(saved, cluster=False, config=None, profile=0)
    before = dataclasses.replace(before, name=config.name, out=config.out)  # it may have been moved
    if given.config is not None:
        before = before.with_file(given.config)
    resumed = above(before)
    resumed.check_resumes(saved)
    return resumed
