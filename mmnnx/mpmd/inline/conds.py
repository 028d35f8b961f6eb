"""What becomes of a cond over several tasks: one cond for each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.inline.distribution import distribute
from mmnnx.mpmd.inline.writer import InLoop, Writer
from mmnnx.mpmd.ir.dataflow import follow_back
from mmnnx.mpmd.ir.equations import Atom, Equation, Node, Var, is_var
from mmnnx.mpmd.ir.rewrite import prune


def open_cond(
    writer: Writer, eqn: Any, ahead: Sequence[Mesh | None], scope: str, out: list[Node]
) -> list[Atom] | None:
    """Appends a cond of several tasks to `out`, as one cond for each task, one after the other.

    What one of them hands to the next is zeros where another branch is taken. `ahead` has the homes of the
    state that its results are for, where that is known.

    Returns:
      What stands for its results; None, with nothing appended, if it has effects.
    """
    index, *operands = eqn.invars
    bodies: list[list[Node]] = []  # of each branch
    results: list[list[Atom]] = []
    for jaxpr in eqn.params["branches"]:
        bodies.append([])
        results.append(writer.inline(jaxpr, operands, scope, bodies[-1], InLoop.MICROBATCHES, ahead))
    inside = {v for body in bodies for e in body for v in e.outvars}
    for k, column in enumerate(zip(*results)):
        if inside.isdisjoint(filter(is_var, column)):  # no branch computes it: it is chosen at home
            at_home = [n for n, a in enumerate(column) if writer.of(a).home is not None]
            n = at_home[0] if at_home else 0
            (results[n][k],) = writer.emit(jnp.copy, [column[n]], scope, bodies[n])
    pruned = [prune(body, row) for body, row in zip(bodies, results)]
    nodes = [[e for e in body if isinstance(e, Equation)] for body in pruned]  # which are all
    makers = [{v: e for e in body for v in e.outvars} for body in nodes]
    equations = [e for body in nodes for e in body]
    # Gradients and their updates are made nowhere in particular yet: they follow their parameters.
    leads = {a: writer.leads[a] for a in filter(is_var, operands) if a in writer.leads}
    led = [(home, column) for home, column in zip(ahead, zip(*results)) if home is not None]
    leads |= {v: home for home, column in led for v in column if is_var(v)}
    for body in nodes:
        follow_back(body, leads, writer.state_home)

    def tie(e: Equation) -> Mesh | None:
        return writer.tie(e) or next((leads[v] for v in e.outvars if v in leads), None)

    def near(v: Var) -> Sequence[Mesh]:
        return writer.near.get(v, [leads[v]] if v in leads else ())

    parts = distribute(equations, [], [], tie, near)
    if parts is None or any(e.eqn.effects for e in equations):
        return None
    number = {v: p for p, part in enumerate(parts) for e in part.nodes for v in e.outvars}
    # A result comes from the last of the parts that make it in one branch or another.
    columns = [list(filter(is_var, column)) for column in zip(*results)]
    last = [max((number[v] for v in column if v in number), default=0) for column in columns]
    made: dict[Var, Var] = {}
    final: dict[int, Var] = {}
    for p, part in enumerate(parts):
        mine = [k for k, where in enumerate(last) if where == p]
        early = [v for k, where in enumerate(last) for v in columns[k] if number.get(v) == p < where]
        gives = list(dict.fromkeys([*part.gives, *early]))
        own = {v for e in part.nodes for v in e.outvars}
        read_in = [*(a for e in part.nodes for a in e.invars), *(a for k in mine for a in columns[k])]
        takes = list(dict.fromkeys(a for a in read_in if is_var(a) and a not in own))
        branches = []
        for n, maker in enumerate(makers):
            asked = [*(v if v in maker else None for v in gives), *(results[n][k] for k in mine)]
            types = [*(v.aval for v in gives), *(eqn.outvars[k].aval for k in mine)]
            eqns = [e.eqn for e in part.nodes if maker.get(e.outvars[0]) is e]
            branches.append(_branch(takes, eqns, asked, types))
        atoms = [index, *(made.get(v, v) for v in takes)]
        found = writer.emit_part(functools.partial(_switch, branches), atoms, part, scope, out)
        given = list(zip(gives, found))
        made.update(given)
        final.update(zip(mine, found[len(gives) :]))
        writer.hand_on(given, part, parts)
    return [final[k] for k in range(len(columns))]


def _switch(branches: Sequence[Callable[..., Any]], index: jax.Array, *operands: jax.Array) -> Any:
    return jax.lax.switch(index, branches, *operands)


def _branch(
    takes: Sequence[Var], eqns: Sequence[Any], asked: Sequence[Any], types: Sequence[Any]
) -> Callable[..., list[jax.Array]]:
    """A branch of one of the conds that a cond is divided into.

    Args:
      takes: variables that it is given.
      eqns: what of the branch is computed in this cond.
      asked: its results; None for what another branch makes, in place of which it has zeros.
      types: of the results.
    """
    jaxpr = _compat.close_jaxpr(takes, [a for a in asked if a is not None], eqns)

    def run(*args: jax.Array) -> list[jax.Array]:
        found = iter(jex.jaxpr_as_fun(jaxpr)(*args))
        return [jnp.zeros(t.shape, t.dtype) if a is None else next(found) for a, t in zip(asked, types)]

    return run
