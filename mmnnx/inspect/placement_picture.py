"""The picture of a placement: submeshes as cards with their devices, contents, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mmnnx.inspect.colours import LIMIT, memory_colour, text_colour
from mmnnx.inspect.figure_style import TEXT, WIDTH, Look, styled
from mmnnx.inspect.submesh import Part, Submesh
from mmnnx.inspect.units import bytes_text
from mmnnx.printable import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: the picture is laid out in them, so that text and cards keep their proportions at every size.
GAP, PAD, LINE, TITLE = 0.16, 0.12, 0.185, 0.42
HEAD = 1.08  # name, devices and bar, above the list of parts
AT, BAR = 0.54, 0.2  # where the bar begins, and its height
LETTER, BOLD = 0.068, 0.098
"""The average width of a letter, in inches: of text, and of a name."""


def draw_placement(title: str, boxes: Sequence[Submesh], memory: int | None, dark: bool = False) -> Figure:
    """A card for each submesh, in order of their devices.

    On a card: the names of its tasks, its axes, a square for each device, a bar of the peak of bytes per
    device with a line at the limit, and below it the parts, each with its bytes per device and its colour in
    the bar, in one order on all cards: weights, optimizer state, what a step adds to them. Bytes are
    on the bar where they fit.

    >>> view = mm.show_placement(model)
    >>> draw_placement(view.title, view.submeshes, view.memory).savefig("placement.png")
    """
    from matplotlib.figure import Figure  # slow to import

    columns = 2 if len(boxes) in (1, 2, 4) else 3
    rows = -(-len(boxes) // columns)
    box_width = (WIDTH - GAP) / columns - GAP
    height = HEAD + LINE * max(len(_listed(box)) for box in boxes) + PAD
    with styled(dark) as look:
        figure = Figure(figsize=(WIDTH, TITLE + rows * (height + GAP)))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(TITLE + rows * (height + GAP), 0))
        axes.axis("off")
        axes.text(
            GAP, TITLE / 2, shortened(title, int((WIDTH - 2 * GAP) / 0.08)), fontsize=TEXT + 1, va="center"
        )
        full = max([box.peak for box in boxes] + ([] if memory is None else [memory]))
        ranks = _ranks(boxes)
        for n, box in enumerate(boxes):
            x, y = GAP + n % columns * (box_width + GAP), TITLE + n // columns * (height + GAP)
            _draw_card(axes, box, (x, y, box_width, height), full, memory, ranks, look)
    return figure


def _draw_card(
    axes: Axes,
    box: Submesh,
    frame: tuple[float, float, float, float],
    full: int,
    memory: int | None,
    ranks: Mapping[str, tuple[int, int]],
    look: Look,
) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    x, y, width, height = frame
    over = memory is not None and box.peak > memory
    left, right, bar = x + PAD, x + width - PAD, width - 2 * PAD
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=look.paper,
            edgecolor=LIMIT if over else look.faint,
            linewidth=1.2 if over else 0.6,
        )
    )
    room = int((bar - LETTER * len(box.axes)) / BOLD)
    axes.text(left, y + 0.17, shortened(box.name, room), fontsize=TEXT + 1, fontweight="bold", va="center")
    axes.text(right, y + 0.17, box.axes, color=look.faint, va="center", ha="right")

    devices = shortened(box.device_text, int(bar / LETTER)) if box.device_text != box.name else ""
    axes.text(left, y + 0.39, devices, color=look.faint, va="center")
    side, step = 0.1, 0.125
    if LETTER * len(devices) + step * len(box.devices) <= bar:  # else the numbers must do
        for n in range(len(box.devices)):
            corner = (right - side - n * step, y + 0.39 - side / 2)
            axes.add_patch(
                Rectangle(corner, side, side, facecolor="none", edgecolor=look.faint, linewidth=0.7)
            )

    axes.add_patch(Rectangle((left, y + AT), bar, BAR, facecolor=look.pale, edgecolor="none"))
    start, scale = left, bar / max(full, 1)
    for n, part in enumerate(_listed(box)):
        colour = memory_colour(part.kind, *ranks.get(part.group, (0, 1)), too_much=over)
        length, size = part.bytes * scale, bytes_text(part.bytes)
        axes.add_patch(Rectangle((start, y + AT), length, BAR, facecolor=colour, edgecolor="none"))
        if LETTER * len(size) + 0.06 < length:
            middle = (start + length / 2, y + AT + BAR / 2)
            axes.text(*middle, size, color=text_colour(colour), ha="center", va="center_baseline", gid="bar")
        start += length
        at = y + HEAD + (n + 0.4) * LINE
        axes.add_patch(Rectangle((left, at - 0.045), 0.09, 0.09, facecolor=colour, edgecolor="none"))
        name = shortened(part.name, int((bar - 0.3) / LETTER) - len(size))
        axes.text(left + 0.16, at, name, va="center")
        axes.text(right, at, size, va="center", ha="right")
    if memory is not None:
        limit = left + memory * scale
        axes.plot([limit, limit], [y + AT - 0.04, y + AT + BAR + 0.04], color=look.ink, linewidth=1.4)
    text = shortened(box.memory_text(memory), int(bar / 0.06))
    axes.text(left, y + 0.87, text, va="center", color=LIMIT if over else look.ink)


def _listed(box: Submesh) -> tuple[Part, ...]:
    """The lines of a card."""
    return (*box.main_parts(), *box.step)


def _ranks(boxes: Sequence[Submesh]) -> dict[str, tuple[int, int]]:
    """For each listed part, its number among those of its kind, and how many these are: for its colour."""
    kinds: dict[str, dict[str, None]] = {}
    for box in boxes:
        for part in box.main_parts():
            kinds.setdefault(part.kind, {})[part.group] = None
    return {group: (n, len(groups)) for groups in kinds.values() for n, group in enumerate(groups)}
