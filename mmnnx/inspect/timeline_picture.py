"""The picture of a pipeline, as in the papers: meshes as rows, time along x."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmnnx.inspect.figure_bytes import literal_text
from mmnnx.inspect.phase_styles import STYLES, phase_colour, phase_name, text_colour
from mmnnx.inspect.timeline_rows import mesh_rows, stage_ranks, time_unit
from mmnnx.mpmd.ir.timeline import Timeline
from mmnnx.printable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTHS = (7.0, 16.0)  # inches: what a page and a notebook show without scrolling
HEIGHT = 9.0  # inches that all rows share at most
MAX_VECTOR_EVENTS = 10_000  # vector formats hold more of them as an image
SMALLEST = 5.0  # points: smaller numbers are left out


@literal_text
def draw_timeline(timeline: Timeline, *, title: str = "") -> Figure:
    """Meshes as rows, time along x; boxes coloured by phase and numbered by microbatch; white is bubble.

    Rows are in the order in which microbatches first reach the meshes. On a mesh with several stages later
    ones are lighter. Events that take no time are not drawn, and numbers that do not fit their boxes are left
    out. The bubble is in % of the steady-state step time, `Timeline.period`.

    Raises:
      ValueError: when nothing takes time.

    >>> draw_timeline(program.simulate()).savefig("timeline.png")
    """
    from matplotlib.collections import PolyCollection  # slow to import
    from matplotlib.figure import Figure

    by_mesh = mesh_rows(timeline)
    ranks = stage_ranks(by_mesh)
    events = [(y, e) for y, mine in enumerate(by_mesh.values()) for e in mine]
    began = min(e.start for _, e in events)
    per_unit, name = time_unit(timeline)
    span = (max(e.end for _, e in events) - began) / per_unit

    def boxes(phase: str) -> list[tuple[float, float, int, str, str]]:
        """(start, length, row, label, colour) of each box."""
        return [
            (
                (e.start - began) / per_unit,
                (e.end - e.start) / per_unit,
                y,
                "" if e.microbatch is None else str(e.microbatch),
                phase_colour(phase, *ranks[e.mesh, e.stage]),
            )
            for y, e in events
            if e.phase == phase
        ]

    drawn = {phase: found for phase in STYLES if (found := boxes(phase))}
    lengths = sorted(length for found in drawn.values() for _, length, _, label, _ in found if label)
    short = lengths[len(lengths) // 4] if lengths else span
    margin = 0.35 + 0.075 * max(map(len, by_mesh))
    width = min(WIDTHS[1], max(WIDTHS[0], 0.25 * span / short + margin))
    row = min(0.34, HEIGHT / len(by_mesh))
    figure = Figure(figsize=(width, 1.25 + row * len(by_mesh)), layout="constrained", dpi=120)
    axes = figure.add_subplot(xlabel=f"time ({name})")
    points = (width - margin) * 72 / span  # in a unit of time

    for phase, found in drawn.items():
        collection = PolyCollection(
            [
                [(x, y - 0.42), (x + length, y - 0.42), (x + length, y + 0.42), (x, y + 0.42)]
                for x, length, y, _, _ in found
            ],
            facecolors=[colour for *_, colour in found],
            edgecolors="white",
            linewidths=[min(0.7, 0.1 * length * points) for _, length, _, _, _ in found],
            rasterized=len(events) > MAX_VECTOR_EVENTS,
            label=phase,
        )
        axes.add_collection(collection)
        digits = max(len(label) for *_, label, _ in found)
        for x, length, y, label, colour in found:
            size = min(8.5, 0.85 * length * points / (0.64 * max(1, digits)), 50 * row)
            if label and size >= SMALLEST:
                axes.text(
                    x + length / 2,
                    y,
                    label,
                    ha="center",
                    va="center_baseline",
                    fontsize=size,
                    color=text_colour(colour),
                    clip_on=True,
                )

    every = -(-10 * len(by_mesh) // round(HEIGHT * 72))  # a name needs about ten points of height
    names = [printable(mesh) for mesh in by_mesh]
    axes.set(xlim=(0, span), ylim=(len(names) - 0.4, -0.6), yticks=range(0, len(names), every))
    axes.set_yticklabels(names[::every], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _legend(figure, axes, timeline, list(drawn), several=any(of > 1 for _, of in ranks.values()))
    if title:
        axes.set_title(printable(title), loc="left", fontsize=10)
    return figure


def _legend(figure: Figure, axes: Axes, timeline: Timeline, phases: list[str], several: bool) -> None:
    """The names of the phases, and the bubble."""
    from matplotlib.patches import Patch

    handles = [Patch(color=phase_colour(phase), label=phase_name(phase)) for phase in phases]
    if several:
        handles.append(Patch(color="none", label="lighter: a later stage of the mesh"))
    handles.append(
        Patch(
            facecolor="white",
            edgecolor="#999999",
            label=f"bubble ({timeline.bubble:.1%} of the steady-state step time)",
        )
    )
    wide = sum(0.55 + 0.066 * len(str(handle.get_label())) for handle in handles) < figure.get_figwidth()
    figure.legend(
        handles=handles,
        loc="outside upper right",
        ncols=len(handles) if wide else -(-len(handles) // 2),
        frameon=False,
        fontsize=8,
        handlelength=1.4,
    )
