"""What can go wrong in a run and is not a bug: each is told in one line."""

from __future__ import annotations


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what, and what to change."""


class Diverged(Exception):
    """A loss is not a finite number. ``saved`` is the step of the last good checkpoint."""

    def __init__(self, step: int, what: str, value: float):
        super().__init__(f"{what} is {value} at step {step}")
        self.step = step
        self.saved: int | None = None


class Interrupted(Exception):
    """The user stopped the run; it was saved after ``step`` steps."""

    def __init__(self, step: int):
        super().__init__(f"stopped after step {step}")
        self.step = step
