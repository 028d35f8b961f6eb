"""How pictures of timelines show phases: names, letters and colours."""

from __future__ import annotations

from typing import NamedTuple

from mmnnx.inspect.colours import blend


class PhaseStyle(NamedTuple):
    """How a phase is shown.

    Attributes:
      letter: in text.
      dark, light: its colour on the first and on the last of the stages of one mesh.
      trace_colour: name of its colour in chrome://tracing.
    """

    letter: str
    dark: str
    light: str
    trace_colour: str


# The phases differ in lightness (CIE L* 37-49, 55-63, 70-78, 84-91; 25 for the optimizer), so that they can
# be told apart in greyscale and by colour-blind readers, whatever the stage.
STYLES = {
    "forward": PhaseStyle("F", "#005998", "#0a7abb", "rail_response"),
    "backward": PhaseStyle("B", "#de5837", "#e87a4d", "rail_animation"),
    "backward-input": PhaseStyle("I", "#e19e39", "#ebb959", "rail_idle"),
    "backward-weight": PhaseStyle("W", "#a1dfc4", "#c3efd7", "rail_load"),
    "none": PhaseStyle("X", "#3b3b3b", "#3b3b3b", "grey"),
    "transfer": PhaseStyle("T", "#9a9a9a", "#9a9a9a", "generic_work"),
}


def phase_name(phase: str, alone: bool = False) -> str:
    """The name of a phase in legends; what has none, as an optimizer has, may be `alone` in its timeline.

    >>> phase_name("forward"), phase_name("none"), phase_name("none", alone=True)
    ('forward', 'other work', 'computation')
    """
    if phase == "none":
        return "computation" if alone else "other work"
    return phase


def phase_colour(phase: str, nth: int = 0, of: int = 1, dark: bool = False) -> str:
    """The colour of a phase, as "#rrggbb", on stage number `nth` (from 0) of the `of` stages of a mesh.

    On dark paper the optimizer is light instead.

    >>> phase_colour("forward", 0, 2), phase_colour("forward", 1, 2)
    ('#005998', '#0a7abb')
    """
    if dark and phase == "none":
        return "#d0d7de"
    return blend(STYLES[phase].dark, STYLES[phase].light, nth, of)
