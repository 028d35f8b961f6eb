"""The picture of a plan: what is in the memory of each stage, above the step's timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmnnx.inspect.phase_styles import STYLES, phase_colour, phase_name
from mmnnx.plan.memory import KINDS
from mmnnx.plan.step_plan import StepPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = dict(zip(KINDS, ("#005998", "#3d8bc4", "#86b7dc", "#2f8f83", "#8cc9bd", "#c4cad1", "#e19e39")))
GIGA = 1e9
MOST_NAMES = 32


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
    figure.suptitle(f"{plan.name} on {plan.devices} x {plan.device_kind}{verdict}", fontsize=10)
    return figure


def _draw_memory(axes: Axes, plan: StepPlan) -> None:
    names = [", ".join(m.meshes) for m in plan.memory]
    places, bottom = range(len(names)), [0.0] * len(names)
    for kind in KINDS:
        heights = [m.at_peak.get(kind, 0) / GIGA for m in plan.memory]
        if any(heights):
            axes.bar(places, heights, bottom=bottom, color=COLOURS[kind], label=kind, width=0.8)
            bottom = [b + h for b, h in zip(bottom, heights)]
    if plan.chip is not None:
        axes.axhline(plan.chip.memory / GIGA, color="#8f1414", linewidth=1, linestyle="--")
        axes.annotate(
            f"{plan.chip.memory / GIGA:.3g} GB",
            (1, plan.chip.memory / GIGA),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            color="#8f1414",
            ha="right",
            va="bottom",
        )
    every = -(-len(names) // MOST_NAMES)
    axes.set_xticks(places[::every], names[::every], fontsize=7)
    if max(map(len, names), default=0) > 8 or len(names) > 12:
        axes.tick_params(axis="x", labelrotation=45)
    axes.set_ylabel("GB on each device", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_timeline(axes: Axes, plan: StepPlan) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    assert plan.timeline is not None
    rows = plan.timeline.by_mesh()
    scale, unit = (1.0, "s") if plan.timeline.makespan >= 1 else (1e3, "ms")
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
