"""Gradients of state that several tasks use: summed where they are produced, added up at home once."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import jax.extend.core as jex
import jax.numpy as jnp

from mmnnx.mpmd.ir.dataflow import sum_terms
from mmnnx.mpmd.ir.equations import Equation, Loop, Node, Var, is_var
from mmnnx.mpmd.ir.rewrite import inline


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
        terms, adds = sum_terms(last, enters, maker, uses) if last is not None else ([], [])
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
