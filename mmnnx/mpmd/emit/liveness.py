"""When buffers are dropped: right after their last use."""

from __future__ import annotations

from collections.abc import Sequence, Set

from mmnnx.mpmd.ir.instructions import Control, Instruction


def free_after_last_use(instructions: Sequence[Instruction], results: Set[int]) -> tuple[Instruction, ...]:
    """Drops every buffer but those of results at its last use; one that nobody reads, where it is made.

    In a while the last use of a carry is that of its value before the iteration. What it reads of outside is
    dropped at its end.
    """
    freeing: list[Instruction] = []
    seen = set(results)
    after: list[set[int]] = []  # for each while, what is needed at its end
    for i in reversed(instructions):
        control = i.kind if isinstance(i, Control) else None
        if control == "while":
            seen |= after.pop()
        last = ({*i.inputs} if control == "repeat" else {*i.inputs, *i.outputs}) - seen
        seen |= last
        freeing.append(i._make((*i[:-1], tuple(sorted(last)))) if last else i)
        if control == "end":
            after.append(set(seen))
        elif control == "repeat":
            seen -= {*i.outputs}
    return tuple(reversed(freeing))
