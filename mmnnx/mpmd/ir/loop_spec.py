"""What a microbatch loop keeps of the call of `mm.microbatch` that made it, and the scope that carries it."""

from __future__ import annotations

import dataclasses
import re
import threading
from typing import Any

from mmnnx.mpmd.ir.timetable import Action


@dataclasses.dataclass(frozen=True)
class LoopSpec:
    """What a loop keeps of the call of `mm.microbatch` that made it.

    Attributes:
      schedule: name of the schedule, None for one chosen by simulation, or a custom one.
      options: those of `interleave` and `unrolling` that were given, by name.
      rows: a custom schedule: rows, each of one mesh, of Actions or of (microbatch, name of a task).
      num_stages, remat, memory_limit: as given.
      length: number of microbatches, filled in when traced.
      per_call: how many microbatches share a call; None where that is still to be chosen. Once it is,
        `length` is the number of calls of a stage's forward, and not of microbatches.
    """

    schedule: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    num_stages: int | None = None
    remat: Any = None
    memory_limit: int | None = None
    length: int = 0
    per_call: int | None = None

    @property
    def names_tasks(self) -> bool:
        """Whether the custom schedule is one of names."""
        return bool(self.named)

    @property
    def named(self) -> set[str]:
        """The names of tasks and fragments in a custom schedule."""
        return {entry[1] for row in self.rows for entry in row if not isinstance(entry, Action)}


_specs: list[LoopSpec] = []  # never forgets: a jaxpr may keep a scope's name for as long as it lives
_lock = threading.Lock()


def loop_scope(spec: LoopSpec) -> str:
    """The name scope that marks the loop; equal specs share one."""
    with _lock:
        if spec not in _specs:
            _specs.append(spec)
        return f"mm.microbatch[{_specs.index(spec)}]"


def loop_spec(scope: str) -> LoopSpec | None:
    """The spec of the loop whose own scope ends the given name stack, None for any other equation."""
    found = re.search(r"(?:^|/)mm\.microbatch\[(\d+)\]$", scope)
    number = int(found[1]) if found else len(_specs)
    return _specs[number] if number < len(_specs) else None  # a user's scope may be called so


def is_transformed(scope: str) -> bool:
    """Whether the equation of a loop is of its gradient or another transformation around it, not its own."""
    return re.search(r"(?:jvp|transpose|vmap)\((?:.*/)?mm\.microbatch\[\d+\]\)+$", scope) is not None
