"""Gradients of state that several tasks use: summed where they are produced, added up at home once."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import jax.extend.core as jex
import jax.numpy as jnp

from mmnnx.mpmd.ir.equations import Atom, Equation, Loop, Node, Var, inline, is_var

_ADDS = ("add", "add_any")


def split_sums(nodes: Sequence[Node], group_of: Callable[[Loop, Var], Hashable]) -> list[Node]:
    """Gives a running sum of several terms one accumulator for each group of its terms.

    With groups by mesh, a term made away from home is not sent in every microbatch: its accumulator is sent
    once, after the loop.

    Args:
      nodes: all nodes, in order.
      group_of: from a loop and a term (a body variable) to the group of that term.

    Returns:
      The nodes, with loops replaced that hold such sums.
    """
    out: list[Node] = []
    for node in nodes:
        out += _split_loop(node, group_of) if isinstance(node, Loop) else [node]
    return out


def running_sums(loop: Loop) -> set[Var]:
    """The carries of a loop that microbatches do nothing with but add to, as they enter."""
    maker = {v: e for e in loop.body for v in e.outvars}
    uses = Counter(a for e in loop.body for a in e.invars if is_var(a))
    uses.update([*loop.carry_out, *loop.ys])
    return {
        enters
        for enters, leaves in zip(loop.carry_in, loop.carry_out)
        if leaves in maker and uses[leaves] == 1 and _terms(maker[leaves], enters, maker, uses)[0]
    }


def _split_loop(loop: Loop, group_of: Callable[[Loop, Var], Hashable]) -> list[Node]:
    maker = {v: e for e in loop.body for v in e.outvars}
    uses = Counter(a for e in loop.body for a in e.invars if is_var(a))
    uses.update([*loop.carry_out, *loop.ys])
    before: list[Node] = []
    after: list[Node] = []
    dropped: set[Equation] = set()
    added: list[Equation] = []
    init, carry_in, carry_out, carries = [], [], [], []
    for start, enters, leaves, total in zip(loop.init, loop.carry_in, loop.carry_out, loop.carries):
        last = maker.get(leaves)
        terms, adds = _terms(last, enters, maker, uses) if last is not None else ([], [])
        groups: dict[Hashable, list[Var]] = {}
        for term in terms:
            groups.setdefault(group_of(loop, term), []).append(term)
        if last is None or len(groups) < 2:
            init.append(start)
            carry_in.append(enters)
            carry_out.append(leaves)
            carries.append(total)
            continue
        dropped.update(adds)
        parts: list[Var] = []
        for i, summands in enumerate(groups.values()):
            begin, running = start, enters
            if i:  # the first group takes over the accumulator there was
                aval = start.aval
                zeros, (begin,) = inline(
                    lambda a=aval: jnp.copy(jnp.zeros(a.shape, a.dtype)), scope=last.scope
                )
                before += zeros
                running = jex.Var(enters.aval)
            init.append(begin)
            carry_in.append(running)
            for term in summands:
                add = lambda acc, x: acc + x.astype(acc.dtype)
                equations, (running,) = inline(add, running, term, scope=last.scope)
                added += equations
            carry_out.append(running)
            parts.append(jex.Var(total.aval))
        carries += parts
        sums, _ = inline(lambda *xs: functools.reduce(jnp.add, xs), *parts, scope="")
        after += [*sums[:-1], Equation(sums[-1].eqn.replace(outvars=[total]), "")]
    if not dropped:
        return [loop]
    new = dataclasses.replace(
        loop,
        body=(*(e for e in loop.body if e not in dropped), *added),
        init=tuple(init),
        carry_in=tuple(carry_in),
        carry_out=tuple(carry_out),
        carries=tuple(carries),
    )
    return [*before, new, *after]


def _terms(
    last: Equation, enters: Var, maker: dict[Var, Equation], uses: Counter
) -> tuple[list[Atom], list[Equation]]:
    """The terms that `last` adds to the carry, and the additions between them; nothing if it is no sum.

    What widens a sum of floats is passed through: the terms are widened one by one. (Rounded to integers, or
    kept in fewer bits, they would not add up to the same.)
    """
    if last.name != "add" or enters not in last.invars or uses[enters] != 1:
        return [], []
    terms, adds, queue = [], [last], [a for a in last.invars if a is not enters]
    while queue:
        a = queue.pop(0)
        e = maker.get(a) if is_var(a) else None
        if e is not None and (e.name in _ADDS or _widens(e)) and uses[a] == 1:
            adds.append(e)
            queue += e.invars
        else:
            terms.append(a)
    return [t for t in terms if is_var(t)] if all(map(is_var, terms)) else [], adds


def _widens(e: Equation) -> bool:
    """Whether an equation is a conversion of floats to a wider float type."""
    if e.name != "convert_element_type":
        return False
    narrow, wide = e.invars[0].aval.dtype, e.outvars[0].aval.dtype
    floats = jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(wide, jnp.floating)
    return floats and (narrow == wide or jnp.finfo(narrow).bits < jnp.finfo(wide).bits)
