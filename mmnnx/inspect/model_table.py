"""The table of `mm.tabulate`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mmnnx.inspect.cells import cell
from mmnnx.inspect.locations import Home, sort_homes
from mmnnx.inspect.model_state import Piece, on_devices
from mmnnx.inspect.module_calls import Call
from mmnnx.inspect.rich_output import ShownAsTable
from mmnnx.inspect.units import bytes_text, count_text, ranges_text
from mmnnx.sharding.path_filter import Path, path_text

LINES = 12
"""Lines of a row that list Variables, or their specs."""
NAMES = 3
"""Tasks that a row names; if there are more, it names the first and the last."""


@dataclass(frozen=True)
class Row:
    """The row of one Module, or of the whole model (path ()).

    Attributes:
      path: its path.
      type: the name of its class.
      calls: its inputs and outputs; calls of the same types count once.
      pieces: the arrays it holds itself.
      below: these and those of all Modules in it.
      shared: its Variables that another row counts: path in the Module, path in that row, kind.
      same_as: for a Module that another row has: its path there. This row holds nothing then.
    """

    path: Path
    type: str
    calls: tuple[Call, ...] = ()
    pieces: tuple[Piece, ...] = ()
    below: tuple[Piece, ...] = ()
    shared: tuple[tuple[Path, Path, str], ...] = ()
    same_as: Path | None = None


@dataclass(frozen=True, repr=False)
class ModelTable(ShownAsTable):
    """A table that shows itself: styled in a notebook, plain text in `str()`, styled text in `rich.print`.

    Attributes:
      name: the class of what is tabulated.
      rows: a row for each Module, parents first, children in the order of their calls.
      pieces: all arrays, shared ones once.
      traced: whether inputs and outputs are known.
      idle: numbers of the devices that the MultiMesh leaves idle.

    Example:
      >>> table = mm.tabulate(model)
      >>> [row.path for row in table.rows][:2], table.traced
      ([(), ('blocks',)], False)
    """

    name: str
    rows: tuple[Row, ...]
    pieces: tuple[Piece, ...]
    traced: bool
    idle: tuple[int, ...] = ()

    @property
    def by_home(self) -> Mapping[Home | None, tuple[Piece, ...]]:
        """The arrays of each home, in the order of the devices; None is for arrays that are not placed."""
        found: dict[Home | None, list[Piece]] = {}
        for piece in (share for whole in self.pieces for share in whole.shares):
            found.setdefault(piece.placed.home if piece.placed is not None else None, []).append(piece)
        narrow, wide = sort_homes(home for home in found if home is not None)
        return {home: tuple(found[home]) for home in (*narrow, *wide, None) if home in found}

    @property
    def by_device(self) -> Mapping[int, int]:
        """Bytes on each device, by its number."""
        return on_devices(self.pieces)

    @functools.cached_property
    def _tables(self) -> Group:
        return make_tables(self)

    def __rich__(self) -> Group:
        return self._tables


def make_tables(found: ModelTable) -> Group:
    """The table of modules and, if the model is placed, those of tasks and of devices."""
    kinds = sorted({piece.kind for piece in found.pieces})
    placed = any(piece.placed is not None and piece.placed.spec for piece in found.pieces)
    parts = [_modules(found, kinds, placed)]
    if placed:
        parts += [_tasks(found, kinds), _devices(found)]
    return Group(*parts)


def _modules(found: ModelTable, kinds: Sequence[str], placed: bool) -> Table:
    table = Table(title=cell(f"{found.name} Summary"), show_lines=True, show_footer=True)
    calls = ("inputs", "outputs") if found.traced else ()
    where = ("task", "spec", "devices", "bytes/device") if placed else ()
    for heading in ("path", "type", *calls):
        table.add_column(heading, overflow="fold")
    for kind in kinds:
        table.add_column(
            cell(kind), footer=_size([p for p in found.pieces if p.kind == kind]), overflow="fold"
        )
    for heading in where:
        table.add_column(heading, overflow="fold")
    table.columns[len(calls) + 1].footer = Text("Total", justify="right")
    if placed:
        table.columns[-2].footer = ranges_text(found.by_device)
        table.columns[-1].footer = _device_bytes(found.pieces)
    for row in found.rows:
        same = "" if row.same_as is None else f"\nas {path_text(row.same_as) or 'the whole model'}"
        cells = [Text(path_text(row.path)), cell(row.type).append(same, "dim")]
        cells += _calls(row) if calls else ()
        cells += [_state(row, kind) for kind in kinds]
        cells += _where(row) if where else ()
        table.add_row(*cells)
    total = sum(p.size for p in found.pieces), sum(p.bytes for p in found.pieces)
    table.caption = f"Total Parameters: {count_text(total[0])} ({bytes_text(total[1])})"
    table.caption_style = "bold"
    return table


def _calls(row: Row) -> list[Text]:
    """Inputs and outputs; those of one call begin on the same line."""
    inputs: list[str] = []
    outputs: list[str] = []
    for call in row.calls:
        height = max(len(call.inputs), len(call.outputs))
        inputs += [*call.inputs, *[""] * (height - len(call.inputs))]
        outputs += [*call.outputs, *[""] * (height - len(call.outputs))]
    return [_lines(inputs), _lines(outputs)]


def _state(row: Row, kind: str) -> Text:
    """The Variables of one kind, and the size of all of that kind below."""
    lines = [f"{_name(row, p)}: {p}" for p in row.pieces if p.kind == kind and kind != "RngState"]
    lines += [f"{path_text(at)}: as {path_text(first)}" for at, first, k in row.shared if k == kind]
    text = _lines(_shortened(lines))
    size = _size([p for p in row.below if p.kind == kind])
    return text.append("\n" if text and size else "").append_text(size)


def _where(row: Row) -> list[Text]:
    """Task, spec, devices, bytes on each. Specs are of the row's own Variables, the rest of all below too."""
    homes = {s.placed.home for p in row.below for s in p.shares if s.placed is not None}
    narrow, wide = (list(dict.fromkeys(home.task for home in some)) for some in sort_homes(homes))
    tasks = narrow if len(narrow) <= NAMES else [f"{narrow[0]} … {narrow[-1]} ({len(narrow)})"]
    specs = [(_name(row, p), p.placed.spec) for p in row.pieces if p.placed is not None]
    same = len({spec for _, spec in specs}) == 1
    lines = [specs[0][1]] if same else _shortened([f"{name}: {spec}" for name, spec in specs])
    devices = ranges_text(device for home in homes for device in home.devices)
    return [Text("\n".join([*tasks, *wide])), _lines(lines), Text(devices), Text(_device_bytes(row.below))]


