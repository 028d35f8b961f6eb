"""The picture of a pipeline in a terminal."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from mmnnx.inspect.phase_styles import LOOKS, ink, shade, words
from mmnnx.inspect.timeline_rows import period, rows, stage_ranks
from mmnnx.mpmd.ir.timeline import Event, Timeline


@dataclass(frozen=True)
class Drawing:
    """A timeline as `rich` shows it: as wide as the terminal allows."""

    timeline: Timeline
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield draw_text(self.timeline, title=self.title, width=options.max_width)


def draw_text(timeline: Timeline, *, title: str = "", width: int = 100) -> Text:
    """Meshes as rows, time along x, in lines of `width` columns at most.

    A box is the letter of its phase, with the number of the microbatch where there is room; small letters are
    every other stage of a mesh that has several. Blank is idle. Where boxes are narrower than columns, these
    show phases in proportion to their time. Coloured by phase where `rich` shows colours.

    Raises:
      ValueError: when nothing takes time.

    >>> stages = Stages.chain(range(2))
    >>> print(draw_text(simulate(get_schedule("1f1b").table(stages, 3), stages)))
    mesh0 F0F1    B0--F2B1--    B2--
    mesh1   F0B0--F1B1--F2B2--
    F forward  B backward  blank: idle, 25.0% of a period of 12 units
    """
    by_mesh = rows(timeline)
    ranks = stage_ranks(by_mesh)
    events = [e for mine in by_mesh.values() for e in mine]
    names = max(map(len, by_mesh))
    digits = max((len(str(e.microbatch)) for e in events if e.microbatch is not None), default=0)
    began = min(e.start for e in events)
    columns, whole = _columns(events, max(8, width - names - 1), 1 + digits)
    text = Text(no_wrap=True, overflow="crop")
    if title:
        text.append(f"{title}\n", "bold")
    for mesh, mine in by_mesh.items():
        text.append(mesh.ljust(names) + " ")
        done = 0
        for e, first, last in (_boxes if whole else _samples)(mine, began, columns):
            nth, of = ranks[mesh, e.stage]
            colour = shade(e.phase, nth, of)
            label = LOOKS[e.phase].letter.lower() if nth % 2 else LOOKS[e.phase].letter
            if whole:
                number = "" if e.microbatch is None else str(e.microbatch)
                fits = (e.end - e.start) * columns > 0.99 + len(number)  # so boxes of a length look alike
                label = (label + number if fits else label).ljust(last - first, "-")
            text.append(" " * (first - done))
            text.append(label, Style(color=ink(colour), bgcolor=colour))
            done = last
        text.append("\n")
    text.append_text(_legend(timeline, events, any(of > 1 for _, of in ranks.values()), width))
    return text


def _legend(timeline: Timeline, events: list[Event], several: bool, width: int) -> Text:
    """Names the phases, and says how much is idle, in lines of `width` columns at most."""
    shown = {e.phase for e in events}
    parts = [
        Text.assemble((look.letter, Style(color=ink(look.dark), bgcolor=look.dark)), f" {words(phase)}")
        for phase, look in LOOKS.items()
        if phase in shown
    ]
    if several:
        parts.append(Text("small: every other stage of a mesh"))
    parts.append(Text(f"blank: idle, {timeline.bubble:.1%} of a period of {period(timeline)}"))
    legend, used = Text(), 0
    for part in parts:
        gap = "" if not used else "  " if used + 2 + len(part) <= width else "\n"
        used = len(part) + (used + 2 if gap == "  " else 0)
        legend.append(gap).append_text(part)
    return legend


def _columns(events: list[Event], room: int, wanted: int) -> tuple[float, bool]:
    """Columns for a unit of time, and whether boxes are whole numbers of them (else: many boxes to a column).

    Where all lengths are multiples of the shortest, boxes of a length are equally wide, with no more columns
    than a letter and a number need, `wanted`. Others share all the room there is.
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
    """(event, its first column, the column after its last) of those that are a column wide at least."""
    found = [
        (e, math.floor((e.start - began) * columns + 0.5), math.floor((e.end - began) * columns + 0.5))
        for e in mine
    ]
    return [(e, first, last) for e, first, last in found if last > first]


def _samples(mine: list[Event], began: float, columns: float) -> list[tuple[Event, int, int]]:
    """(event, column, column + 1) of one event for each column that is not shown as idle.

    What is shown of the many that a column stands for is what has been shown least for its time so far: so
    over a few columns, phases and idle time have their true shares.
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
