"""``mm.timeline``: the timeline of a program as text, as a picture, or as a trace."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmnnx.inspect.chrome_trace import chrome_trace
from mmnnx.inspect.figure_bytes import PICTURES, picture_bytes
from mmnnx.inspect.timeline_picture import draw_timeline
from mmnnx.inspect.timeline_rows import mesh_rows
from mmnnx.inspect.timeline_text import TimelineText, draw_text
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


@dataclass(frozen=True)
class TimelineView:
    """A timeline that shows itself: a picture in a notebook, text in `str()`, coloured text in `rich.print`.

    Attributes:
      timeline: what is shown.
      title: to put above it.

    Example:
      >>> view = mm.timeline(program, title="one step")
      >>> view.save("step.png")
      >>> f"{view.timeline.bubble:.0%}"
      '43%'
    """

    timeline: Timeline
    title: str = ""

    @functools.cached_property
    def figure(self) -> Figure:
        """The picture: see `mmnnx.inspect.draw_timeline`."""
        return draw_timeline(self.timeline, title=self.title)

    def trace(self) -> dict[str, Any]:
        """The Chrome trace, which https://ui.perfetto.dev opens: see `mmnnx.inspect.chrome_trace`."""
        return chrome_trace(self.timeline)

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
    ) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": str(self)}
        if len(self.timeline.events) > MAX_SVG_EVENTS:
            bundle["image/png"] = picture_bytes(self.figure, ".png")
        else:
            bundle["image/svg+xml"] = picture_bytes(self.figure, ".svg").decode()
        return bundle

    def __str__(self) -> str:
        return draw_text(self.timeline, title=self.title).plain

    def __rich__(self) -> TimelineText:
        return TimelineText(self.timeline, self.title)


def timeline(x: Timeline | Simulates | Measured, *, title: str = "") -> TimelineView:
    """Shows the timeline of a program (simulated), of a profile (measured), or a `Timeline`.

    Raises:
      TypeError: for anything else.
      ValueError: for a timeline in which nothing takes time.

    Example:
      >>> mm.timeline(train_step.program(model, optimizer, batch)).save("step.svg")
    """
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
    return TimelineView(found, title)


def check_suffix(path: str | Path) -> None:
    """Raises ValueError for a path that `TimelineView.save` does not write."""
    if Path(path).suffix.lower() not in (*PICTURES, ".json"):
        raise ValueError(
            f"{path}: the file name must end in {', '.join(PICTURES)} (a picture) "
            "or .json (a trace for Perfetto)"
        )
