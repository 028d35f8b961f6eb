"""What `rich` draws, as plain text and as HTML."""

from __future__ import annotations

import abc
import io
import os
import sys
from collections.abc import Collection
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.protocol import rich_cast
from rich.table import Table

WIDTH = 240
"""Columns that there are; wider cells are folded."""

HTML = (
    "<pre style=\"white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',"
    'consolas,monospace">{code}</pre>'
)


def table_console(file_width: int) -> Console:
    """Where a command prints: as wide as the terminal or `COLUMNS`, or `file_width` in a file or a pipe."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = file_width
    return console


def print_table(console: Console, shown: RenderableType) -> None:
    """Prints a table, or text and tables, at least as wide as the longest words: rich would cut them.

    A terminal that is narrower wraps the lines itself.
    """
    shown = rich_cast(shown)
    for table in shown.renderables if isinstance(shown, Group) else [shown]:
        for column in table.columns if isinstance(table, Table) else []:
            words = " ".join(map(str, (column.header, *column.cells))).split()
            column.min_width = max(map(cell_len, words), default=None)
    unlimited = console.options.update_width(sys.maxsize)
    width = console.width
    console.width = max(width, Measurement.get(console, unlimited, shown).minimum)
    try:
        console.print(shown, crop=False)  # the minimum that a table measures leaves out its edges
    finally:
        console.width = width


def plain(renderable: RenderableType) -> str:
    """As text without colours, whatever the terminal."""
    console = Console(
        file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False, force_jupyter=False
    )
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def html(renderable: RenderableType) -> str:
    """As HTML that needs no style sheet; what it shows is escaped."""
    console = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, force_jupyter=False)
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format=HTML)


def table_bundle(renderable: RenderableType) -> dict[str, Any]:
    """What `_repr_mimebundle_` returns for a table."""
    return {"text/plain": plain(renderable), "text/html": html(renderable)}


class ShownAsTable(abc.ABC):
    """Prints, and shows itself in a notebook, as the table that `__rich__` returns."""

    @abc.abstractmethod
    def __rich__(self) -> RenderableType: ...

    def __str__(self) -> str:
        return plain(self.__rich__())

    __repr__ = __str__  # what a terminal shows

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, Any]:
        return table_bundle(self.__rich__())
