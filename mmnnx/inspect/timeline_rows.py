"""The rows of a timeline, one for each mesh, in the order of the pipeline; and its unit of time."""

from __future__ import annotations

from mmnnx.mpmd.ir.timeline import Event, Timeline

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


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


def stage_ranks(events: dict[str, list[Event]]) -> dict[tuple[str, int | None], tuple[int, int]]:
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


def step_time_text(timeline: Timeline) -> str:
    """The steady-state step time, `Timeline.period`, as text: "33 units", "12.7 ms"."""
    size, name = time_unit(timeline)
    return f"{timeline.period / size:.4g} {name}"
