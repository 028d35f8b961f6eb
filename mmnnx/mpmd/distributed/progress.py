"""Where in the run this process is, for messages about it and for those that wait for it."""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """Where in the run a process is.

    Attributes:
      step: the number of the step that it is at.
      describe: puts a step into words.
      call: (program, call), the last that it began to run.
    """

    __slots__ = ("call", "describe", "step")

    def __init__(self) -> None:
        self.step = 0
        self.describe: Callable[[int], str] = lambda _: "the start"
        self.call = (0, 0)

    def __str__(self) -> str:
        return self.describe(self.step)


current = Progress()
"""Where this process is."""


def enter(describe: Callable[[int], str]) -> None:
    """This process comes to another part of the run, whose steps `describe` puts into words."""
    current.step, current.describe = 0, describe
