"""Loop-invariant code motion: what does not depend on the microbatch is done once, before the loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from mmnnx.mpmd.ir.equations import LAYOUT, Equation, Node, Var, is_var

N = TypeVar("N", bound=Node)


def split_invariant(body: Sequence[N], varying: Iterable[Var]) -> tuple[list[Equation], list[N]]:
    """Separates the equations to be done before a loop from those that stay in it.

    What is made of literals alone stays, being as cheap inside, and so do loops, and what only lays out bytes
    anew.

    Args:
      body: the nodes of one iteration, in order.
      varying: variables that differ between iterations.
    """
    invariant, literal = _classify(body, set(varying))
    moved = _worth_moving(body, invariant)
    moved |= _read_by(body, literal, moved)
    return [e for e in body if isinstance(e, Equation) and e in moved], [e for e in body if e not in moved]


def _classify(body: Sequence[Node], varying: set[Var]) -> tuple[set[Equation], set[Equation]]:
    """(equations that are the same for every iteration, those that are made of literals alone)."""
    literals: set[Var] = set()
    invariant, literal = set(), set()
    for e in body:
        reads = [a for a in e.invars if is_var(a)]
        if not isinstance(e, Equation) or e.eqn.effects or any(a in varying for a in reads):
            varying.update(e.outvars)
        elif all(a in literals for a in reads):
            literals.update(e.outvars)
            literal.add(e)
        else:
            invariant.add(e)
    return invariant, literal


def _worth_moving(body: Sequence[Node], invariant: set[Equation]) -> set[Equation]:
    """Those that compute something; layouts only where such equations read them."""
    moved = set(invariant)
    readers: dict[Var, list[Node]] = {}
    for e in body:
        for a in filter(is_var, e.invars):
            readers.setdefault(a, []).append(e)
    for e in reversed(body):
        used = (reader for v in e.outvars for reader in readers.get(v, ()))
        if (
            isinstance(e, Equation)
            and e in moved
            and e.name in LAYOUT
            and not any(reader in moved for reader in used)
        ):
            moved.remove(e)
    return moved


def _read_by(body: Sequence[Node], literal: set[Equation], moved: set[Equation]) -> set[Equation]:
    """Those made of literals that the moved ones read, directly or further on."""
    needed = {a for e in moved for a in e.invars if is_var(a)}
    found: set[Equation] = set()
    for e in reversed(body):
        if isinstance(e, Equation) and e in literal and not needed.isdisjoint(e.outvars):
            found.add(e)
            needed.update(filter(is_var, e.invars))
    return found
