"""The rows of a custom schedule, as `mm.microbatch` is given them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mmnnx.mpmd.schedule import Action

Row = tuple[Any, ...]


def parse_rows(schedule: str | None, custom: Sequence[Sequence[Any]] | None) -> tuple[Row, ...]:
    """The rows of a custom schedule: of Actions, or of (microbatch, task name) pairs; none without one.

    Raises:
      ValueError: for `schedule` and rows that do not go together, and for what is no row or entry.
    """
    if (custom is not None) != (schedule == "custom") and (custom is None or schedule is not None):
        raise ValueError(
            f"microbatch: schedule={schedule!r} with{'' if custom is not None else 'out'} custom_schedule: "
            'give both schedule="custom" and its rows, or neither'
        )
    if custom is None:
        return ()
    if isinstance(custom, str):
        raise ValueError("microbatch: custom_schedule is a list of rows: mm.read_schedule(path) reads a file")
    rows = tuple(map(_parse_row, custom))
    if len({isinstance(entry, Action) for row in rows for entry in row}) > 1:
        raise ValueError("microbatch: custom_schedule has both names and Actions: use one or the other")
    if not any(rows):
        raise ValueError("microbatch: custom_schedule has no entries")
    return rows


def _parse_row(row: Any) -> Row:
    """The row of one mesh. The k-th time that a task is named alone is for microbatch k."""
    if isinstance(row, str) or not isinstance(row, Sequence):
        raise ValueError(f"microbatch: each row of custom_schedule is a list for one mesh, not {row!r}")
    times: Counter[str] = Counter()
    entries: list[Any] = []
    for entry in row:
        if isinstance(entry, str):
            entries.append((times[entry], entry))
            times[entry] += 1
        elif isinstance(entry, tuple) and len(entry) == 3:
            entries.append(Action(*entry))
        elif isinstance(entry, (tuple, list)) and [type(e) for e in entry] == [int, str]:
            entries.append(tuple(entry))
        else:
            raise ValueError(
                "microbatch: an entry of custom_schedule is a task name, a pair (microbatch, task name) "
                f"or an mm.Action, not {entry!r}"
            )
    return tuple(entries)
