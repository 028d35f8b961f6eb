"""The timeline of a pipeline: which mesh computes what, when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "forward": "#7fb3d5",
    "backward": "#f0a868",
    "backward-input": "#f0a868",
    "backward-weight": "#d98880",
    "none": "#b8c4b8",
}


class Event(Protocol):
    """A fragment running on a mesh from ``start`` to ``end``."""

    @property
    def mesh(self) -> Any: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def phase(self) -> str: ...
    @property
    def microbatch(self) -> int | None: ...


def draw_timeline(events: Iterable[Event], *, title: str = "", unit: str = "unit costs") -> Figure:
    """Meshes as rows, time along x; boxes coloured by phase and numbered by microbatch; white is idle.

    Rows come in the order in which microbatches first reach the meshes. ``unit`` says what the times of the
    events are in. Raises ValueError when there are no events.

    >>> draw_timeline(program.simulate().events).savefig("timeline.png")
    """
    from matplotlib.collections import PatchCollection  # slow to import
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    events = list(events)
    if not events:
        raise ValueError("there are no events to draw")
    arrivals = sorted(events, key=lambda event: (event.microbatch is None, event.start))
    meshes = list(dict.fromkeys(event.mesh for event in arrivals))
    began = min(event.start for event in events)
    span = max(event.end for event in events) - began or 1.0
    # Wide enough that the commonest box holds a two-digit number; a picture beyond 60 inches helps nobody.
    lengths = sorted(event.end - event.start for event in events if event.microbatch is not None)
    typical = lengths[len(lengths) // 2] if lengths else span
    width = min(60.0, max(8.0, 0.3 * span / (typical or span)))
    height = 1.3 + 0.32 * len(meshes)
    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = figure.add_subplot(xlabel=unit, title=title)

    for phase in dict.fromkeys(event.phase for event in events):
        boxes = [
            Rectangle((event.start - began, meshes.index(event.mesh) - 0.42), event.end - event.start, 0.84)
            for event in events
            if event.phase == phase
        ]
        colour = COLOURS.get(phase, COLOURS["none"])
        axes.add_collection(PatchCollection(boxes, facecolor=colour, edgecolor="white", linewidth=0.6))
    points_per_unit = (width - 1.2) * 72 / span
    for event in events:
        label = "" if event.microbatch is None else str(event.microbatch)
        size = min(8.0, (event.end - event.start) * points_per_unit / (0.62 * max(1, len(label))))
        if label and size >= 3:
            middle = (event.start + event.end) / 2 - began
            axes.text(
                middle, meshes.index(event.mesh), label, ha="center", va="center_baseline", fontsize=size
            )

    axes.set(xlim=(0, span), ylim=(len(meshes) - 0.4, -0.6), yticks=range(len(meshes)))
    axes.set_yticklabels([str(mesh) for mesh in meshes])
    axes.spines[["top", "right", "left"]].set_visible(False)
    busy = sum(event.end - event.start for event in events) / (span * len(meshes))
    phases = [phase for phase in COLOURS if any(event.phase == phase for event in events)]
    figure.legend(
        handles=[
            Patch(color=COLOURS[phase], label="outside autodiff" if phase == "none" else phase)
            for phase in phases
        ]
        + [Patch(facecolor="white", edgecolor="#999999", label=f"idle ({1 - busy:.0%})")],
        loc="outside upper right",
        ncols=len(phases) + 1,
        frameon=False,
        fontsize=8,
    )
    return figure
