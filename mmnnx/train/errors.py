"""Errors of a run that are not bugs; each is reported in one line."""

from __future__ import annotations

import signal


class UserError(Exception):
    """The options of a run cannot be carried out; the message says why, and what to change."""


def above_zero(**options: float) -> None:
    """Raises UserError for an option that is not above zero; each has the name of its field.

    >>> above_zero(batch=16, learning_rate=0)
    Traceback (most recent call last):
    mmnnx.train.errors.UserError: --learning-rate must be above zero, not 0
    """
    for field, value in options.items():
        if not value > 0:
            raise UserError(f"--{field.replace('_', '-')} must be above zero, not {value}")


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
