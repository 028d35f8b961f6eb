"""Schedules simulated on the same meshes: what each costs in time and memory."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmnnx.mpmd.ir.timeline import Timeline
from mmnnx.mpmd.schedule import Stages, Table, check_table, get_schedule, read_schedule, simulate


@dataclass(frozen=True)
class Simulated:
    """A schedule and its simulation.

    Attributes:
      name: of the schedule.
      stages: the stages and their meshes.
      table: its actions.
      timeline: when each runs.
    """

    name: str
    stages: Stages
    table: Table = field(repr=False)
    timeline: Timeline

    @property
    def stages_per_mesh(self) -> int:
        return max(Counter(self.stages.meshes).values())

    @functools.cached_property
    def period(self) -> float:
        return round(self.timeline.period, 9)  # so that sums of the same costs in any order are equal

    @functools.cached_property
    def memory(self) -> tuple[float, ...]:
        """For each mesh, its peak of saved activations, in microbatches of all its stages."""
        held, stages = self.timeline.in_flight(), Counter(self.stages.meshes)
        return tuple(held[f"mesh{mesh}"] / stages[mesh] for mesh in sorted(stages))

    @property
    def rank(self) -> tuple[float, float]:
        """A sort key: the shortest `Timeline.period` first, of equal ones that with the least memory."""
        return self.period, max(self.memory)


def by_name(
    name: str, meshes: int, microbatches: int, interleave: int, costs: Mapping[str, float]
) -> Simulated:
    """A registered schedule on a chain of stages, one on each mesh or as many as it needs.

    Args:
      name: of the schedule.
      meshes: number of TaskMeshes.
      microbatches: number of microbatches.
      interleave: stages on each mesh, for schedules with looped placement. With V-shaped placement it is two.
      costs: time that a mesh takes for each phase of all its stages.

    Raises:
      ValueError: for an unknown name, or a schedule that cannot be used for these sizes.

    Example:
      >>> costs = {"forward": 1, "backward": 2}
      >>> by_name("interleaved-1f1b", 4, 8, 2, costs).timeline.period
      28.5
    """
    schedule = get_schedule(name)
    if "interleave" not in schedule.options:
        layouts = [Stages.chain(range(meshes))]
    else:
        down = range(meshes)
        layouts = [Stages.chain([*down] * interleave), Stages.chain([*down, *reversed(down)])]

    def tables(number: int) -> tuple[list[tuple[Stages, Table]], list[ValueError]]:
        """The table for each placement of stages that it can be used with, and the errors for the others."""
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
        # Raise the error for the placement that it takes when there are enough microbatches.
        suited, _ = tables(4 * meshes)
        raise refused[layouts.index(suited[0][0]) if suited else 0]
    return _simulated(name, *made[0], microbatches, costs)


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
    return _simulated(str(path), stages, table, number, costs)


def _simulated(name: str, stages: Stages, table: Table, number: int, costs: Mapping[str, float]) -> Simulated:
    check_table(table, stages, number, name)
    try:
        timeline = dataclasses.replace(simulate(table, stages, costs), schedule=name)
    except ValueError as error:
        raise ValueError(f"schedule {name!r}: {error}") from None
    return Simulated(name, stages, table, timeline)
