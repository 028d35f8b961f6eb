"""A timeline as text."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from mmnnx.inspect.colours import text_colour
from mmnnx.inspect.phase_styles import STYLES, phase_colour, phase_name
from mmnnx.inspect.timeline_rows import also_blank, mesh_rows, stage_ranks, step_time_text
from mmnnx.mpmd.ir.timeline import Event, Timeline
from mmnnx.printable import printable


@dataclass(frozen=True)
class TimelineText:
    """Timelines by their titles as `rich` shows them: as wide as the terminal allows."""

    timelines: Mapping[str, Timeline]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for title, timeline in self.timelines.items():
            yield draw_text(timeline, title=title, width=options.max_width)


def draw_text(timeline: Timeline, *, title: str = "", width: int = 100) -> Text:
    """Meshes as rows, time along x, in lines of `width` columns at most.

    A box is the letter of its phase, with the number of the microbatch if there is room. On a mesh with
    several stages every other one has small letters. Blank is bubble. If boxes are narrower than columns, the
    columns show phases in proportion to their time. Coloured by phase where `rich` shows colours.

    Raises:
      ValueError: when nothing takes time.

    Example:
      >>> from mmnnx.mpmd.schedule import get_schedule, simulate
      >>> two = mm.Stages.chain(range(2))
      >>> print(draw_text(simulate(get_schedule("1f1b").table(two, 3), two)))
      mesh0 F0F1    B0--F2B1--    B2--
      mesh1   F0B0--F1B1--F2B2--
      F forward  B backward  blank: bubble, 25.0%; steady-state step time 12 units
    """
    by_mesh = mesh_rows(timeline)
    ranks = stage_ranks(by_mesh)
    events = [e for mine in by_mesh.values() for e in mine]
    names = max(len(printable(mesh)) for mesh in by_mesh)
    digits = max((len(str(e.microbatch)) for e in events if e.microbatch is not None), default=0)
    began = min(e.start for e in events)
    columns, whole = _columns(events, max(8, width - names - 1), 1 + digits)
    text = Text(no_wrap=True, overflow="crop")
    if title:
        text.append(f"{printable(title)}\n", "bold")
    for mesh, mine in by_mesh.items():
        text.append(printable(mesh).ljust(names) + " ")
        done = 0
        for e, first, last in (_boxes if whole else _samples)(mine, began, columns):
            nth, of = ranks[mesh, e.stage]
            colour = phase_colour(e.phase, nth, of)
            label = STYLES[e.phase].letter.lower() if nth % 2 else STYLES[e.phase].letter
            if whole:
                number = "" if e.microbatch is None else str(e.microbatch)
                fits = (e.end - e.start) * columns > 0.99 + len(number)  # equal for boxes of equal length
                label = (label + number if fits else label).ljust(last - first, "-")
            text.append(" " * (first - done))
            text.append(label, Style(color=text_colour(colour), bgcolor=colour))
            done = last
        text.append("\n")
    text.append_text(_legend(timeline, events, any(of > 1 for _, of in ranks.values()), width))
    return text


def _legend(timeline: Timeline, events: list[Event], several: bool, width: int) -> Text:
    """The names of the phases, the bubble and the step time, in lines of `width` columns at most."""
    shown = {e.phase for e in events}
    parts = [
        Text.assemble(
            (style.letter, Style(color=text_colour(style.dark), bgcolor=style.dark)),
            f" {phase_name(phase, alone=len(shown) == 1)}",
        )
        for phase, style in STYLES.items()
        if phase in shown
    ]
    if several:
        parts += map(Text, textwrap.wrap("small: every other stage of a mesh", width))
    blank = f"blank: bubble, {timeline.bubble:.1%}{also_blank(timeline)}"
    blank += f"; steady-state step time {step_time_text(timeline)}"
    parts += map(Text, textwrap.wrap(blank, width))
    legend, used = Text(), 0
    for part in parts:
        gap = "" if not used else "  " if used + 2 + len(part) <= width else "\n"
        used = len(part) + (used + 2 if gap == "  " else 0)
        legend.append(gap).append_text(part)
    return legend


def _columns(events: list[Event], room: int, wanted: int) -> tuple[float, bool]:
    """Columns per unit of time, and whether a box has at least a column (otherwise many boxes share one).

    If all lengths are multiples of the shortest, boxes of one length are equally wide, and no wider than a
    letter and a number need, `wanted`. Otherwise they take all the room there is.
    """
    span = max(e.end for e in events) - min(e.start for e in events)
    lengths = sorted(e.end - e.start for e in events if e.microbatch is not None)
    lengths = lengths or sorted(e.end - e.start for e in events if e.end > e.start)  # no loop
    common = lengths[len(lengths) // 4]
    columns = room / span
    if columns * common < 1:
        return columns, False
    if all(abs(x / lengths[0] - round(x / lengths[0])) < 1e-6 for x in lengths):
        even = math.floor(min(columns, wanted / common) * lengths[0] + 1e-9) / lengths[0]
        return even or columns, True
    return columns, True


def _boxes(mine: list[Event], began: float, columns: float) -> list[tuple[Event, int, int]]:
    """(event, its first column, the column after its last) of events at least a column wide."""
    found = [
        (e, math.floor((e.start - began) * columns + 0.5), math.floor((e.end - began) * columns + 0.5))
        for e in mine
    ]
    return [(e, first, last) for e, first, last in found if last > first]


def _samples(mine: list[Event], began: float, columns: float) -> list[tuple[Event, int, int]]:
    """(event, column, column + 1) of one event for each column that is not shown as bubble.

    Of the events in a column, the one is shown whose phase has been shown least in proportion to its time so
    far. Over a few columns, phases and bubble have their true shares.
    """
    shares: defaultdict[int, defaultdict[Event | None, float]] = defaultdict(lambda: defaultdict(float))
    first_of: dict[tuple[str, int | None], Event] = {}  # stands for all of its phase and stage
    for e in mine:
        like = first_of.setdefault((e.phase, e.stage), e)
        start, end = (e.start - began) * columns, (e.end - began) * columns
        for column in range(math.floor(start), math.ceil(end)):
            shares[column][like] += min(end, column + 1) - max(start, column)
    owed: defaultdict[Event | None, float] = defaultdict(float)
    found = []
    for column, share in sorted(shares.items()):
        share[None] = max(0.0, 1 - sum(share.values()))
        for kind, part in share.items():
            owed[kind] += part
        shown = max((kind for kind in share if share[kind] > 0), key=owed.__getitem__)
        owed[shown] -= 1
        if shown is not None:
            found.append((shown, column, column + 1))
    return found