def _tasks(found: ModelTable, kinds: Sequence[str]) -> Table:
    table = Table(title="Tasks")
    for heading in ("task", "mesh", "devices", *kinds, "bytes", "bytes/device"):
        table.add_column(cell(heading), overflow="fold")
    for home, pieces in found.by_home.items():
        table.add_row(
            Text(home.task if home is not None else "not placed"),
            cell(home.axes if home is not None else ""),
            ranges_text(home.devices) if home is not None else "",
            *(_size([p for p in pieces if p.kind == kind]) for kind in kinds),
            bytes_text(sum(p.bytes for p in pieces)),
            _device_bytes(pieces),
        )
    return table


def _devices(found: ModelTable) -> Table:
    table = Table(title="Devices")
    for heading in ("devices", "task", "bytes on each"):
        table.add_column(heading, overflow="fold")
    rows: dict[tuple[tuple[str, ...], int], list[int]] = {}
    homes = [home for home in found.by_home if home is not None]
    for device, held in found.by_device.items():
        tasks = tuple(dict.fromkeys(home.task for home in homes if device in home.devices))
        rows.setdefault((tasks, held), []).append(device)
    for (tasks, held), devices in rows.items():
        table.add_row(ranges_text(devices), Text(", ".join(tasks)), bytes_text(held))
    if found.idle:
        table.add_row(ranges_text(found.idle), "idle", bytes_text(0))
    return table


def _device_bytes(pieces: Iterable[Piece]) -> str:
    """Bytes on each device that holds these arrays; if that differs, the peak, after "≤"."""
    held = on_devices(pieces).values()
    if not held:
        return ""
    return ("" if len(set(held)) == 1 else "≤ ") + bytes_text(max(held))


def _size(pieces: Sequence[Piece]) -> Text:
    if not pieces:
        return Text()
    size, held = sum(p.size for p in pieces), sum(p.bytes for p in pieces)
    return Text.assemble((count_text(size), "bold"), (f" ({bytes_text(held)})", "dim bold"))


def _name(row: Row, piece: Piece) -> str:
    return path_text(piece.path[len(row.path) :])


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= LINES else [*lines[: LINES - 1], f"… {len(lines) - LINES + 1} more"]


def _lines(lines: Sequence[str]) -> Text:
    text = cell("\n".join(lines))
    text.highlight_regex(r"\w+(?:<\w+>)?(?=\[)", "dim")  # dtypes
    return text
