"""The rows of a timeline, one for each mesh, in the order of the pipeline; and its unit of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmnnx.mpmd.ir.timeline import Event, Timeline

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
ROOM = 0.04  # of the span


def mesh_rows(timeline: Timeline) -> dict[str, list[Event]]:
    """The events that take time, by mesh, meshes in the order in which microbatches first reach them.

    Raises:
      ValueError: if there are none.
    """
    by_mesh = timeline.by_mesh()
    if not by_mesh:
        raise ValueError("there are no events that take time: nothing to draw")

    def arrival(mesh: str) -> tuple[bool, float]:
        first = min(by_mesh[mesh], key=lambda e: (e.microbatch is None, e.start))
        return first.microbatch is None, first.start

    return {mesh: by_mesh[mesh] for mesh in sorted(by_mesh, key=arrival)}


def stage_ranks(events: Mapping[str, list[Event]]) -> dict[tuple[str, int | None], tuple[int, int]]:
    """For each (mesh, stage): its number among the stages of that mesh, from 0, and how many the mesh has."""
    ranks: dict[tuple[str, int | None], tuple[int, int]] = {}
    for mesh, mine in events.items():
        stages = sorted({e.stage for e in mine if e.stage is not None})
        ranks[mesh, None] = (0, 1)
        ranks |= {(mesh, stage): (nth, len(stages)) for nth, stage in enumerate(stages)}
    return ranks


def time_unit(timeline: Timeline) -> tuple[float, str]:
    """The unit to show times in: its size in the timeline's own unit, and its name.

    >>> time_unit(Timeline((Event("a", 0.0, 0.02, "forward", 0, "f"),), unit="s"))
    (0.001, 'ms')
    """
    if timeline.unit != "s":
        return 1.0, timeline.unit
    return next((s for s in SECONDS if timeline.period >= s[0]), SECONDS[-1])


@dataclass(frozen=True)
class Scale:
    """Times of a timeline in handy units, from its first event.

    Attributes:
      began: when that starts.
      size, name: the unit, as `time_unit` has it.
      span: until the last event ends, in the unit.
      room: what a picture has behind that, in the unit, for what happens then and takes no time: in a
        simulation, all that follows the microbatch loops.
    """

    began: float
    size: float
    name: str
    span: float
    room: float = 0.0

    def __call__(self, time: float) -> float:
        return (time - self.began) / self.size

    def spread(self, times: Sequence[float]) -> list[float]:
        """Times in order, those at the end one after the other in the room behind it."""
        last = sum(self(time) >= self.span for time in times)
        steps = [self.room * (k + 1) / last for k in range(last)]
        return [*map(self, times[: len(times) - last]), *(self.span + step for step in steps)]

    @property
    def label(self) -> str:
        """What is below the axis."""
        return f"time ({self.name})" + ("; at the end, work that takes none" if self.room else "")


def scale_of(timeline: Timeline) -> Scale:
    """The scale of a timeline in which something takes time."""
    events = [e for mine in timeline.by_mesh().values() for e in mine]
    began, (size, name) = min(e.start for e in events), time_unit(timeline)
    end = max(e.end for e in events)
    span = (end - began) / size
    at_end = (sum(time >= end for time, _ in held) for held in timeline.held_bytes.values())
    simulated = timeline.unit != "s"
    return Scale(began, size, name, span, ROOM * span if simulated and max(at_end, default=0) > 1 else 0.0)


def headline(timeline: Timeline, title: str = "") -> str:
    """What is above a timeline: a title, its schedule, the bubble and the step time.

    >>> headline(Timeline((Event("a", 0.0, 2.0, "forward", 0, "f"),), schedule="1f1b"))
    '1f1b, bubble 0.0%, steady-state step time 2 units'
    """
    named = timeline.schedule if timeline.schedule not in title else ""
    told = ", ".join(filter(None, (named, f"bubble {timeline.bubble:.1%}")))
    told += f", steady-state step time {step_time_text(timeline)}"
    return f"{title}: {told}" if title else told


def also_blank(timeline: Timeline) -> str:
    """What a blank in a row may be beside bubble: nothing, if each mesh has devices of its own."""
    devices = [device for mesh in timeline.by_mesh() for device in timeline.mesh_devices.get(mesh, ())]
    return ", or another mesh of the same devices" if len(set(devices)) < len(devices) else ""


def step_time_text(timeline: Timeline) -> str:
    """The steady-state step time, `Timeline.period`, as text: "33 units", "12.7 ms"."""
    size, name = time_unit(timeline)
    return f"{timeline.period / size:.4g} {name}"
