"""Gradients of state that several tasks use: summed where they are made, added up at home after the loop.

Where a term of a sum is made is known when the terms are placed one by one. So placement sees a loop in which
each term has an accumulator of its own (`separate_sums`); afterwards the terms made on one mesh share one
(`group_sums`). A term made away from home is then not sent in every microbatch: its accumulator is sent once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from mmnnx.mpmd.ir.dataflow import sum_terms
from mmnnx.mpmd.ir.equations import Equation, Loop, Node, Var, is_var
from mmnnx.mpmd.ir.origin import CONST
from mmnnx.mpmd.ir.placement import Location, Placement, Reason
from mmnnx.mpmd.ir.rewrite import trace_equations


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """A carry of a loop that holds the sum of some terms.

    Attributes:
      terms: body variables.
      adds: the equations that add them.
      enters, leaves: the carry before and after a microbatch.
      part: outer variable, the sum after the last microbatch.
      total: outer variable, the sum of all accumulators of a running sum.
    """

    terms: list[Var]
    adds: list[Equation]
    enters: Var
    leaves: Var
    part: Var
    total: Var


@dataclasses.dataclass(frozen=True)
class Sums:
    """A loop with its running sums of several terms.

    Attributes:
      before, after: the zeros that accumulators start from, and the equations that add them up.
      loop: the loop.
      accumulators: of all running sums of several terms.
    """

    before: list[Equation]
    loop: Loop
    after: list[Equation]
    accumulators: list[Accumulator]


def separate_sums(nodes: Sequence[Node]) -> tuple[list[Node], list[Sums]]:
    """The nodes with an accumulator for each term of a running sum; and what became of each loop."""
    out: list[Node] = []
    found: list[Sums] = []
    each_alone = lambda term: term
    for node in nodes:
        if isinstance(node, Loop):
            found.append(_with_accumulators(node, each_alone))
            out += [*found[-1].before, found[-1].loop, *found[-1].after]
        else:
            out.append(node)
    return out, found


def group_sums(nodes: Sequence[Node], separate: Sequence[Sums], placement: Placement) -> list[Node]:
    """The nodes with an accumulator for the terms of each mesh.

    Args:
      nodes: all nodes, in order, as they were before `separate_sums`.
      separate: what that made of each loop.
      placement: of what it made; what is new is added to it.
    """
    out: list[Node] = []
    loops = iter(separate)
    for node in nodes:
        if not isinstance(node, Loop):
            out.append(node)
            continue
        apart = next(loops)
        body = placement.bodies[apart.loop]
        # The sum that starts from state may be kept with the state, and not where its term is made.
        kept = {a.terms[0]: body.mesh_of(a.leaves) for a in apart.accumulators}
        grouped = _with_accumulators(node, kept.get)
        _carry_over(placement, apart, grouped)
        out += [*grouped.before, grouped.loop, *grouped.after]
    return out


def _carry_over(placement: Placement, apart: Sums, grouped: Sums) -> None:
    """Places what is new in a loop with grouped accumulators, from where the separate ones are."""
    body = placement.bodies.pop(apart.loop)
    placement.bodies[grouped.loop] = body
    alone = {a.terms[0]: a for a in apart.accumulators}
    final = {v: e for e in apart.after for v in e.outvars}
    for a in grouped.accumulators:
        first = alone[a.terms[0]]
        at: dict[Var, tuple[Location, str]] = {}  # the location and phase of a value, where it has one
        for term in a.terms:
            last = alone[term].adds[-1]
            if last in body.locations:
                at[term] = body.locations[last], body.phases[last]
        for e in a.adds:
            body.where.update(dict.fromkeys(e.outvars, body.where[first.leaves]))
            if found := [at[v] for v in e.invars if is_var(v) and v in at]:
                here = min(found, key=lambda item: item[0].rank)
                body.put(e, *here, Reason.ADDS_TO_SUM)
                at.update(dict.fromkeys(e.outvars, here))
        body.where[a.enters] = body.where[first.enters]
        if a.part is not a.total:
            placement.where[a.part] = placement.where[first.part]
    for e in grouped.before:
        placement.where.update(dict.fromkeys(e.outvars, CONST))
    for a in grouped.accumulators:
        if a.total in placement.follows:
            placement.follows[a.part] = placement.follows[a.total]
    total_of: dict[Var, Var] = {}  # what each addition is a part of
    for e in reversed(grouped.after):
        total = total_of.setdefault(e.outvars[0], e.outvars[0])
        total_of.update((a, total) for a in e.invars if is_var(a))
    for e in grouped.after:
        placement.put_like([e], final[total_of[e.outvars[0]]])


def _with_accumulators(loop: Loop, group_of: Callable[[Var], Hashable]) -> Sums:
    """A loop whose running sums have one accumulator for each group of terms."""
    maker = {v: e for e in loop.body for v in e.outvars}
    number = {e: n for n, e in enumerate(loop.body)}
    uses = Counter(a for e in loop.body for a in e.invars if is_var(a))
    uses.update([*loop.carry_out, *loop.ys])
    before: list[Equation] = []
    after: list[Equation] = []
    dropped: set[Equation] = set()
    found: list[Accumulator] = []
    carried: list[tuple[Var, Var, Var, Var]] = []  # before the loop, before and after a microbatch, after it
    for start, enters, leaves, total in zip(loop.init, loop.carry_in, loop.carry_out, loop.carries):
        last = maker.get(leaves)
        terms, adds = sum_terms(last, enters, maker, uses) if last is not None else ([], [])
        groups: dict[Hashable, list[Var]] = {}
        for term in terms:
            groups.setdefault(group_of(term), []).append(term)
        if last is None or len(groups) < 2:
            carried.append((start, enters, leaves, total))
            if len(terms) > 1:
                order = sorted(adds, key=number.__getitem__)
                found.append(Accumulator(terms, order, enters, leaves, total, total))
            continue
        dropped.update(adds)
        parts: list[Var] = []
        for n, members in enumerate(groups.values()):
            begin, entering = start, enters
            if n:  # the first group takes over the accumulator there was
                zeros, (begin,) = trace_equations(functools.partial(_zeros, start.aval), scope=last.scope)
                before += zeros
                entering = jex.Var(enters.aval)
            running, equations = entering, []
            for term in members:
                added, (running,) = trace_equations(_add, running, term, scope=last.scope)
                equations += added
            parts.append(jex.Var(total.aval))
            found.append(Accumulator(members, equations, entering, running, parts[-1], total))
            carried.append((begin, entering, running, parts[-1]))
        sums, _ = trace_equations(lambda *xs: functools.reduce(jnp.add, xs), *parts, scope="")
        after += [*sums[:-1], Equation(sums[-1].eqn.replace(outvars=[total]), "")]
    if not dropped:
        return Sums([], loop, [], found)
    added = [e for a in found if a.part is not a.total for e in a.adds]
    init, carry_in, carry_out, carries = zip(*carried)
    body = (*(e for e in loop.body if e not in dropped), *added)
    new = dataclasses.replace(
        loop, body=body, init=init, carry_in=carry_in, carry_out=carry_out, carries=carries
    )
    return Sums(before, new, after, found)


def _zeros(aval: Any):
    return jnp.copy(jnp.zeros(aval.shape, aval.dtype))


def _add(acc, x):
    return acc + x.astype(acc.dtype)
