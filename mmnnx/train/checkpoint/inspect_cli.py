"""The command ``mmnnx inspect``: shows what a checkpoint holds, without reading the arrays."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from mmnnx.inspect.cells import cell
from mmnnx.inspect.rich_output import print_table, table_console
from mmnnx.inspect.units import bytes_text, ranges_text
from mmnnx.options import parse_options, reported
from mmnnx.sharding.path_filter import path_text
from mmnnx.train.checkpoint.contents import Contents, contents_of
from mmnnx.train.checkpoint.errors import CheckpointError

FILE_WIDTH = 160
"""Columns of output to a file or a pipe."""


@dataclasses.dataclass(frozen=True)
class InspectConfig:
    """Show what a checkpoint holds: step, metrics, topology, and a table of state."""

    path: tyro.conf.Positional[str]
    """A run, its folder of checkpoints, or one of them: a folder or a gs:// URL; also one by orbax alone."""
    json: bool = False
    """Print JSON."""


def run(options: Sequence[str], print_error: Callable[[str], None]) -> int:
    """Run ``mmnnx inspect`` with these options; errors are passed to `print_error`.

    Returns the exit status: 0, or 2 if there is no checkpoint. Raises SystemExit for options that cannot be
    parsed.
    """
    config = parse_options(InspectConfig, "inspect", options)

    def action() -> int:
        found = contents_of(config.path)
        if config.json:
            print(json.dumps(dataclasses.asdict(found), indent=2, default=str))
        else:
            show(found, table_console(FILE_WIDTH))
        return 0

    return reported(action, print_error, CheckpointError)


def show(found: Contents, console: Console) -> None:
    """Print what a checkpoint holds."""
    console.print(cell(str(found.path), "bold"), soft_wrap=True)
    for line in _about(found):
        console.print(cell(line), soft_wrap=True)
    if found.homes:
        print_table(console, _homes(found))
    print_table(console, _state(found))


def _about(found: Contents) -> list[str]:
    lines = []
    if found.step is not None:
        others = [step for step in found.steps if step != found.step]
        kept = f"; there are also {', '.join(map(str, others))}" if others else ""
        lines.append(f"step {found.step}{kept}")
    if found.saved is not None:
        saved = datetime.datetime.fromtimestamp(found.saved).astimezone().isoformat(" ", "seconds")
        lines.append(f"saved {saved}")
    if found.versions:
        by = ", ".join(f"{name} {version}" for name, version in found.versions.items())
        lines.append(f"by {by}, in {found.processes} process{'es' * (found.processes != 1)}")
    if found.mesh:
        lines.append("mesh " + ", ".join(f"{axis}={size}" for axis, size in found.mesh.items()))
    for name, value in (("metrics", found.metrics), ("data", found.data), ("config", found.config)):
        if value is not None:
            lines.append(f"{name} {_pairs(value)}")
    return lines


def _pairs(value: Any) -> str:
    """JSON as "name=value, ..." without what is null."""
    if not isinstance(value, dict):
        return json.dumps(value)
    texts = {
        k: f"{v:.6g}" if isinstance(v, float) else json.dumps(v) for k, v in value.items() if v is not None
    }
    return ", ".join(f"{k}={text}" for k, text in texts.items())


def _homes(found: Contents) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("task", "mesh", "devices"):
        table.add_column(heading, overflow="fold")
    for heading in ("arrays", "bytes"):
        table.add_column(heading, justify="right")
    for number, home in enumerate(found.homes):
        mine = [piece for piece in found.state if piece.home == number]
        axes = ", ".join(f"{axis}={size}" for axis, size in home["axes"].items())
        size = bytes_text(sum(piece.bytes for piece in mine))
        table.add_row(cell(home["task"]), cell(axes), ranges_text(home["devices"]), str(len(mine)), size)
    return table


def _state(found: Contents) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    total = bytes_text(sum(piece.bytes for piece in found.state))
    table.add_column("state", f"{len(found.state)} arrays", overflow="fold")
    table.add_column("type", overflow="fold")
    table.add_column("bytes", total, justify="right")
    table.add_column("task", overflow="fold")
    table.add_column("spec", overflow="fold")
    for piece in found.state:
        task = "" if piece.home is None else found.homes[piece.home]["task"]
        name = path_text(piece.path.split("/"))
        table.add_row(cell(name), cell(piece.type), bytes_text(piece.bytes), cell(task), cell(piece.spec))
    return table
