"""Gradients of state that several tasks use: summed where they are produced, added up at home once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from mmnnx.mpmd.place import Placement
from mmnnx.mpmd.trace import Atom, Equation, Loop, Node, Var, inline, is_var

_ADDS = ("add", "add_any")


def split_shared(nodes: Sequence[Node], placement: Placement) -> list[Node] | None:
    """Gives a running sum whose terms come from several meshes one accumulator on each of them.

    Without it a term made on another mesh would be sent in every microbatch; with it the accumulators are
    sent once, after the loop.

    Returns:
      The rewritten nodes, or None if there is no such sum.
    """
    out: list[Node] = []
    changed = False
    for node in nodes:
        if isinstance(node, Loop):
            before, loop, after = _split_loop(node, placement.bodies[node])
            changed |= loop is not node
            out += [*before, loop, *after]
        else:
            out.append(node)
    return out if changed else None


def _split_loop(loop: Loop, body: Placement) -> tuple[list[Node], Loop, list[Node]]:
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
        by_mesh: dict[Mesh, list[Var]] = {}
        for term in terms:
            by_mesh.setdefault(body.mesh_of(term), []).append(term)
        if len(by_mesh) < 2 or None in by_mesh:
            init.append(start)
            carry_in.append(enters)
            carry_out.append(leaves)
            carries.append(total)
            continue
        dropped.update(adds)
        parts: list[Var] = []
        for i, summands in enumerate(by_mesh.values()):
            if i:
                zeros, (begin,) = inline(lambda a=start.aval: jnp.copy(jnp.zeros(a.shape, a.dtype)), scope=last.scope)
                before += zeros
                running = jex.Var(enters.aval)
            else:
                begin, running = start, enters
            carry_in.append(running)
            init.append(begin)
            for term in summands:
                equations, (running,) = inline(jnp.add, running, term, scope=last.scope)
                added += equations
            carry_out.append(running)
            parts.append(jex.Var(total.aval))
            carries.append(parts[-1])
        equations, (result,) = inline(lambda *xs: sum(xs[1:], xs[0]), *parts, scope="")
        *head, final = equations
        assert final.outvars == [result]
        after += [*head, Equation(final.eqn.replace(outvars=[total]), "")]
    if not dropped:
        return [], loop, []
    new = dataclasses.replace(
        loop,
        body=(*(e for e in loop.body if e not in dropped), *added),
        init=tuple(init),
        carry_in=tuple(carry_in),
        carry_out=tuple(carry_out),
        carries=tuple(carries),
    )
    return before, new, after


def _terms(
    last: Equation, enters: Var, maker: dict[Var, Equation], uses: Counter
) -> tuple[list[Atom], list[Equation]]:
    """The terms that `last` adds to the carry, and the additions between them; nothing if it is no sum."""
    if last.name != "add" or enters not in last.invars or uses[enters] != 1:
        return [], []
    terms, adds, queue = [], [last], [a for a in last.invars if a is not enters]
    while queue:
        a = queue.pop(0)
        e = maker.get(a) if is_var(a) else None
        if e is not None and e.name in _ADDS and uses[a] == 1:
            adds.append(e)
            queue += e.invars
        else:
            terms.append(a)
    return [t for t in terms if is_var(t)] if all(map(is_var, terms)) else [], adds
