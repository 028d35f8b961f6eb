"""Finds the equations of one fragment that compute what another fragment computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from mmnnx.mpmd.ir.equations import Var, is_var
from mmnnx.mpmd.ir.fragments import Fragment


@dataclasses.dataclass(frozen=True)
class Match:
    """A fragment g, found in a larger one.

    Attributes:
      equations: those of the larger one, in the order of g.
      names: for each variable of g that its equations name, what it is in the larger one.
    """

    equations: list[Any]
    names: dict[Var, Any]


def align(mine: Sequence[int], its: Sequence[int], step: int) -> dict[int, int]:
    """For items of `its`, where they stand in `mine`, which has runs of them.

    Where a run may begin at several places next to each other, the first is taken; if `step` is -1 the last.
    """
    blocks = SequenceMatcher(None, mine[::step], its[::step], autojunk=False).get_matching_blocks()
    here, there = range(len(mine))[::step], range(len(its))[::step]
    return {there[b + n]: here[a + n] for a, b, size in blocks for n in range(size)}


def match_core(
    f: Fragment, g: Fragment, mine: Sequence[int], its: Sequence[int], aligned: Mapping[int, int]
) -> Match | None:
    """The equations of f that do what those of g do; None if not all are there.

    Of aligned equations those are taken that read and make the same; for each other one the first that does,
    and is left.

    Args:
      f, g: the fragments.
      mine, its: what their equations do, as numbers.
      aligned: for equations of g, which one of f may be the same.
    """
    names: dict[Var, Any] = {}
    core: dict[int, Any] = {}
    left: dict[int, list[Any]] = {}

    def take(n: int, ours: Any) -> bool:
        theirs = g.jaxpr.eqns[n]
        each = zip((*theirs.invars, *theirs.outvars), (*ours.invars, *ours.outvars))
        pairs = [(a, b) for a, b in each if is_var(a)]
        if any(names.get(a, b) is not b for a, b in pairs):
            return False
        names.update(pairs)
        core[n] = ours
        return True

    used = {m for n, m in aligned.items() if take(n, f.jaxpr.eqns[m])}
    for m, kind in enumerate(mine):
        if m not in used:
            left.setdefault(kind, []).append(f.jaxpr.eqns[m])
    for n, kind in enumerate(its):
        if n not in core:
            ours = next((e for e in left.get(kind, ()) if take(n, e)), None)
            if ours is None:
                return None
            left[kind].remove(ours)
    return Match([core[n] for n in range(len(its))], names)
