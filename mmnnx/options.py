"""The options of a command, and what it says of mistakes in them."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tyro

from mmnnx.exit_status import MISTAKE
from mmnnx.output import OPTIONS_OF_ALL, is_output_error
from mmnnx.printable import printable

Config = TypeVar("Config")


def optional(metavar: str, default: str) -> Any:
    """How the help shows an option that may be left out: `default` says what holds then."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def parse_options(
    config: type[Config], command: str, options: Sequence[str], *, pairs: bool = False, **how: Any
) -> Config:
    """The options of ``mmnnx COMMAND``.

    Args:
      pairs: whether flags have an opposite, `--no-name`: those of a run that goes on may be turned off.
      how: for `tyro.cli`.

    Raises:
      SystemExit: for what cannot be parsed, and after the help.
    """
    flags = () if pairs else (tyro.conf.FlagCreatePairsOff,)
    try:
        with _mistakes_as_text(options):
            return tyro.cli(config, args=options, prog=f"mmnnx {command}", config=flags, **how)
    except SystemExit as end:
        if not end.code:  # tyro has printed the help
            print(f"\n{OPTIONS_OF_ALL}")
        raise


@contextlib.contextmanager
def _mistakes_as_text(options: Sequence[str]) -> Iterator[None]:
    """What tyro says of options that a terminal would take for commands, it says without these."""
    if all(map(str.isprintable, options)):
        yield
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    finally:
        sys.stderr.write(printable(said.getvalue(), keep="\n"))


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
