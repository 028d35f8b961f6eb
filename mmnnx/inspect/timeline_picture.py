"""The picture of a pipeline, as in the papers: meshes as rows, time along x."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from mmnnx.inspect.bytes_picture import draw_bytes
from mmnnx.inspect.colours import text_colour
from mmnnx.inspect.figure_style import LONGEST_NAME, TEXT, WIDTH, Look, settle_ticks, styled
from mmnnx.inspect.phase_styles import STYLES, phase_colour, phase_name
from mmnnx.inspect.timeline_rows import Scale, also_blank, headline, mesh_rows, scale_of, stage_ranks
from mmnnx.mpmd.ir.timeline import Event, Timeline
from mmnnx.printable import printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    Entry = Line2D | Patch

HEIGHT = 9.0  # inches that all rows share at most
BYTES = 1.1  # inches of the bytes below them
MARGIN = 1.5  # inches beside the rows, about: names on the left, busy shares on the right
MAX_VECTOR_EVENTS = 10_000  # vector formats hold more of them as an image
MAX_ARROWS = 600  # more transfers are lines without heads
LONGEST_TITLE = 50  # characters, beside the schedule and its figures
SMALLEST = 5.0  # points: smaller numbers are left out
HALF = 0.36  # of the height of a box, in rows


def draw_timeline(timeline: Timeline, *, title: str = "", dark: bool = False) -> Figure:
    """Meshes as rows, time along x; boxes coloured by phase and numbered by microbatch; the rest is bubble.

    Transfers are arrows from mesh to mesh. On the right is the share of the steady-state step time
    (`Timeline.period`) in which a mesh runs something. Below are the bytes of live arrays on each mesh, if
    the timeline knows them. The title has the schedule and the bubble. Rows are in the order in which
    microbatches first reach the meshes. On a mesh with several stages later ones are lighter. Events that
    take no time are not drawn, and numbers that do not fit their boxes are left out.

    Args:
      dark: for dark paper.

    Raises:
      ValueError: when nothing takes time.

    >>> draw_timeline(program.simulate()).savefig("timeline.png")
    """
    return draw_timelines({title: timeline}, dark=dark)


def draw_timelines(timelines: Mapping[str, Timeline], *, dark: bool = False) -> Figure:
    """As `draw_timeline`, several by their titles, one below the other, each with its own scale of time.

    >>> profile = program.profile(model, optimizer, batch)
    >>> figure = draw_timelines({"simulated": program.simulate(), "measured": profile.timeline})
    """
    from matplotlib.figure import Figure  # slow to import

    with styled(dark) as look:
        heights: list[float] = []
        for timeline in timelines.values():
            rows = len(mesh_rows(timeline))
            heights.append(min(0.34, HEIGHT / rows) * rows + 0.1)
            heights += [BYTES] if timeline.held_bytes else []
        figure = Figure(
            figsize=(WIDTH, sum(heights) + 0.5 * len(heights) + 0.35 * len(timelines)), layout="constrained"
        )
        panels = iter(figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0])
        entries: dict[str, Entry] = {}
        for title, timeline in timelines.items():
            axes, scale = next(panels), scale_of(timeline)
            title = headline(timeline, shortened(printable(title), LONGEST_TITLE))
            entries |= draw_rows(axes, timeline, title, look, dark)
            if timeline.held_bytes:
                axes.tick_params(labelbottom=False)
                axes.set_xlabel("")
                axes = next(panels)
                draw_bytes(axes, timeline, list(mesh_rows(timeline)), scale, dark)
                settle_ticks(axes, look)
                axes.set_xlabel(scale.label)
        draw_legend(figure, entries)
        return figure


def draw_rows(axes: Axes, timeline: Timeline, title: str, look: Look, dark: bool) -> dict[str, Entry]:
    """The rows of a timeline, with transfers; returns the entries of the legend, by their labels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    by_mesh, scale = mesh_rows(timeline), scale_of(timeline)
    phases = _draw_boxes(axes, timeline, by_mesh, scale, look, dark)
    entries: dict[str, Entry] = {
        phase_name(phase, alone=len(phases) == 1): Patch(color=phase_colour(phase, dark=dark))
        for phase in phases
    }
    if any(of > 1 for _, of in stage_ranks(by_mesh).values()):
        entries["lighter: a later stage of the mesh"] = Patch(color=phase_colour(phases[0], 1, 2, dark))
    if _draw_transfers(axes, timeline, list(by_mesh), scale, look):
        entries["transfer"] = Line2D([], [], color=look.faint, lw=0.8, marker=">", ms=3)
    entries[f"bubble{also_blank(timeline)}"] = Patch(facecolor=look.paper, edgecolor=look.faint, lw=0.6)
    axes.set_title(printable(title))
    axes.set_xlabel(scale.label)
    settle_ticks(axes, look)
    axes.tick_params(axis="y", length=0, labelcolor=look.ink)
    return entries


