"""What becomes of a cond over several tasks: one cond for each task, one after the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.inline.distribution import Part, distribute
from mmnnx.mpmd.inline.writer import InLoop, Writer
from mmnnx.mpmd.ir.dataflow import follow_back
from mmnnx.mpmd.ir.equations import Atom, Equation, Node, Var, is_var
from mmnnx.mpmd.ir.rewrite import prune


def write_cond(
    writer: Writer,
    eqn: Any,
    destinations: Sequence[Mesh | None],
    scope: str,
    out: list[Node],
    in_loop: InLoop,
) -> list[Atom] | None:
    """Writes a cond of several tasks as one cond for each task.

    What one of them hands to the next is zeros where another branch is taken. `destinations` has for each
    result the home of the state that it is for, where that is known; `in_loop` is which kind of loop the
    branches are in.

    Returns:
      Its results in the list; None, with nothing added to `out`, if it has effects.
    """
    branches = _write_branches(writer, eqn, destinations, scope, in_loop)
    parts = _distribute(writer, eqn, branches, destinations)
    if parts is None or any(e.eqn.effects for e in branches.equations):
        return None
    number = {v: p for p, part in enumerate(parts) for e in part.nodes for v in e.outvars}
    # A result comes from the last of the parts that make it in one branch or another.
    last = [max((number[v] for v in column if v in number), default=0) for column in branches.columns]
    made: dict[Var, Var] = {}  # of a variable of a branch, that of the list
    results: dict[int, Var] = {}
    for p, part in enumerate(parts):
        mine = [k for k, where in enumerate(last) if where == p]
        early = [v for k, where in enumerate(last) for v in branches.columns[k] if number.get(v) == p < where]
        gives = list(dict.fromkeys([*part.gives, *early]))
        takes = branches.read_by(part, mine)
        functions = [
            _branch(
                takes,
                [e.eqn for e in part.nodes if maker.get(e.outvars[0]) is e],
                [*(v if v in maker else None for v in gives), *(row[k] for k in mine)],
                [*(v.aval for v in gives), *(eqn.outvars[k].aval for k in mine)],
            )
            for maker, row in zip(branches.makers, branches.results)
        ]
        atoms = [eqn.invars[0], *(made.get(v, v) for v in takes)]
        found = writer.write_part(functools.partial(_switch, functions), atoms, part, scope, out)
        given = list(zip(gives, found))
        made.update(given)
        results.update(zip(mine, found[len(gives) :]))
        writer.record_part(given, part, parts)
    return [results[k] for k in range(len(last))]


@dataclasses.dataclass(frozen=True)
class _Branches:
    """The branches of a cond.

    Attributes:
      bodies: the equations of each.
      results: for each branch, its results.
    """

    bodies: list[list[Equation]]
    results: list[list[Atom]]

    @functools.cached_property
    def equations(self) -> list[Equation]:
        """Those of all branches."""
        return [e for body in self.bodies for e in body]

    @functools.cached_property
    def makers(self) -> list[dict[Var, Equation]]:
        """For each branch, which equation makes a variable."""
        return [{v: e for e in body for v in e.outvars} for body in self.bodies]

    @functools.cached_property
    def columns(self) -> list[list[Var]]:
        """For each result, the variables that it is in one branch or another."""
        return [list(filter(is_var, column)) for column in zip(*self.results)]

    def read_by(self, part: Part, results: Sequence[int]) -> list[Var]:
        """The variables that a part needs for its equations and for some results, by number."""
        own = {v for e in part.nodes for v in e.outvars}
        reads = [*(a for e in part.nodes for a in e.invars), *(a for k in results for a in self.columns[k])]
        return list(dict.fromkeys(a for a in reads if is_var(a) and a not in own))


def _write_branches(
    writer: Writer, eqn: Any, destinations: Sequence[Mesh | None], scope: str, in_loop: InLoop
) -> _Branches:
    """Writes each branch by itself; each result is made by an equation of at least one."""
    bodies: list[list[Node]] = []
    results: list[list[Atom]] = []
    for jaxpr in eqn.params["branches"]:
        bodies.append([])
        row = writer.write_jaxpr(jaxpr, eqn.invars[1:], scope, bodies[-1], in_loop, destinations)
        results.append(row)
    inside = {v for body in bodies for e in body for v in e.outvars}
    for k, column in enumerate(zip(*results)):
        if inside.isdisjoint(filter(is_var, column)):  # no branch computes it: it is chosen at home
            at_home = [n for n, a in enumerate(column) if writer.origin_of(a).home is not None]
            n = at_home[0] if at_home else 0
            (results[n][k],) = writer.write(jnp.copy, [column[n]], scope, bodies[n])
    pruned = [prune(body, row) for body, row in zip(bodies, results)]
    return _Branches([[e for e in body if isinstance(e, Equation)] for body in pruned], results)  # all are


def _distribute(
    writer: Writer, eqn: Any, branches: _Branches, destinations: Sequence[Mesh | None]
) -> list[Part] | None:
    """Divides the branches between meshes.

    Gradients and their updates are unplaced as yet: they go where their parameters are.
    """
    operands = filter(is_var, eqn.invars[1:])
    homes = {a: writer.destination[a] for a in operands if a in writer.destination}
    for home, column in zip(destinations, branches.columns):
        if home is not None:
            homes.update(dict.fromkeys(column, home))
    for body in branches.bodies:
        follow_back(body, homes, writer.state_home)

    def pinned_mesh(e: Equation) -> Mesh | None:
        return writer.pinned_mesh(e) or next((homes[v] for v in e.outvars if v in homes), None)

    def available_on(v: Var) -> Sequence[Mesh]:
        return writer.available.get(v, [homes[v]] if v in homes else ())

    return distribute(branches.equations, [], [], pinned_mesh, available_on)


def _switch(branches: Sequence[Callable[..., Any]], index: jax.Array, *operands: jax.Array) -> Any:
    return jax.lax.switch(index, branches, *operands)


def _branch(
    takes: Sequence[Var], eqns: Sequence[Any], results: Sequence[Any], types: Sequence[Any]
) -> Callable[..., list[jax.Array]]:
    """A branch of one of the conds that a cond is divided into.

    Args:
      takes: variables that it is given.
      eqns: what of the branch is computed in this cond.
      results: its results; None for what another branch makes, in place of which it has zeros.
      types: of the results.
    """
    jaxpr = _compat.close_jaxpr(takes, [a for a in results if a is not None], eqns)

    def run(*args: jax.Array) -> list[jax.Array]:
        found = iter(jex.jaxpr_as_fun(jaxpr)(*args))
        return [jnp.zeros(t.shape, t.dtype) if a is None else next(found) for a, t in zip(results, types)]

    return run
