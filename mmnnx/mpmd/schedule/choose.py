"""The schedule of a loop: the one that it asks for, or the one with the shortest step in simulation."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import Schedule, get_schedule, schedule_names
from mmnnx.mpmd.schedule.table import check_table, simulate


def choose_table(
    spec: LoopSpec, stages: Stages, parts: Mapping[int, Collection[str]], choice: int
) -> tuple[str, list[list[Action]]]:
    """The name and the table of the schedule of a loop; `parts` are those that its backwards have."""
    if spec.rows:
        table = [] if spec.names_tasks else [list(row) for row in spec.rows]
        if table:
            check_table(table, stages, spec.length, parts=parts)
        return "custom", table
    if spec.schedule is not None:
        name = spec.schedule
    elif any(parts.values()):
        everyone = tuple(s for s in map(get_schedule, schedule_names()) if s.is_own)
        ranked = _ranked(everyone, stages, min(spec.length, 2 * stages.num_stages + 1), spec.options)
        if choice >= len(ranked):
            raise IndexError(choice)
        name = ranked[choice]
    else:
        name = "sequential" if stages.carried else "gpipe"  # forwards alone, in order
    if not stages.num_stages:
        return name, []  # all is in moving tasks, and follows by dependency
    table = get_schedule(name).table(stages, spec.length, **dict(spec.options))
    check_table(table, stages, spec.length, name, parts)
    return name, table


@functools.lru_cache(maxsize=256)
def _ranked(
    schedules: Sequence[Schedule], stages: Stages, length: int, options: tuple[tuple[str, Any], ...]
) -> list[str]:
    """The schedules that can be used, the shortest first; of equals that with fewest saved activations."""
    found = []
    for schedule in schedules:
        if not {name for name, _ in options} <= set(schedule.options):
            continue
        try:
            table = schedule.table(stages, length, **dict(options))
            check_table(table, stages, length, schedule.name)
            timeline = simulate(table, stages)
        except ValueError:
            continue  # not for such stages, or not for so few microbatches
        found.append((round(timeline.makespan, 6), max(timeline.in_flight().values()), schedule.name))
    return [name for *_, name in sorted(found, key=lambda item: item[:2])]
