"""Writes the flat list of equations, and keeps what is known of the values that they make."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.inline.distribution import Part
from mmnnx.mpmd.ir.dataflow import follow_back
from mmnnx.mpmd.ir.equations import CALLS, LAYOUT, Atom, Equation, Node, Var, is_var, join, nbytes
from mmnnx.mpmd.ir.origin import ACTIVATION, CONST, FREE, Kind, Origin, combine
from mmnnx.mpmd.ir.rewrite import read, trace_equations


class InLoop(enum.Enum):
    """Which Loop equations are in the body of; and so what a scan or a while over several tasks becomes."""

    NO = enum.auto()  # none: a scan becomes a Loop, a while a While
    MICROBATCHES = enum.auto()  # that of mm.microbatch: a scan is divided or unrolled, a while refused
    ITERATIONS = enum.auto()  # that of a scan, which HoldsLoop gives up: the scan is unrolled
    DIVIDED = enum.auto()  # none, but a cond or scan that is divided: a scan is, too; HoldsLoop for a while


class HoldsLoop(Exception):
    """What was to be a Loop, or divided between tasks, holds a loop that cannot be in there."""


class Writer(abc.ABC):
    """Writes equations behind those that are there, and knows what every variable is made of.

    Methods take `out`, the list that they write to, and `scope`, the name stack around what they write.

    Attributes:
      task_mesh: from a name stack to the mesh of the task it lies in, None outside tasks.
      names: what messages call each mesh.
      origin: of each variable.
      constants: variables for arrays that the function captured, and the arrays.
      layout_of: of values that only lay out another one anew, the other one.
      available: for what a distributed scan or cond made, the meshes that have it.
      destination: where there are conds, for gradients and updates that are unplaced as yet, the home
        of the state that they are for.
    """

    def __init__(self, task_mesh: Callable[[str], Mesh | None], names: dict[Mesh, str]):
        self.task_mesh, self.names = task_mesh, names
        self.origin: dict[Var, Origin] = {}
        self.constants: list[tuple[Var, Any]] = []
        self.layout_of: dict[Var, Var] = {}
        self.available: dict[Var, Sequence[Mesh]] = {}
        self.destination: dict[Var, Mesh] = {}

    @abc.abstractmethod
    def write_equation(
        self, eqn: Any, destinations: Sequence[Mesh | None], scope: str, out: list[Node], in_loop: InLoop
    ) -> Sequence[Atom]:
        """Writes an equation, or what is in it if it is a call or holds computation of several tasks.

        Args:
          eqn: the equation, over variables of the list.
          destinations: for each of its results the home of the state that it is for, where that is known.

        Returns:
          Its results in the list.
        """

    def origin_of(self, atom: Atom) -> Origin:
        """What an atom is made of."""
        return self.origin[atom] if is_var(atom) else CONST

    def state_home(self, atom: Atom) -> Mesh | None:
        """Where an atom lives if it is state of one home."""
        origin = self.origin.get(atom, CONST) if is_var(atom) else CONST
        return origin.home if origin.kind is Kind.STATE else None

    def record(self, node: Equation, origin: Origin) -> None:
        """Notes what the results of an equation are made of."""
        self.origin.update((v, origin) for v in node.outvars)
        layout = node.name in LAYOUT - {"broadcast_in_dim"} or node.name == "logical_constraint"
        if layout and is_var(node.invars[0]):
            root = self.layout_of.get(node.invars[0], node.invars[0])
            self.layout_of.update((v, root) for v in node.outvars)

    def constant(self, value: Any, aval: Any) -> Var:
        """A variable for an array that the function captured."""
        var = jex.Var(aval)
        self.constants.append((var, value))
        self.origin[var] = FREE
        return var

    def write_jaxpr(
        self,
        jaxpr: Any,
        args: Sequence[Atom],
        scope: str,
        out: list[Node],
        in_loop: InLoop,
        destinations: Sequence[Mesh | None] = (),
    ) -> list[Atom]:
        """Writes the equations of `jaxpr` over `args`, each by `write_equation`; its results.

        `destinations` has for each result the home of the state that it is for, where that is known.
        """
        invars, outvars, eqns, consts = _compat.open_jaxpr(jaxpr)
        env = dict(zip(invars, args)) | {v: self.constant(value, v.aval) for v, value in consts}
        homes = {v: home for v, home in zip(outvars, destinations) if is_var(v) and home is not None}
        if _holds_cond(eqns):
            follow_back([Equation(e, "") for e in eqns], homes, lambda a: self.state_home(read(env, a)))
        for eqn in eqns:
            mine = [homes.get(v) for v in eqn.outvars]
            read_here = eqn.replace(invars=[read(env, a) for a in eqn.invars])
            inner = join(scope, str(eqn.source_info.name_stack))
            results = self.write_equation(read_here, mine, inner, out, in_loop)
            env.update(zip(eqn.outvars, results))
            self.destination.update(
                (r, home) for r, home in zip(results, mine) if is_var(r) and home is not None
            )
        return [read(env, v) for v in outvars]

    def write(self, fun: Callable, atoms: Sequence[Atom], scope: str, out: list[Node]) -> list[Var]:
        """Writes the equations of `fun` over `atoms`; its results."""
        flat, results = trace_equations(fun, *atoms, scope=scope)
        for node in flat:
            self.record(node, combine(self.origin_of(a) for a in node.invars))
        out += flat
        return results

    def own_results(self, results: Sequence[Atom], scope: str, body: list[Node]) -> list[Var]:
        """The results of a body, each made by an equation of its own."""
        made = {v for node in body for v in node.outvars}
        own: list[Var] = []
        for atom in results:
            if not is_var(atom) or atom not in made or atom in own:
                # an input, a constant, one result twice
                (atom,) = self.write(jnp.copy, [atom], scope, body)
            own.append(atom)
        return own

    def write_part(
        self, fun: Callable, atoms: Sequence[Atom], part: Part, scope: str, out: list[Node]
    ) -> list[Var]:
        """Writes the equations of `fun`, which a part has become, in the task that the part is of."""
        own = (e.scope for e in part.nodes if self.task_mesh(e.scope) is not None)
        return self.write(fun, atoms, next(own, scope), out)

    def pinned_mesh(self, e: Equation) -> Mesh | None:
        """The mesh of an equation's task, or of most of the state that it reads."""
        homes = [(nbytes(a), home) for a in e.invars if (home := self.origin_of(a).home) is not None]
        return self.task_mesh(e.scope) or max(homes, key=lambda item: item[0], default=(0, None))[1]

    def record_carries(self, carries: Sequence[Atom], before: Sequence[Atom]) -> None:
        """Notes that state that a loop carries is at home where it was before."""
        for v, origin in zip(carries, map(self.origin_of, before)):
            if is_var(v) and origin.home is not None:
                self.origin[v] = origin
            elif is_var(v):
                self.origin.setdefault(v, ACTIVATION)

    def record_part(self, gives: Iterable[tuple[Var, Var]], part: Part, parts: Sequence[Part]) -> None:
        """Notes which meshes have what a part gives: (variable of the part, variable of the list)."""
        for v, made in gives:
            readers = (each.mesh for each in parts if v in each.takes)
            self.available[made] = [mesh for mesh in (part.mesh, *readers) if mesh is not None]


def _holds_cond(eqns: Sequence[Any]) -> bool:
    """Whether there is a cond among equations, or in the calls among them."""
    bodies = (
        _compat.open_jaxpr(b)[2] for e in eqns if e.primitive.name in CALLS for b in _compat.subjaxprs(e)
    )
    return any(e.primitive.name == "cond" for e in eqns) or any(map(_holds_cond, bodies))
