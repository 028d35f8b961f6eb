"""``mm.timeline``: the timeline of a program as text, as a picture, or as a trace."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmnnx.inspect.chrome_trace import chrome_trace
from mmnnx.inspect.figure_bytes import PICTURES, picture_bundle, picture_bytes
from mmnnx.inspect.timeline_picture import draw_timelines
from mmnnx.inspect.timeline_rows import mesh_rows
from mmnnx.inspect.timeline_text import TimelineText, draw_text
from mmnnx.inspect.units import time_text
from mmnnx.mpmd.ir.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SVG_EVENTS = 800  # a notebook shows more of them as PNG, which is smaller and faster to show


class Simulates(Protocol):
    """Such as a `Program`."""

    def simulate(self) -> Timeline: ...


class Measured(Protocol):
    """Such as a `Profile`."""

    @property
    def timeline(self) -> Timeline: ...

    @property
    def seconds(self) -> float: ...


@dataclass(frozen=True)
class TimelineView:
    """A timeline that shows itself: a picture in a notebook, text in a terminal, coloured in `rich.print`.

    Attributes:
      timeline: what is shown.
      title: to put above it; the schedule and the bubble follow.
      measured: a profile of the same program, whose timeline is shown below.
      dark: whether the picture is for dark paper.

    Example:
      >>> view = mm.timeline(program, title="one step")
      >>> view.save("step.png")
      >>> f"{view.timeline.bubble:.0%}"
      '43%'
    """

    timeline: Timeline
    title: str = ""
    measured: Measured | None = None
    dark: bool = False

    @functools.cached_property
    def figure(self) -> Figure:
        """The picture: see `mmnnx.inspect.draw_timelines`."""
        return draw_timelines(self._titled(), dark=self.dark)

    def _titled(self) -> Mapping[str, Timeline]:
        if self.measured is None:
            return {self.title: self.timeline}
        before = f"{self.title}, " if self.title else ""
        second = f"{before}measured part by part (a whole step: {time_text(self.measured.seconds)})"
        return {f"{before}simulated": self.timeline, second: self.measured.timeline}

    def trace(self) -> dict[str, Any]:
        """The Chrome trace, which https://ui.perfetto.dev opens: see `mmnnx.inspect.chrome_trace`.

        Of two timelines it is that of the measured one.
        """
        return chrome_trace(self.timeline if self.measured is None else self.measured.timeline)

    def save(self, path: str | Path) -> None:
        """Writes the picture (.svg, .png or .pdf) or the trace (.json).

        Raises:
          ValueError: for a path that ends otherwise.
        """
        check_suffix(path)
        path = Path(path)
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps(self.trace()))
        else:
            path.write_bytes(picture_bytes(self.figure, path.suffix.lower()))

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> Any:
        count = sum(len(timeline.events) for timeline in self._titled().values())
        return picture_bundle(self.figure, str(self), ".png" if count > MAX_SVG_EVENTS else ".svg")

    def __str__(self) -> str:
        return "\n".join(draw_text(timeline, title=title).plain for title, timeline in self._texts.items())

    __repr__ = __str__  # what a terminal shows

    def __rich__(self) -> TimelineText:
        return TimelineText(self._texts)

    @property
    def _texts(self) -> Mapping[str, Timeline]:
        """By the titles that text has, in which the schedule stands for the title if there is none."""
        named = self._titled()
        return {title or timeline.schedule: timeline for title, timeline in named.items()}


def timeline(
    x: Timeline | Simulates | Measured,
    measured: Measured | None = None,
    *,
    title: str = "",
    dark: bool = False,
) -> TimelineView:
    """Shows the timeline of a program (simulated), of a profile (measured), or a `Timeline`.

    Args:
      x: what to show.
      measured: a profile of the same program, to show below it.
      title: to put above; the schedule and the bubble follow.
      dark: draws for dark paper.

    Raises:
      TypeError: for anything else.
      ValueError: for a timeline in which nothing takes time.

    Example:
      >>> program = train_step.program(model, optimizer, batch)
      >>> mm.timeline(program).save("step.svg")
      >>> view = mm.timeline(program, program.profile(model, optimizer, batch), title="four stages")
    """
    if measured is not None and not hasattr(measured, "seconds"):
        raise TypeError(f"measured= is a profile, as program.profile(*args) makes it, not {measured!r}")
    return TimelineView(_timeline_of(x), title, measured, dark)


def _timeline_of(x: Any) -> Timeline:
    if isinstance(x, Timeline):
        found: Any = x
    else:
        found = x.timeline if hasattr(x, "timeline") else x.simulate() if hasattr(x, "simulate") else None
    if not isinstance(found, Timeline):
        raise TypeError(
            f"mm.timeline shows a Program, a profile or a Timeline, not {type(x).__name__}; "
            "the Program of a function f that is mm.jit-ed is f.program(*args)"
        )
    mesh_rows(found)  # raises for one with nothing to draw
    return found


def check_suffix(path: str | Path) -> None:
    """Raises ValueError for a path that `TimelineView.save` does not write."""
    if Path(path).suffix.lower() not in (*PICTURES, ".json"):
        raise ValueError(
            f"{path}: the file name must end in {', '.join(PICTURES)} (a picture) "
            "or .json (a trace for Perfetto)"
        )
