"""Figures as the bytes of picture files."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")

PICTURES = (".svg", ".png", ".pdf")


def check_picture_suffix(path: str | Path) -> str:
    """The suffix of a path in lower case; raises ValueError if it is not one of `PICTURES`."""
    suffix = Path(path).suffix.lower()
    if suffix not in PICTURES:
        raise ValueError(f"{path}: the file name of a picture must end in {', '.join(PICTURES)}")
    return suffix


def literal_text(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Makes a function draw names as they are: between two dollar signs matplotlib would set mathematics."""

    @functools.wraps(draw)
    def drawing(*args: P.args, **kwargs: P.kwargs) -> Figure:
        from matplotlib import rc_context  # slow to import

        with rc_context({"text.parse_math": False, "text.usetex": False}):
            return draw(*args, **kwargs)

    return drawing


def picture_bytes(figure: Figure, suffix: str) -> bytes:
    """The figure in one of the formats in `PICTURES`; the same figure gives the same bytes.

    Example:
      >>> picture_bytes(draw_loss([{"step": 1, "loss": 2.5}]), ".svg")[:5]
      b'<?xml'
    """
    from matplotlib import rc_context  # slow to import

    # No dates and no random ids.
    date = {".svg": "Date", ".pdf": "CreationDate"}.get(suffix)
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "mmnnx"}):
        figure.savefig(
            file,
            format=suffix[1:],
            dpi=figure.dpi if suffix == ".png" else 240,  # of what is not drawn as vectors
            metadata={date: None} if date else None,
        )
    return file.getvalue()
