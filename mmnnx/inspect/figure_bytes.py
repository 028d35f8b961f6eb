"""Figures as the bytes of picture files, and as what a notebook shows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".svg", ".png", ".pdf")


def check_picture_suffix(path: str | Path) -> str:
    """The suffix of a path in lower case; raises ValueError if it is not one of `PICTURES`."""
    suffix = Path(path).suffix.lower()
    if suffix not in PICTURES:
        raise ValueError(f"{path}: the file name of a picture must end in {', '.join(PICTURES)}")
    return suffix


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


def picture_bundle(figure: Figure, text: str, suffix: str = ".svg") -> tuple[dict[str, Any], dict[str, Any]]:
    """What `_repr_mimebundle_` returns for a picture: its types and text, and its width if it is of pixels.

    A PNG is shown as wide as an SVG, so that text has one size in both.
    """
    data = picture_bytes(figure, suffix)
    if suffix == ".png":
        width = round(96 * figure.get_figwidth())  # CSS pixels
        return {"text/plain": text, "image/png": data}, {"image/png": {"width": width}}
    return {"text/plain": text, "image/svg+xml": data.decode()}, {}
