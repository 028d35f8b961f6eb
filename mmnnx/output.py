"""What a command says beside its result: the options that all commands of ``mmnnx`` have."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

from mmnnx.printable import printable

Level = Literal["debug", "info", "warning", "error"]
LEVELS = get_args(Level)
OPTIONS_OF_ALL = f"""Options of all commands:
  --quiet            print results and errors, and no progress
  --log-level LEVEL  print messages of mmnnx from this level on: {", ".join(LEVELS)}"""


@dataclass(frozen=True)
class Output:
    """How much a command says.

    Attributes:
      quiet: whether only results and errors are printed, and no progress.
      log_level: the least severe messages of the logger "mmnnx" that are printed; None for what is usual.
    """

    quiet: bool = False
    log_level: str | None = None

    @property
    def arguments(self) -> list[str]:
        """The options for another ``mmnnx`` to say as much."""
        level = [] if self.log_level is None else ["--log-level", self.log_level]
        return [*(["--quiet"] if self.quiet else []), *level]


USUAL = Output()
current: ContextVar[Output] = ContextVar("mmnnx_output", default=USUAL)


def take_options(args: list[str]) -> tuple[Output, list[str]]:
    """(how much to say, the other arguments). What comes after "--" belongs to another command.

    Raises:
      ValueError: for a level that there is not.
    """
    end = args.index("--") if "--" in args else len(args)
    own, left = args[:end], []
    quiet, level = False, None
    while own:
        option = own.pop(0)
        name, equals, value = option.partition("=")
        if option == "--quiet":
            quiet = True
        elif name in ("--log-level", "--log_level"):
            level = value if equals else own.pop(0) if own else ""
            if level not in LEVELS:
                raise ValueError(f"--log-level is one of {', '.join(LEVELS)}, not {level!r}")
        else:
            left.append(option)
    return Output(quiet, level), left + args[end:]


def is_output_error(error: OSError) -> bool:
    """Whether an error says that what is printed cannot be written: nobody reads it, or no space is left."""
    return error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC)


@contextlib.contextmanager
def saying(output: Output) -> Iterator[None]:
    """Has a command say as much, in this context; messages of the logger go to stderr."""
    token = current.set(output)
    logger = logging.getLogger("mmnnx")
    handler, before = logging.StreamHandler(), (logger.level, logger.propagate)
    handler.setFormatter(_Formatter("mmnnx: %(levelname)s: %(message)s"))
    try:
        if output.log_level is not None:
            handler.setLevel(output.log_level.upper())
            logger.setLevel(output.log_level.upper())
            logger.addHandler(handler)
            logger.propagate = False
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        current.reset(token)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")
