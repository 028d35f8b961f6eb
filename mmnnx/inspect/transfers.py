"""``mm.show_transfers``: what a program sends between meshes, how much of it, and which line made it."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from rich import box
from rich.table import Table

from mmnnx import _compat, mpmd
from mmnnx.inspect.cells import cell
from mmnnx.inspect.rich_output import ShownAsTable
from mmnnx.inspect.units import bytes_text
from mmnnx.mpmd.ir.equations import LAYOUT, is_var
from mmnnx.mpmd.ir.instructions import Call
from mmnnx.mpmd.ir.program import Program

_KINDS = {"forward": "activation", "backward": "gradient", "backward-input": "gradient"}
_COMPILER = os.path.dirname(mpmd.__file__) + os.sep  # what it adds has no line of the user's


@dataclasses.dataclass(frozen=True)
class Sent:
    """Arrays of one kind that go from one mesh to another.

    Attributes:
      source, target: names of the meshes.
      array: type and shape, as JAX writes them: "float32[8,64]".
      what: the path of the argument that it is, such as "0.blocks.3.kernel"; "update of" a path, for the
        gradient of an argument; else "activation", "gradient" or "value", with the operation that made it and
        its line in your program.
      count: how many of them a call sends.
      nbytes: of all of them.

    Example:
      >>> rows = mm.show_transfers(train_step.program(model, optimizer, batch)).rows
      >>> {row.source for row in rows} == {row.target for row in rows}
      True
    """

    source: str
    target: str
    array: str
    what: str
    count: int
    nbytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class TransferTable(ShownAsTable):
    """A table that a notebook shows and `print` prints.

    Attributes:
      rows: what is sent, most bytes first.

    Example:
      >>> program = train_step.program(model, optimizer, batch)
      >>> sum(row.count for row in mm.show_transfers(program).rows) == len(program.transfers)
      True
    """

    rows: tuple[Sent, ...]

    @property
    def table(self) -> Table:
        """A row for each kind."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
        for heading in ("from", "to", "array", "count", "bytes", "what"):
            right = heading in ("count", "bytes")
            table.add_column(heading, overflow="fold", justify="right" if right else "left")
        for row in self.rows:
            text = bytes_text(row.nbytes)
            table.add_row(*map(cell, (row.source, row.target, row.array, f"{row.count:,}", text, row.what)))
        table.columns[0].footer = "total"
        table.columns[3].footer = f"{sum(row.count for row in self.rows):,}"
        table.columns[4].footer = bytes_text(sum(row.nbytes for row in self.rows))
        return table

    def __rich__(self) -> Table:
        return self.table


def show_transfers(program: Program) -> TransferTable:
    """What a call sends between meshes.

    State that is sent is named by its path: it is read elsewhere than it lives, as a tied embedding is. What
    a while sends is counted once. Nothing is computed.

    Args:
      program: of `mm.jit(f).program(...)`.

    Raises:
      TypeError: for anything else.

    Example:
      >>> shown = mm.show_transfers(train_step.program(model, optimizer, batch))
      >>> shown.rows[0].what
      'activation: add at ...'
    """
    if not isinstance(program, Program):
        raise TypeError(f"a Program is needed, as of mm.jit(f).program(...), not {type(program).__name__}")
    makers = {buffer: (call, n) for call in program.calls for n, buffer in enumerate(call.outputs)}
    sources = {t.outputs[0]: t.inputs[0] for t in program.transfers}  # a value may be sent on
    texts: dict[Any, str] = {}  # the same for all microbatches
    rows: dict[tuple[str, str, str, str], list[int]] = {}
    for t in program.transfers:
        (buffer,) = t.inputs
        while buffer in sources:
            buffer = sources[buffer]
        maker = makers.get(buffer)
        kind = buffer if maker is None else (maker[0].fragment, maker[1])
        if kind not in texts:
            texts[kind] = _what(program, buffer, maker)
        key = (t.source, t.target, program.values[buffer][0].aval.str_short(), texts[kind])
        rows.setdefault(key, []).append(t.nbytes)
    found = [Sent(*key, len(sizes), sum(sizes)) for key, sizes in rows.items()]
    return TransferTable(tuple(sorted(found, key=lambda row: -row.nbytes)))


def _what(program: Program, buffer: int, maker: tuple[Call, int] | None) -> str:
    """What a buffer holds: the argument, or for anything else the operation and the line that made it."""
    if (path := program.arguments.get(buffer)) is not None:
        return path
    if (path := program.updates.get(program.values[buffer][0])) is not None:
        return f"update of {path}"
    if maker is None:
        return "value"
    call, n = maker
    kind = _KINDS.get(call.phase, "value")
    equation, operand = _equation(call.fragment.jaxpr, n)
    if equation is None:
        return kind
    name, line = equation.primitive.name, _compat.source_line(equation)
    if line == _compat.UNKNOWN_LINE or line.startswith(_COMPILER):
        return "scalars in one array" if name == "concatenate" else f"{kind}: {name}"
    given = dict(zip(call.fragment.invars, call.inputs))
    path = program.arguments.get(given[operand]) if operand in given else None
    of = f" of {path}" if path is not None else ""
    return f"{kind}: {name}{of} at {line.removeprefix(os.getcwd() + os.sep)}"


def _equation(jaxpr: Any, n: int) -> tuple[Any, Any]:
    """The equation that makes the n-th result of a jaxpr, of calls and loops the one inside; and the only
    array that it reads, if it reads one only."""
    _, results, equations, _ = _compat.open_jaxpr(jaxpr)
    makers = {v: e for e in equations for v in e.outvars}
    found, v = None, results[n]
    while is_var(v) and v in makers:
        found = makers[v]
        for inner in _compat.subjaxprs(found):
            if len(_compat.open_jaxpr(inner)[1]) == len(found.outvars):
                return _equation(inner, found.outvars.index(v))[0] or found, None
        operands = [a for a in found.invars if is_var(a)]
        operands = [a for a in operands if a.aval.shape] or operands
        v = operands[0] if len(operands) == 1 else None
        if found.primitive.name not in LAYOUT:
            break
    return found, v
