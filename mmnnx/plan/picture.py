"""The picture of a plan: what is in the memory of each stage, above the step's timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmnnx.inspect.figure_bytes import literal_text
from mmnnx.inspect.phase_styles import STYLES, phase_colour, phase_name
from mmnnx.inspect.timeline_rows import mesh_rows, time_unit
from mmnnx.inspect.units import bytes_text
from mmnnx.plan.memory import KINDS
from mmnnx.plan.step_plan import StepPlan
from mmnnx.printable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = dict(zip(KINDS, ("#005998", "#3d8bc4", "#86b7dc", "#2f8f83", "#8cc9bd", "#c4cad1", "#e19e39")))
LIMIT = "#8f1414"
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
MOST_NAMES = 32


@literal_text
def draw_plan(plan: StepPlan) -> Figure:
    """Bars of the bytes of a device of each mesh, by kind, with the limit; below, the step's timeline.

    >>> draw_plan(mm.plan(train_step, model, optimizer, batch)).savefig("plan.png")
    """
    from matplotlib.figure import Figure  # slow to import

    rows = 1 if plan.timeline is None else 2
    width = min(14.0, 5.0 + 0.3 * len(plan.memory))
    figure = Figure(figsize=(width, 3.4 * rows), layout="constrained", dpi=120)
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    _draw_memory(axes[0], plan)
    if plan.timeline is not None:
        _draw_timeline(axes[1], plan)
    verdict = "" if plan.fits is None else ": it fits" if plan.fits else ": it does not fit"
    title = f"{plan.name} on {plan.devices} x {plan.device_kind}{verdict}"
    figure.suptitle(printable(title), fontsize=10)
    return figure


def _draw_memory(axes: Axes, plan: StepPlan) -> None:
    names = [", ".join(m.meshes) for m in plan.memory]
    most = max(m.total for m in plan.memory)
    size, unit = next((u for u in UNITS if most >= u[0]), UNITS[-1])
    places, bottom = range(len(names)), [0.0] * len(names)
    for kind in KINDS:
        heights = [m.at_peak.get(kind, 0) / size for m in plan.memory]
        if any(heights):
            axes.bar(places, heights, bottom=bottom, color=COLOURS[kind], label=kind, width=0.8)
            bottom = [b + h for b, h in zip(bottom, heights)]
    if plan.chip is not None:
        _draw_limit(axes, plan.chip.memory, most, size)
    every = -(-len(names) // MOST_NAMES)
    axes.set_xticks(places[::every], names[::every], fontsize=7)
    if max(map(len, names)) > 8 or len(names) > 12:
        axes.tick_params(axis="x", labelrotation=45)
    axes.set_ylabel(f"{unit} on each device", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_limit(axes: Axes, limit: int, most: int, size: float) -> None:
    """A line at what the device has; words alone where that is far above the bars."""
    text, near = f"limit: {bytes_text(limit)}", limit < 3 * most
    if near:
        axes.axhline(limit / size, color=LIMIT, linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.12 * (max(limit, most) if near else most) / size)
    place = (1, limit / size) if near else (1, 1.06 * most / size)
    where = ("axes fraction", "data")
    words = text if near else f"{text}, far above"
    axes.annotate(words, place, xycoords=where, fontsize=7, color=LIMIT, ha="right", va="bottom")


def _draw_timeline(axes: Axes, plan: StepPlan) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    assert plan.timeline is not None
    rows = mesh_rows(plan.timeline)
    size, unit = time_unit(plan.timeline)
    scale = 1 / size
    drawn = []
    for phase in STYLES:
        boxes = [
            [
                (x * scale, y + side)
                for x, side in ((e.start, -0.42), (e.end, -0.42), (e.end, 0.42), (e.start, 0.42))
            ]
            for y, events in enumerate(rows.values())
            for e in events
            if e.phase == phase
        ]
        if boxes:
            drawn.append(Patch(color=phase_colour(phase), label=phase_name(phase)))
            axes.add_collection(
                PolyCollection(
                    boxes, facecolors=phase_colour(phase), edgecolors="white", linewidths=0.2, rasterized=True
                )
            )
    every = -(-len(rows) // MOST_NAMES)
    axes.set(xlim=(0, plan.timeline.makespan * scale), ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(range(0, len(rows), every), list(rows)[::every], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel(f"time ({unit}), simulated; bubble {plan.timeline.bubble:.1%}", fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(handles=drawn, fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
