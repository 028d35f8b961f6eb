"""How pictures of timelines show phases: names, letters and colours."""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    """How a phase is shown.

    Attributes:
      letter: in the terminal.
      dark, light: its colour on the first and on the last of the stages of one mesh.
      trace_colour: name of its colour in chrome://tracing.
    """

    letter: str
    dark: str
    light: str
    trace_colour: str


# Each phase has a range of lightness to itself (CIE L* 37-49, 55-63, 70-78, 84-91; 25 outside autodiff), so
# that phases are told apart in greyscale and by colour-blind readers, whatever the stage.
LOOKS = {
    "forward": Look("F", "#005998", "#0a7abb", "rail_response"),
    "backward": Look("B", "#de5837", "#e87a4d", "rail_animation"),
    "backward-input": Look("I", "#e19e39", "#ebb959", "rail_idle"),
    "backward-weight": Look("W", "#a1dfc4", "#c3efd7", "rail_load"),
    "none": Look("X", "#3b3b3b", "#3b3b3b", "grey"),
    "transfer": Look("T", "#9a9a9a", "#9a9a9a", "generic_work"),
}


def words(phase: str) -> str:
    """What legends call a phase."""
    return "outside autodiff" if phase == "none" else phase


def shade(phase: str, nth: int = 0, of: int = 1) -> str:
    """The colour, as "#rrggbb", of a phase on the nth (from 0) of the stages that one mesh has.

    >>> shade("forward", 0, 2), shade("forward", 1, 2)
    ('#005998', '#0a7abb')
    """
    look, part = LOOKS[phase], nth / max(1, of - 1)
    return "#" + "".join(
        f"{round(d + part * (b - d)):02x}" for d, b in zip(_channels(look.dark), _channels(look.light))
    )


def ink(colour: str) -> str:
    """Black or white, whichever is legible on a colour."""
    red, green, blue = _channels(colour)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 125 else "#000000"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
