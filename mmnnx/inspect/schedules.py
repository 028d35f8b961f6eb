"""Schedules side by side: what each costs in time and memory on the same meshes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmnnx.mpmd.ir.timeline import Timeline
from mmnnx.mpmd.schedule import Stages, Table, check_table, get_schedule, read_schedule, simulate


@dataclass(frozen=True)
class Simulated:
    """A schedule, played through.

    Attributes:
      name: of the schedule.
      stages: what it was played on.
      table: its actions.
      timeline: when each ran.
    """

    name: str
    stages: Stages
    table: Table
    timeline: Timeline

    @property
    def stages_per_mesh(self) -> int:
        return max(Counter(self.stages.meshes).values())

    @functools.cached_property
    def period(self) -> float:
        return round(self.timeline.period, 9)  # sums of the same costs in another order are equal

    @functools.cached_property
    def memory(self) -> tuple[float, ...]:
        """For each mesh, the most residuals it holds, one being those of all its stages for a microbatch."""
        held, stages = self.timeline.in_flight(), Counter(self.stages.meshes)
        return tuple(held[f"mesh{mesh}"] / stages[mesh] for mesh in sorted(stages))

    @property
    def rank(self) -> tuple[float, float]:
        """Sorts schedules: the shortest `Timeline.period` first, and of these the least memory."""
        return self.period, max(self.memory)


def by_name(
    name: str, meshes: int, microbatches: int, interleave: int, costs: Mapping[str, float]
) -> Simulated:
    """A registered schedule on a chain of stages, one on each mesh or as many as it needs.

    Args:
      name: of the schedule.
      meshes: number of TaskMeshes.
      microbatches: number of microbatches.
      interleave: stages on each mesh, for schedules that go round the meshes. In a V there are always two.
      costs: time that a mesh takes for each phase of all its stages.

    Raises:
      ValueError: for an unknown name, or a schedule that is not for such sizes; says why.

    >>> by_name("interleaved-1f1b", 4, 8, 2, UNIT_COSTS).timeline.period
    28.5
    """
    schedule = get_schedule(name)
    if "interleave" not in schedule.options:
        layouts = [Stages.chain(range(meshes))]
    else:
        down = range(meshes)
        layouts = [Stages.chain([*down] * interleave), Stages.chain([*down, *reversed(down)])]

    def tables(number: int) -> tuple[list[tuple[Stages, Table]], list[ValueError]]:
        """What it makes of each layout, or why it does not."""
        made: list[tuple[Stages, Table]] = []
        refused = []
        for stages in layouts:
            try:
                made.append((stages, schedule.table(stages, number)))
            except ValueError as error:
                refused.append(error)
        return made, refused

    made, refused = tables(microbatches)
    if not made:
        # The layout that suits it is the one that it takes when there are plenty of microbatches.
        suited, _ = tables(4 * meshes)
        raise refused[layouts.index(suited[0][0]) if suited else 0]
    return _play(name, *made[0], microbatches, costs)


def from_csv(
    path: Path, meshes: int | None, microbatches: int | None, costs: Mapping[str, float]
) -> Simulated:
    """The schedule in a CSV file that has a row for each mesh; its stages are a chain.

    Args:
      path: the file, as `mmnnx.mpmd.schedule.read_schedule` reads it.
      meshes, microbatches: how many there are; None for as many as the file has.
      costs: time that a mesh takes for each phase of all its stages.

    Raises:
      ValueError: for a file that is no schedule, or one for other numbers of meshes or microbatches.
      OSError: if it cannot be read.
    """
    table = [row for row in read_schedule(path) if row]
    if not table:
        raise ValueError(f"{path}: there are no actions in it")
    if meshes is not None and meshes != len(table):
        raise ValueError(f"{path} has {len(table)} rows, one for each mesh; --stages is {meshes}")
    mesh_of = {a.stage: mesh for mesh, row in reversed(list(enumerate(table))) for a in row}
    missing = sorted(set(range(max(mesh_of))) - set(mesh_of))
    if missing:
        raise ValueError(f"{path}: there is a stage {max(mesh_of)}, but no stage {missing[0]}")
    stages = Stages.chain([mesh_of[stage] for stage in sorted(mesh_of)])
    number = microbatches or 1 + max(a.microbatch for row in table for a in row)
    return _play(str(path), stages, table, number, costs)


def _play(name: str, stages: Stages, table: Table, number: int, costs: Mapping[str, float]) -> Simulated:
    check_table(table, stages, number, name)
    try:
        return Simulated(name, stages, table, simulate(table, stages, costs))
    except ValueError as error:
        raise ValueError(f"schedule {name!r}: {error}") from None
