"""How all pictures look: one width, one size of text, on light or dark paper."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST_NAME = 14  # letters of the longest name of a mesh
WIDTH = 8.0  # inches: all pictures shown side by side at one width have text of one size
TEXT = 8.0  # points


class Look(NamedTuple):
    """Colours of what is not data.

    Attributes:
      paper: behind everything.
      ink: of text.
      faint: of axes, and of text that matters less.
      pale: of grids, and of what is empty.
    """

    paper: str
    ink: str
    faint: str
    pale: str


LIGHT = Look(paper="#ffffff", ink="#1f2328", faint="#656d76", pale="#e4e8ec")
DARK = Look(paper="#161b22", ink="#e6edf3", faint="#9198a1", pale="#30363d")


@contextlib.contextmanager
def styled(dark: bool = False) -> Iterator[Look]:
    """Inside, matplotlib draws on light or dark paper, and takes names with dollar signs as they are.

    >>> from matplotlib.figure import Figure
    >>> with styled(dark=True) as look:
    ...     figure = Figure(figsize=(WIDTH, 3), layout="constrained")
    """
    from matplotlib import rc_context  # slow to import

    look = DARK if dark else LIGHT
    text = ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")
    faint = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = {
        **dict.fromkeys(text, TEXT),
        **dict.fromkeys(faint, look.faint),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), look.paper),
        "text.color": look.ink,
        "text.parse_math": False,
        "text.usetex": False,
        "axes.titlesize": TEXT + 1,
        "axes.titlecolor": look.ink,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": look.pale,
        "legend.frameon": False,
        "figure.dpi": 200,
    }
    with rc_context(settings):
        yield look


def settle_ticks(axes: Axes, look: Look) -> None:
    """Gives axes the size and colour of ticks that are made when the figure is written, outside `styled`."""
    axes.tick_params(colors=look.faint, labelsize=TEXT, width=0.6)
