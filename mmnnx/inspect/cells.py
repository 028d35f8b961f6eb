"""Text for the cells of tables, whatever names are in it."""

from __future__ import annotations

from rich.text import Text

from mmnnx.printable import printable


def cell(text: str, style: str = "") -> Text:
    """The text as it is: rich takes no part of it for markup or an emoji, a terminal none for a command.

    >>> cell("[red]blocks").plain
    '[red]blocks'
    """
    return Text(printable(text, keep="\n"), style=style)
