"""What a schedule is, and the names under which schedules are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One step of a stage: the forward or the backward of one microbatch."""

    phase: Literal["forward", "backward"]
    microbatch: int


# (stage, number of stages, number of microbatches) -> what that stage runs, in order.
Schedule = Callable[[int, int, int], Sequence[Action]]

_schedules: dict[str, Schedule] = {}


def register_schedule(name: str) -> Callable[[Schedule], Schedule]:
    """Makes a schedule available as `mm.microbatch(..., schedule=name)`.

    Example:
      >>> @register_schedule("forwards-first")
      ... def forwards_first(stage, num_stages, num_microbatches):
      ...     order = range(num_microbatches)
      ...     return [Action("forward", m) for m in order] + [Action("backward", m) for m in order]
    """

    def register(schedule: Schedule) -> Schedule:
        _schedules[name] = schedule
        return schedule

    return register


def get_schedule(name: str) -> Schedule:
    """The schedule of that name.

    Raises:
      ValueError: for a name that is not registered, with those that are.
    """
    if name not in _schedules:
        raise ValueError(f"unknown schedule {name!r}; there are {', '.join(map(repr, sorted(_schedules)))}")
    return _schedules[name]
