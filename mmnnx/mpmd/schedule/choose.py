"""How a loop is run: its schedule, and how many of its microbatches go into one call.

What a loop leaves open is chosen by simulation, so that a step takes the least time.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.ir.timeline import UNIT_COSTS
from mmnnx.mpmd.ir.timetable import PHASES, Action, Phase, Stages
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
) -> Iterator[Way]:
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
        return iter([way])
    builtin = [name for name in schedule_names() if get_schedule(name).is_builtin]
    names, phases = sorted(builtin, key="sequential".__eq__), PHASES  # which is last among equals
    if not any(parts.values()):
        names, phases = ["sequential" if stages.carried else "gpipe"], PHASES[:1]  # forwards alone, in order
    schedules = tuple(map(get_schedule, [spec.schedule] if spec.schedule is not None else names))
    most = min(MOST_PER_CALL, spec.length // 2)  # in one call for all of them no stages would overlap
    divisors = tuple(k for k in range(1, most + 1) if spec.length % k == 0) or (1,)
    counts = divisors if spec.per_call is None else (spec.per_call,)
    ranked = _ranked(schedules, stages, spec.length, spec.options, counts, phases, durations())
    first = next(ranked, None)
    if first is None and spec.schedule is not None:
        first = Way(spec.schedule)  # and it says what it needs
    if first is None:
        options = "".join(f", {name}={value}" for name, value in spec.options)
        raise ValueError(
            f"microbatch: no schedule is for {stages.num_stages} stages on meshes "
            f"{', '.join(map(str, stages.meshes))} and {spec.length} microbatches{options}: name one "
            "(schedule=), which says what it needs"
        )
    return itertools.chain([first], ranked)


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


def _ranked(
    schedules: Sequence[Schedule],
    stages: Stages,
    length: int,
    options: tuple[tuple[str, Any], ...],
    counts: Sequence[int],
    phases: tuple[Phase, ...],
    durations: Durations,
) -> Iterator[Way]:
    """The ways that can be used, that of lowest step latency first; of equal ones, that with the fewest saved
    activations.

    A way is played through only if it may be the next: with many stages that takes a tenth of a second.

    Args:
      length: how many microbatches there are.
      options: those that the schedule must have.
      counts: how many microbatches may go into one call.
      phases: those that the loop has.
    """
    of_microbatch = sum(UNIT_COSTS[phase] for phase in phases if phase in ("forward", "backward"))
    actions = stages.num_stages * len({"forward", "backward"} & {*phases})  # of a microbatch, at least
    ramp_up = _ramp_up(stages)

    def latency(calls: int, per_call: int, units: float, actions: float) -> float:
        # Added up, for the devices wait while a short step is started, and CPU devices share its cores.
        return per_call * units * durations.unit + actions * calls * durations.dispatch

    queue: list[_Candidate] = []
    for number, (per_call, schedule) in enumerate(itertools.product(counts, schedules)):
        calls = length // per_call
        least = latency(calls, per_call, ramp_up + calls * of_microbatch, actions)
        way = Way(schedule.name, per_call)
        queue.append(_Candidate(0.99999 * least, False, [], number, way, schedule))  # for what is rounded
    heapq.heapify(queue)
    while queue:
        _, known, _, number, way, schedule = heapq.heappop(queue)
        if known:
            yield way
            continue
        calls = length // way.per_call
        played = min(calls, 2 * stages.num_stages + 1)  # all schedules are in steady state then
        if (found := _play(schedule, stages, played, options, phases)) is not None:
            units = found.makespan + (calls - played) * of_microbatch
            takes = float(f"{latency(calls, way.per_call, units, found.actions / played):.6g}")
            saved = sorted((way.per_call * n for n in found.saved), reverse=True)
            heapq.heappush(queue, _Candidate(takes, True, saved, number, way, schedule))


class _Candidate(NamedTuple):
    """A way, and its step latency: known, or no more than a bound from below. In the order of the queue: of
    equal latency, those that were not played through come first, for one of them may save less."""

    latency: float
    known: bool
    saved: list[int]
    number: int
    way: Way
    schedule: Schedule


def _ramp_up(stages: Stages) -> float:
    """Units of time until the last of the meshes can begin."""
    share = Counter(stages.meshes)
    starts: list[float] = []
    for reads in stages.reads:
        ends = [starts[r] + UNIT_COSTS["forward"] / share[stages.meshes[r]] for r in reads]
        starts.append(max(ends, default=0.0))
    first = {mesh: min(t for t, m in zip(starts, stages.meshes) if m == mesh) for mesh in share}
    return max(first.values(), default=0.0)


class _Played(NamedTuple):
    """A table that was played through: units of time, how many actions, saved activations of each mesh."""

    makespan: float
    actions: int
    saved: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _play(
    schedule: Schedule,
    stages: Stages,
    length: int,
    options: tuple[tuple[str, Any], ...],
    phases: tuple[Phase, ...],
) -> _Played | None:
    """None if the schedule is not for such stages, options, or so few microbatches."""
    if not {name for name, _ in options} <= set(schedule.options):
        return None
    try:
        table = schedule.table(stages, length, **dict(options))
        check_table(table, stages, length, schedule.name)
        timeline = simulate([[a for a in row if a.phase in phases] for row in table], stages)
    except ValueError:
        return None
    return _Played(timeline.makespan, len(timeline.events), tuple(timeline.in_flight().values()))
