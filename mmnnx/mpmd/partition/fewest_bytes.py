"""Which values are computed again rather than kept or sent: a minimum cut, so that the fewest bytes are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mmnnx.mpmd.ir.equations import Var, nbytes
from mmnnx.mpmd.place.min_cut import SINK, SOURCE, sink_side


def computed_again(needed: Iterable[Var], made_of: Callable[[Var], Iterable[Var] | None]) -> list[Var]:
    """The values to compute again, directly or not of others that are kept or sent.

    Args:
      needed: the values that have to be there.
      made_of: what a value can be computed of, besides what is at hand; None if it cannot be.

    Returns:
      Those beyond a cut where the bytes of what is kept or sent are the fewest; of several cuts, the one
      with the fewest of them.
    """
    number: dict[Var, int] = {}  # where a value comes about; from there to the next number it is kept or sent
    edges: list[tuple[int, int, int]] = []
    queue: list[Var] = []

    def enter(v: Var) -> int:
        if v not in number:
            number[v] = 2 + 2 * len(number)
            edges.append((number[v], number[v] + 1, nbytes(v)))
            queue.append(v)
        return number[v]

    edges += [(enter(v) + 1, SINK, -1) for v in needed]
    while queue:
        v = queue.pop()
        operands = made_of(v)
        if operands is None:
            edges.append((SOURCE, number[v], -1))
        else:
            edges += [(enter(a) + 1, number[v], -1) for a in operands]
    beyond = sink_side(2 + 2 * len(number), edges)
    return [v for v, n in number.items() if n in beyond]
