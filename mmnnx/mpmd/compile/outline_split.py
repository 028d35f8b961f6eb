"""Splits a fragment into what comes before a common core, the core, and what comes after."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

from mmnnx import _compat
from mmnnx.mpmd.compile.outline_match import Match
from mmnnx.mpmd.ir.equations import Var, is_var
from mmnnx.mpmd.ir.fragments import Fragment


def split_around(f: Fragment, g: Fragment, match: Match) -> list[Fragment] | None:
    """A fragment f as what comes before the equations that it shares with g, these, and what comes after.

    None if that cannot be: if they read what is made of their results, or make what is read of f and is no
    result of g.
    """
    core, names = match.equations, match.names
    if not names.keys() >= {*g.invars}:
        return None
    takes, makes = (tuple(names[v] for v in held) for held in (g.invars, g.outvars))
    inside = {v for e in core for v in e.outvars}
    cheap = _cheap(f)
    before, after, late = _before_and_after(f, inside, cheap)
    if after and {v for e in before for v in e.outvars}.isdisjoint(takes):  # nothing has to come first
        before, after = [], [e for e in f.jaxpr.eqns if inside.isdisjoint(e.outvars)]
    wanted = {*f.outvars, *(v for e in after for v in _reads(e) if v not in inside & cheap)}
    named = {*f.outvars, *(v for e in f.jaxpr.eqns for v in _reads(e))}
    if (
        not (inside | late).isdisjoint(takes)
        or len({*takes}) < len(takes)
        or not inside & wanted <= {*makes} <= named  # what nobody reads may have no name
    ):
        return None
    copies = [e for e in core if cheap.issuperset(e.outvars)]
    parts = [_part(f, core, takes, makes)]
    if before:
        parts.insert(0, _part_outside(f, before, copies, {*wanted, *takes}))
    if after:
        parts.append(_part_outside(f, after, copies, {*f.outvars}))
    return [
        dataclasses.replace(p, name=f"{f.name} ({n} of {len(parts)})") for n, p in enumerate(parts, start=1)
    ]


def _cheap(f: Fragment) -> set[Var]:
    """What each part that reads it makes for itself, as it costs next to nothing: what is made of literals,
    such as a mask, or of inputs and takes no work, such as the bias corrections of Adam."""
    given = {*f.invars}
    constant: set[Var] = set()
    cheap: set[Var] = set()
    for e in f.jaxpr.eqns:
        if constant.issuperset(_reads(e)):
            constant.update(e.outvars)
            cheap.update(e.outvars)
        elif _takes_no_work(e) and all(v in cheap or v in given for v in _reads(e)):
            cheap.update(e.outvars)
    return cheap


def _before_and_after(
    f: Fragment, inside: Set[Var], cheap: Set[Var]
) -> tuple[list[Any], list[Any], set[Var]]:
    """The equations that do not depend on the core, those that do, and what is made by it or after it."""
    late: set[Var] = set()
    before, after = [], []
    for e in f.jaxpr.eqns:
        if not inside.isdisjoint(e.outvars):
            late.update(v for v in e.outvars if v not in cheap)
        elif late.isdisjoint(_reads(e)):
            before.append(e)
        else:
            late.update(e.outvars)
            after.append(e)
    return before, after, late


def _takes_no_work(eqn: Any) -> bool:
    """Whether it adds or drops dimensions of size 1, or makes scalars of scalars."""
    if eqn.primitive.name in ("reshape", "broadcast_in_dim", "squeeze"):
        shapes = [v.aval.shape for v in (*_reads(eqn), *eqn.outvars)]
        return len({tuple(n for n in shape if n != 1) for shape in shapes}) == 1
    return not _compat.subjaxprs(eqn) and not any(v.aval.shape for v in (*_reads(eqn), *eqn.outvars))


def _reads(eqn: Any) -> list[Var]:
    return [a for a in eqn.invars if is_var(a)]


def _part_outside(f: Fragment, eqns: Sequence[Any], cheap: Sequence[Any], wanted: set[Var]) -> Fragment:
    """A part outside of the core, with what it needs of the cheap equations; it returns what is wanted."""
    makes = tuple(v for e in eqns for v in e.outvars if v in wanted)
    needed = {v for e in eqns for v in _reads(e)}
    copies: set[Var] = set()
    for e in reversed(cheap):
        if not needed.isdisjoint(e.outvars):
            copies.update(e.outvars)
            needed.update(_reads(e))
    own = {v for e in eqns for v in e.outvars} | copies
    whole = [e for e in f.jaxpr.eqns if not own.isdisjoint(e.outvars)]
    takes = dict.fromkeys(v for e in whole for v in _reads(e) if v not in own)
    return _part(f, whole, tuple(takes), makes)


def _part(f: Fragment, eqns: Sequence[Any], takes: tuple[Var, ...], makes: tuple[Var, ...]) -> Fragment:
    jaxpr = _compat.close_jaxpr(takes, makes, eqns)
    return dataclasses.replace(f, jaxpr=jaxpr, invars=takes, outvars=makes)
