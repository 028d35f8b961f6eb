"""Tables as CSV, as torch.distributed.pipelining writes its compute-only schedules."""

from __future__ import annotations

import csv
import os
import re

from mmnnx.mpmd.ir.timetable import LETTERS, Action, Table

PHASES = {letter: phase for phase, letter in LETTERS.items()}
CELLS = "'0F3' (forward of microbatch 3 on stage 0), '0B3' (its backward), '0I3' and '0W3' (its two parts)"
SENDS = ("SEND", "RECV", "SHARD", "REDUCE")  # also in UNSHARD, RESHARD, REDUCE_GRAD


def write_schedule(table: Table, path: str | os.PathLike[str]) -> None:
    """Writes a table: a line for each row, a cell for each action, such as 0F3 for `Action(0, "forward", 3)`.

    Raises:
      TypeError: for entries that are no Actions.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "schedule.csv")
      >>> write_schedule([[Action(0, "forward", 0), Action(0, "backward", 0)]], path)
      >>> path.read_text()
      '0F0,0B0\\n'
    """
    for entry in (entry for row in table for entry in row):
        if not isinstance(entry, Action):
            raise TypeError(f"a CSV file holds mm.Action entries, not {entry!r}; program.table() has them")
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([f"{a.stage}{LETTERS[a.phase]}{a.microbatch}" for a in row] for row in table)


def read_schedule(path: str | os.PathLike[str]) -> list[list[Action]]:
    """Reads a table that `write_schedule` or torch.distributed.pipelining has written.

    Cells that are empty (a mesh idles) are passed over: when an action runs follows from what it waits for.

    Raises:
      ValueError: for a cell that is no action, with its row and column, both counted from 1; for a file that
        is not text.
      OSError: if the file cannot be read.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "schedule.csv")
      >>> write_schedule([[Action(1, "backward-input", 2)]], path)
      >>> read_schedule(path)
      [[Action(stage=1, phase='backward-input', microbatch=2)]]
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin a file with a mark
            rows = list(csv.reader(file))
    except UnicodeDecodeError:
        raise ValueError(f"{os.fspath(path)}: this is not UTF-8 text") from None
    return [
        [
            _action(cell, f"{os.fspath(path)}, row {r}, column {c}")
            for c, cell in enumerate(cells, 1)
            if cell.strip()
        ]
        for r, cells in enumerate(rows, 1)
    ]


def _action(cell: str, where: str) -> Action:
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", cell.strip())
    if match is None:
        reason = f"is no action. Cells look like {CELLS}."
        if any(word in cell for word in SENDS):
            reason = (
                "is communication. Only compute actions are read, since mmnnx sends by itself: "
                f"write the schedule with no others than {CELLS}."
            )
        raise ValueError(f"{where}: {cell!r} {reason}")
    stage, letter, microbatch = match.groups()
    return Action(int(stage), PHASES[letter], int(microbatch))
