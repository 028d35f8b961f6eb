"""What `rich` draws, as plain text and as HTML."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType

WIDTH = 240
"""Columns that there are; wider cells are folded."""

HTML = (
    "<pre style=\"white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',"
    'consolas,monospace">{code}</pre>'
)


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