def draw_legend(figure: Figure, entries: Mapping[str, Entry]) -> None:
    """A line below all panels, phases first."""
    order = [phase_name("none", alone=True), *map(phase_name, STYLES)]
    labels = sorted(entries, key=lambda label: order.index(label) if label in order[:-1] else len(order))
    figure.legend(
        handles=[entries[label] for label in labels],
        labels=labels,
        loc="outside lower left",
        ncols=len(labels),
        handlelength=1.4,
        columnspacing=1.4,
    )


def _draw_boxes(
    axes: Axes, timeline: Timeline, by_mesh: Mapping[str, list[Event]], scale: Scale, look: Look, dark: bool
) -> list[str]:
    """The boxes, the names of the rows, and how busy each is; returns the phases that there are."""
    from matplotlib.collections import PolyCollection

    ranks = stage_ranks(by_mesh)
    events = [(y, e) for y, mine in enumerate(by_mesh.values()) for e in mine]
    points = (WIDTH - _margin(by_mesh)) * 72 / (scale.span + scale.room)  # in a unit of time
    row = min(0.34, HEIGHT / len(by_mesh))
    phases = [phase for phase in STYLES if any(e.phase == phase for _, e in events)]
    for phase in phases:
        found = [
            (y, e, phase_colour(phase, *ranks[e.mesh, e.stage], dark)) for y, e in events if e.phase == phase
        ]
        collection = PolyCollection(
            [
                [(x0, y - HALF), (x1, y - HALF), (x1, y + HALF), (x0, y + HALF)]
                for y, e, _ in found
                for x0, x1 in [(scale(e.start), scale(e.end))]
            ],
            facecolors=[colour for *_, colour in found],
            edgecolors=look.paper,
            linewidths=[min(0.7, 0.1 * (scale(e.end) - scale(e.start)) * points) for _, e, _ in found],
            rasterized=len(events) > MAX_VECTOR_EVENTS,
            label=phase,
            zorder=2,
        )
        axes.add_collection(collection)
        digits = max((len(str(e.microbatch)) for _, e, _ in found if e.microbatch is not None), default=1)
        for y, e, colour in found:
            x0, x1 = scale(e.start), scale(e.end)
            size = min(TEXT, 0.85 * (x1 - x0) * points / (0.64 * digits), 50 * row)
            if e.microbatch is not None and size >= SMALLEST:
                axes.text(
                    (x0 + x1) / 2,
                    y,
                    str(e.microbatch),
                    ha="center",
                    va="center_baseline",
                    fontsize=size,
                    color=text_colour(colour),
                    clip_on=True,
                )
    every = -(-10 * len(by_mesh) // round(HEIGHT * 72))  # a name needs about ten points of height
    names = [shortened(printable(name), LONGEST_NAME) for name in by_mesh]
    places = range(0, len(by_mesh), every)
    axes.set(xlim=(0, scale.span + scale.room), ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(places, names[::every])
    axes.spines["left"].set_visible(False)
    busy = [sum(e.end - e.start for e in mine) / timeline.period for mine in by_mesh.values()]
    right = axes.secondary_yaxis("right")
    right.set_yticks(places, [f"{share:.0%} busy" for share in busy[::every]])
    right.spines["right"].set_visible(False)
    right.tick_params(length=0, colors=look.faint, labelsize=TEXT)
    return phases


def _margin(names: Collection[str]) -> float:
    """Inches beside the rows, which longer names take, on the left and in the legend of the bytes."""
    return MARGIN + 0.16 * max(0, min(LONGEST_NAME, max(map(len, names))) - 6)


def _draw_transfers(axes: Axes, timeline: Timeline, rows: list[str], scale: Scale, look: Look) -> bool:
    """An arrow for each, from the row that has an array to the row that it is sent to; if there are any."""
    from matplotlib.collections import LineCollection

    number = {name: y for y, name in enumerate(rows)}
    near = scale.span / (WIDTH - _margin(rows)) / 36  # two points
    found: dict[tuple[str, int, int], tuple[float, float, float, float]] = {}  # what goes together is one
    for e in timeline.transfers:
        source, _, target = e.mesh.partition(" -> ")
        if source in number and target in number:
            a, b = number[source], number[target]
            down = 1 if b > a else -1
            x0, x1 = scale(e.start), scale(e.end)
            where = e.mesh, round(x0 / near), round(x1 / near)
            found.setdefault(where, (x0, a + down * HALF, x1, b - down * HALF))
    arrows = found.values()
    if not arrows:
        return False
    axes.add_collection(
        LineCollection(
            [[(x0, y0), (x1, y1)] for x0, y0, x1, y1 in arrows],
            colors=look.faint,
            linewidths=0.7 if len(arrows) <= MAX_ARROWS else 0.3,
            label="transfer",
            rasterized=len(arrows) > MAX_VECTOR_EVENTS,
            clip_on=False,  # some are at the very end
            zorder=1,
        )
    )
    if len(arrows) <= MAX_ARROWS:
        for marker, down in (("v", True), ("^", False)):
            heads = [(x1, y1 - 0.05 if down else y1 + 0.05) for _, y0, x1, y1 in arrows if (y1 > y0) == down]
            xs, ys = [x for x, _ in heads], [y for _, y in heads]
            axes.scatter(xs, ys, s=5, marker=marker, color=look.faint, lw=0, clip_on=False, zorder=3)
    return True
