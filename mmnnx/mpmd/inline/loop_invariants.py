"""Loop-invariant code motion: what does not depend on the microbatch is done once, before the loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from mmnnx.mpmd.ir.equations import LAYOUT, Equation, Node, Var, is_cheap, is_var, nbytes

N = TypeVar("N", bound=Node)


def split_invariant(body: Sequence[N], varying: Iterable[Var]) -> tuple[list[Equation], list[N]]:
    """Separates the equations to be done before a loop from those that stay in it.

    What is made of literals alone stays, being as cheap inside, and so do loops, what only lays out bytes
    anew, and cheap work whose result takes more memory than what it is made of: weights that are kept in
    eight bits, say, and computed with in sixteen.

    Args:
      body: the nodes of one iteration, in order.
      varying: variables that differ between iterations.
    """
    invariant, literal = _classify(body, set(varying))
    larger = _larger_than_what_it_is_made_of(body, invariant, literal)
    moved = _worth_moving(body, invariant - larger)
    moved |= _read_by(body, invariant | literal, moved)
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


def _larger_than_what_it_is_made_of(
    body: Sequence[Node], invariant: set[Equation], literal: set[Equation]
) -> set[Equation]:
    """The cheap ones whose results are larger than what they, and the cheap ones before them, are made of."""
    fewest = {v: 0 for e in literal for v in e.outvars}  # bytes of which a value can be made by cheap work
    found: set[Equation] = set()
    for e in body:
        if isinstance(e, Equation) and e in invariant and is_cheap(e):
            made_of = sum(fewest.get(a, nbytes(a)) for a in filter(is_var, e.invars))
            fewest.update((v, min(made_of, nbytes(v))) for v in e.outvars)
            if made_of < sum(map(nbytes, e.outvars)):
                found.add(e)
    return found


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


def _read_by(body: Sequence[Node], movable: set[Equation], moved: set[Equation]) -> set[Equation]:
    """Those that the moved ones read, directly or further on."""
    needed = {a for e in moved for a in e.invars if is_var(a)}
    found: set[Equation] = set()
    for e in reversed(body):
        if isinstance(e, Equation) and e in movable and not needed.isdisjoint(e.outvars):
            found.add(e)
            needed.update(filter(is_var, e.invars))
    return found
