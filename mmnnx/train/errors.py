"""What can go wrong in a run and is not a bug: each is told in one line."""

from __future__ import annotations

import signal


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what, and what to change."""


class ToldElsewhere(UserError):
    """A UserError that another process of the run tells the user."""


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
