"""Errors of a run that are not bugs; each is reported in one line."""

from __future__ import annotations

import signal


class UserError(Exception):
    """The options of a run cannot be carried out; the message says why, and what to change."""


class ReportedElsewhere(UserError):
    """A UserError that another process of the run reports."""


class Diverged(Exception):
    """A loss is not a finite number. ``saved`` is the step of the last good checkpoint."""

    def __init__(self, step: int, what: str, value: float):
        super().__init__(f"{what} is {value} at step {step}")
        self.step = step
        self.saved: int | None = None


class Interrupted(Exception):
    """The run was stopped by a signal, Ctrl-C if it is SIGINT; it was saved after ``step`` steps."""

    def __init__(self, step: int, number: signal.Signals):
        super().__init__(f"stopped after step {step}")
        self.step = step
        self.signal = number
