"""The options of a command, and what it says of mistakes in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro

from mmnnx.exit_status import MISTAKE
from mmnnx.output import is_output_error

Config = TypeVar("Config")


def optional(metavar: str, default: str) -> Any:
    """How the help shows an option that may be left out: `default` says what holds then."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def parse(config: type[Config], command: str, options: Sequence[str]) -> Config:
    """The options of ``mmnnx COMMAND``. Raises SystemExit for what cannot be parsed."""
    return tyro.cli(config, args=options, prog=f"mmnnx {command}", config=(tyro.conf.FlagCreatePairsOff,))


def reported(
    action: Callable[[], int], print_error: Callable[[str], None], *mistakes: type[Exception]
) -> int:
    """Runs a command. Says in one line which of these mistakes it raises, or which file is not as it must be.

    Returns the exit status: that of `action`, or 2.
    """
    try:
        return action()
    except OSError as error:
        if is_output_error(error):
            raise
        print_error(
            f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        )
    except mistakes as error:
        print_error(str(error))
    return MISTAKE
