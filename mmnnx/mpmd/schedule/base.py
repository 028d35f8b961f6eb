"""What a schedule is, and the names under which schedules are found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mmnnx.mpmd.ir.timetable import Action, Stages, Table
from mmnnx.sharding.rules import did_you_mean

# (stages, number of microbatches) -> table. Options of `mm.microbatch` that a schedule understands
# (interleave, unrolling) are keyword arguments of its function.
MakeTable = Callable[..., Table]


@dataclass(frozen=True)
class Schedule:
    """A schedule by name.

    Attributes:
      name: what `mm.microbatch(..., schedule=name)` calls it.
      rows: the function that makes its table.
    """

    name: str
    rows: MakeTable

    @property
    def is_builtin(self) -> bool:
        """Whether it comes with mmnnx."""
        return self.rows.__module__.startswith(f"{__package__}.")

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `mm.microbatch` that it understands."""
        parameters = list(inspect.signature(self.rows).parameters)
        return tuple(p for p in parameters[2:])

    def table(self, stages: Stages, num_microbatches: int, **options: Any) -> list[list[Action]]:
        """Its table for these stages.

        Raises:
          ValueError: if it is not for such stages, or not for so few microbatches. What the function of a
            registered schedule raises becomes one too, which names the schedule.
          TypeError: if its function gives no rows of actions.
        """
        unknown = [name for name, value in options.items() if value is not None and name not in self.options]
        if unknown:
            raise ValueError(f"schedule {self.name!r} has no option {', '.join(unknown)}")
        given = {name: value for name, value in options.items() if value is not None}
        try:
            rows = self.rows(stages, num_microbatches, **given)
            if isinstance(rows, Iterable):
                rows = list(rows)  # its function may be a generator
        except Exception as error:
            if self.is_builtin:
                raise
            raise ValueError(
                f"schedule {self.name!r}, for {stages.num_stages} stages on meshes "
                f"{', '.join(map(str, stages.meshes))} and {num_microbatches} microbatches, raised "
                f"{type(error).__name__}: {error}"
            ) from error
        try:
            return [[Action(*a) for a in row] for row in rows]
        except TypeError:
            raise TypeError(
                f"schedule {self.name!r} gave {rows!r}, and not a row of actions for each TaskMesh"
            ) from None


_schedules: dict[str, Schedule] = {}


def register_schedule(name: str) -> Callable[[MakeTable], MakeTable]:
    """Makes a function a schedule, available as `mm.microbatch(..., schedule=name)`.

    Where its table has "backward-input" and "backward-weight" actions, backwards are split in two. The rows
    may be in any order.

    Raises:
      ValueError: for the name of a schedule of mmnnx.
      TypeError: for a name that is no str.

    Example:
      >>> @mm.register_schedule("forwards-first")
      ... def forwards_first(stages, num_microbatches):
      ...     order = range(num_microbatches)
      ...     return [
      ...         [mm.Action(s, "forward", m) for m in order] + [mm.Action(s, "backward", m) for m in order]
      ...         for s in range(stages.num_stages)
      ...     ]
    """

    if not isinstance(name, str):
        raise TypeError(f'a schedule is registered by name, as by @register_schedule("mine"), not {name!r}')

    def register(rows: MakeTable) -> MakeTable:
        taken = name == "custom" or (name in _schedules and _schedules[name].is_builtin)
        if taken and not Schedule(name, rows).is_builtin:
            raise ValueError(f"there is a schedule {name!r} already: register yours by another name")
        _schedules[name] = Schedule(name, rows)
        return rows

    return register


def get_schedule(name: str) -> Schedule:
    """The schedule of that name.

    Raises:
      TypeError: for what is no name.
      ValueError: for a name that is not registered, with those that are.
    """
    if not isinstance(name, str):
        raise TypeError(
            f'a schedule is given by its name, not as {name!r}: mm.register_schedule("mine") gives a '
            "function one"
        )
    if name not in _schedules:
        near, known = did_you_mean(name, _schedules), ", ".join(map(repr, sorted(_schedules)))
        raise ValueError(f"unknown schedule {name!r}{near}; there are {known}")
    return _schedules[name]


def schedule_names() -> list[str]:
    """The names of all schedules, in the order in which they were registered."""
    return list(_schedules)
