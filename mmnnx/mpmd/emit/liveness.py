"""When buffers are dropped: right after their last use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from mmnnx.mpmd.ir.instructions import Instruction


def free_after_last_use(instructions: Sequence[Instruction], results: Set[int]) -> tuple[Instruction, ...]:
    """Drops every buffer but those of results at its last use; one that nobody reads, where it is made."""
    freed: list[tuple[int, ...]] = []
    seen = set(results)
    for i in reversed(instructions):
        last = {*i.inputs, *i.outputs} - seen
        seen |= last
        freed.append(tuple(sorted(last)))
    return tuple(dataclasses.replace(i, frees=f) if f else i for i, f in zip(instructions, reversed(freed)))
