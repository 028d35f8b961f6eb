"""The schedule of a loop: the one that it asks for, or the one with the lowest step latency in simulation."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import Schedule, get_schedule, schedule_names
from mmnnx.mpmd.schedule.table import check_table, simulate


def candidates(spec: LoopSpec, stages: Stages, parts: Mapping[int, Collection[str]]) -> list[str]:
    """The names of the schedules that a loop may have: the one that it asks for, or all that would do.

    That of lowest step latency comes first, in simulation of at most 2S + 1 microbatches of S stages: all are
    in steady state by then.

    Args:
      spec: what the loop asks for.
      stages: its stages.
      parts: for each stage, the parts that its backward has.

    Raises:
      ValueError: if no schedule is for such stages, with the options that are given.
    """
    if spec.rows:
        return ["custom"]
    if spec.schedule is not None:
        return [spec.schedule]
    if not any(parts.values()):
        return ["sequential" if stages.carried else "gpipe"]  # forwards alone, in order
    builtin = tuple(s for s in map(get_schedule, schedule_names()) if s.is_builtin)
    ranked = _ranked(builtin, stages, min(spec.length, 2 * stages.num_stages + 1), spec.options)
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
    schedules: Sequence[Schedule], stages: Stages, length: int, options: tuple[tuple[str, Any], ...]
) -> list[str]:
    """The schedules that can be used, that of lowest step latency first; of equal ones, that with the fewest
    saved activations."""
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
