"""The picture of a placement: submeshes as boxes with their devices, contents, and memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmnnx.inspect.figure_bytes import literal_text
from mmnnx.inspect.submesh import Submesh
from mmnnx.inspect.units import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: the picture is laid out in them, so that text and boxes keep their proportions at every size.
BOX, GAP, PAD = 2.55, 0.18, 0.12
LINE = 0.185
HEAD = 1.02  # name, devices and bar, above the list of parts
TITLE = 0.42

COLUMNS = 4
NAME, SMALL = 0.098, 0.066
"""The average width of a letter, in inches: of a name, of other text."""

FILLED = ("#005998", "#3d8bc4", "#86b7dc", "#2f8f83", "#8cc9bd", "#c4cad1")
"""Colours of the parts, largest first; the last is for all others."""
OVER = ("#8f1414", "#bf4138", "#de8276", "#b5651d", "#e0b083", "#c4cad1")
"""The same for devices whose state does not fit."""
GREY, EMPTY, EDGE = "#6b6b6b", "#eceff2", "#b5bcc4"


@literal_text
def draw_placement(title: str, boxes: Sequence[Submesh], memory: int | None) -> Figure:
    """A box for each submesh, in order of their devices.

    In a box: the names of its tasks, its axes, a square for each device, a bar of the peak of bytes per
    device, and below it the parts, largest first, each with its bytes per device and its colour in the bar.

    >>> view = mm.show_placement(model)
    >>> draw_placement(view.title, view.submeshes, view.memory).savefig("placement.png")
    """
    from matplotlib.figure import Figure  # slow to import

    columns = min(COLUMNS, len(boxes))
    rows = -(-len(boxes) // columns)
    height = HEAD + LINE * max(len(box.main_parts()) for box in boxes) + PAD
    width = max(columns * (BOX + GAP) + GAP, 0.4 + 0.075 * len(title))
    figure = Figure(figsize=(width, TITLE + rows * (height + GAP)), dpi=120)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(TITLE + rows * (height + GAP), 0))
    axes.axis("off")
    axes.text(GAP, TITLE / 2, title, fontsize=10, va="center")
    full = memory if memory is not None else max(box.most for box in boxes)
    ranks = _ranks(boxes)
    for n, box in enumerate(boxes):
        x, y = GAP + n % columns * (BOX + GAP), TITLE + n // columns * (height + GAP)
        _draw_box(axes, box, x, y, height, full, memory, ranks)
    return figure


def _draw_box(
    axes: Axes,
    box: Submesh,
    x: float,
    y: float,
    height: float,
    full: int,
    memory: int | None,
    ranks: dict[str, int],
) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    over = memory is not None and box.most > memory
    colours = OVER if over else FILLED
    left, right = x + PAD, x + BOX - PAD
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            BOX,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor="#ffffff",
            edgecolor=OVER[0] if over else EDGE,
            linewidth=1.4 if over else 0.9,
        )
    )
    bar = right - left
    room = int((bar - SMALL * len(box.axes)) / NAME)
    axes.text(left, y + 0.17, _shorten(box.name, room), fontsize=9.5, fontweight="bold", va="center")
    axes.text(right, y + 0.17, box.axes, fontsize=7, color=GREY, va="center", ha="right")

    devices = _shorten(box.device_text, int(bar / SMALL))
    axes.text(left, y + 0.42, devices, fontsize=7.5, color=GREY, va="center")
    side, step = 0.1, 0.125
    if SMALL * len(devices) + step * len(box.devices) <= bar:  # else the numbers must do
        for n in range(len(box.devices)):
            at = right - side - n * step
            axes.add_patch(
                Rectangle(
                    (at, y + 0.42 - side / 2), side, side, facecolor="#ffffff", edgecolor=GREY, linewidth=0.8
                )
            )

    axes.add_patch(Rectangle((left, y + 0.56), bar, 0.13, facecolor=EMPTY, edgecolor="none"))
    start, scale = left, bar / max(full, box.most)
    for n, part in enumerate(box.main_parts()):
        colour = colours[ranks.get(part.group, len(colours) - 1)]
        length = part.bytes * scale
        axes.add_patch(Rectangle((start, y + 0.56), length, 0.13, facecolor=colour, edgecolor="none"))
        start += length
        at = y + HEAD + (n + 0.4) * LINE
        axes.add_patch(Rectangle((left, at - 0.045), 0.09, 0.09, facecolor=colour, edgecolor="none"))
        axes.text(left + 0.16, at, _shorten(part.name, 25), fontsize=7.5, va="center")
        axes.text(right, at, bytes_text(part.bytes), fontsize=7.5, va="center", ha="right")
    if over and memory is not None:
        limit = left + memory * scale
        axes.plot([limit, limit], [y + 0.52, y + 0.73], color="#000000", linewidth=1.2)
    axes.text(
        left,
        y + 0.83,
        box.memory_text(memory),
        fontsize=7.5,
        va="center",
        color=OVER[0] if over else "#222222",
    )


def _ranks(boxes: Sequence[Submesh]) -> dict[str, int]:
    """The rank of each part by bytes, by which it has its colour, the same in every box."""
    total: Counter[str] = Counter()
    for box in boxes:
        for part in box.parts:
            total[part.group] += part.bytes * len(box.devices)
    return {group: n for n, (group, _) in enumerate(total.most_common(len(FILLED) - 1))}


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: math.ceil(length / 2)] + "…" + text[-(length // 2) :]
