"""How a loop is run: its schedule, and how many of its microbatches go into one call.

What a loop leaves open is chosen by simulation, so that a step takes the least time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.ir.timeline import UNIT_COSTS
from mmnnx.mpmd.ir.timetable import PHASES, Action, Stages
from mmnnx.mpmd.schedule.base import Schedule, get_schedule, schedule_names
from mmnnx.mpmd.schedule.table import check_table, simulate

MOST_PER_CALL = 8  # of an eighth of the calls little is left to save


class Way(NamedTuple):
    """A way to run a loop: the name of its schedule, and how many microbatches run in one call, as one."""

    schedule: str
    per_call: int = 1

    def asked_of(self, spec: LoopSpec) -> LoopSpec:
        """What a loop asks for that is to run so, of calls in the place of microbatches."""
        schedule = None if spec.rows else self.schedule
        return dataclasses.replace(
            spec, schedule=schedule, length=spec.length // self.per_call, per_call=self.per_call
        )


class Durations(NamedTuple):
    """Seconds, as estimated: of a unit of work (the forward of a mesh for one microbatch, half of its
    backward), and of the host to start what one action is made of, a call and a transfer."""

    unit: float
    dispatch: float


def asked(spec: LoopSpec) -> Way | None:
    """The way that a loop asks for; None if it leaves something open."""
    if spec.rows:
        return Way("custom")
    if spec.schedule is not None and spec.per_call is not None:
        return Way(spec.schedule, spec.per_call)
    return None


def ways(
    spec: LoopSpec, stages: Stages, parts: Mapping[int, Collection[str]], durations: Callable[[], Durations]
) -> list[Way]:
    """The ways in which a loop may run: the one that it asks for, or all that would do, the fastest first.

    Args:
      spec: what the loop asks for.
      stages: its stages.
      parts: for each stage, the parts that its backward has.
      durations: estimates those of one microbatch.

    Raises:
      ValueError: if no schedule is for such stages, with the options that are given.
    """
    if (way := asked(spec)) is not None:
        return [way]
    builtin = [name for name in schedule_names() if get_schedule(name).is_builtin]
    names, phases = sorted(builtin, key="sequential".__eq__), PHASES  # which is last among equals
    if not any(parts.values()):
        names, phases = ["sequential" if stages.carried else "gpipe"], PHASES[:1]  # forwards alone, in order
    schedules = tuple(map(get_schedule, [spec.schedule] if spec.schedule is not None else names))
    most = min(MOST_PER_CALL, spec.length // 2)  # in one call for all of them no stages would overlap
    divisors = tuple(k for k in range(1, most + 1) if spec.length % k == 0) or (1,)
    counts = divisors if spec.per_call is None else (spec.per_call,)
    ranked = _ranked(schedules, stages, spec.length, spec.options, counts, phases, durations())
    if spec.schedule is not None and not ranked:
        return [Way(spec.schedule)]  # and it says what it needs
    if not ranked:
        options = "".join(f", {name}={value}" for name, value in spec.options)
        raise ValueError(
            f"microbatch: no schedule is for {stages.num_stages} stages on meshes "
            f"{', '.join(map(str, stages.meshes))} and {spec.length} microbatches{options}: name one "
            "(schedule=), which says what it needs"
        )
    return ranked


def make_table(
    name: str, spec: LoopSpec, stages: Stages, parts: Mapping[int, Collection[str]]
) -> list[list[Action]]:
    """The table of one of these schedules, checked."""
    if spec.rows:
        table = [] if spec.names_tasks else [list(row) for row in spec.rows]
        if table:
            check_table(table, stages, spec.length, parts=parts)
        return table
    if not stages.num_stages:
        return []  # all is in moving tasks, and follows by dependency
    table = get_schedule(name).table(stages, spec.length, **dict(spec.options))
    check_table(table, stages, spec.length, name, parts)
    return table


@functools.lru_cache(maxsize=256)
def _ranked(
    schedules: Sequence[Schedule],
    stages: Stages,
    length: int,
    options: tuple[tuple[str, Any], ...],
    counts: Sequence[int],
    phases: Collection[str],
    durations: Durations,
) -> list[Way]:
    """The ways that can be used, that of lowest step latency first; of equal ones, that with the fewest saved
    activations.

    At most 2S + 1 of the microbatches of S stages are played through: all schedules are in steady state then.

    Args:
      length: how many microbatches there are.
      options: those that the schedule must have.
      counts: how many microbatches may go into one call.
      phases: those that the loop has.
    """
    of_microbatch = sum(UNIT_COSTS[phase] for phase in phases if phase in ("forward", "backward"))
    found = []
    for per_call, schedule in itertools.product(counts, schedules):
        calls = length // per_call
        played = min(calls, 2 * stages.num_stages + 1)
        if not {name for name, _ in options} <= set(schedule.options):
            continue
        try:
            table = schedule.table(stages, played, **dict(options))
            check_table(table, stages, played, schedule.name)
            timeline = simulate([[a for a in row if a.phase in phases] for row in table], stages)
        except ValueError:
            continue  # not for such stages, or not for so few microbatches
        units = timeline.makespan + (calls - played) * of_microbatch
        working = per_call * units * durations.unit
        starting = durations.dispatch * len(timeline.events) / played * calls
        saved = sorted((per_call * n for n in timeline.in_flight().values()), reverse=True)
        # Added up, for the devices wait while a short step is started, and CPU devices share its cores.
        found.append((float(f"{working + starting:.6g}"), saved, Way(schedule.name, per_call)))
    return [way for *_, way in sorted(found, key=lambda item: item[:2])]
