"""The picture of a plan: what is in the memory of each stage, above the step's timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmnnx.inspect.colours import LIMIT, memory_colour
from mmnnx.inspect.figure_style import LONGEST_NAME, WIDTH, settle_ticks, styled
from mmnnx.inspect.timeline_picture import draw_legend, draw_rows
from mmnnx.inspect.timeline_rows import headline, mesh_rows
from mmnnx.inspect.units import byte_unit, bytes_text
from mmnnx.plan.memory import KINDS
from mmnnx.plan.step_plan import StepPlan
from mmnnx.printable import printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NAMES = 32


def draw_plan(plan: StepPlan) -> Figure:
    """Bars of the bytes of a device of each mesh, by kind, with the limit; below, the step's timeline.

    >>> draw_plan(mm.plan(train_step, model, optimizer, batch)).savefig("plan.png")
    """
    from matplotlib.figure import Figure  # slow to import

    with styled(dark=False) as look:
        heights = [2.6]
        if plan.timeline is not None:
            rows = len(mesh_rows(plan.timeline))
            heights.append(min(0.34, 6 / rows) * rows + 0.3)
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.9 * len(heights)), layout="constrained")
        panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        _draw_memory(panels[0], plan)
        settle_ticks(panels[0], look)
        if plan.timeline is not None:
            title = headline(plan.timeline, "estimated")
            draw_legend(figure, draw_rows(panels[1], plan.timeline, title, look, dark=False))
        verdict = "" if plan.fits is None else ": it fits" if plan.fits else ": it does not fit"
        title = f"{plan.name} on {plan.devices} x {plan.device_kind}{verdict}"
        panels[0].set_title(printable(title))
    return figure


def _draw_memory(axes: Axes, plan: StepPlan) -> None:
    names = [shortened(printable(", ".join(m.meshes)), 2 * LONGEST_NAME) for m in plan.memory]
    most = max(m.total for m in plan.memory)
    size, unit = byte_unit(most)
    places, bottom = range(len(names)), [0.0] * len(names)
    for kind in KINDS:
        heights = [m.at_peak.get(kind, 0) / size for m in plan.memory]
        if any(heights):
            axes.bar(places, heights, bottom=bottom, color=memory_colour(kind), label=kind, width=0.8)
            bottom = [b + h for b, h in zip(bottom, heights)]
    if plan.chip is not None:
        _draw_limit(axes, plan.chip.memory, most, size)
    every = -(-len(names) // MOST_NAMES)
    axes.set_xticks(places[::every], names[::every])
    if max(map(len, names)) > 8 or len(names) > 12:
        axes.tick_params(axis="x", labelrotation=45)
    axes.set_ylabel(f"{unit} on each device")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_limit(axes: Axes, limit: int, most: int, size: float) -> None:
    """A line at what the device has; words alone where that is far above the bars."""
    text, near = f"limit: {bytes_text(limit)}", limit < 3 * most
    if near:
        axes.axhline(limit / size, color=LIMIT, linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.12 * (max(limit, most) if near else most) / size)
    place = (1, limit / size) if near else (1, 1.06 * most / size)
    where = ("axes fraction", "data")
    words = text if near else f"{text}, far above"
    axes.annotate(words, place, xycoords=where, color=LIMIT, ha="right", va="bottom")
