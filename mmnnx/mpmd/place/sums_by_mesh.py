"""Gradients of a value that several meshes read: those of one mesh are added up there, and their sum is sent.

JAX adds such gradients two by two, in the order in which they come, as in (a + b) + c. Where b and c are on
one mesh and a is on another, two values cross; of a + (b + c) only one. And a sum of two is made where it is
read next, if that sends less than to make it where the flow is. What is sent no less stays in JAX's order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Atom, Equation, Loop, Node, Var, is_var
from mmnnx.mpmd.ir.origin import Kind, Origin
from mmnnx.mpmd.ir.placement import Location, Placement, Reason, by_rank


def sum_by_mesh(nodes: Sequence[Node], placement: Placement, results: Iterable[Var]) -> list[Node]:
    """The nodes with sums in the order in which the fewest values are sent.

    Args:
      nodes: all nodes, in order.
      placement: where they are; it is changed as they are.
      results: variables that are read from outside. They stay where they are.
    """
    region = _Region(nodes, placement, frozenset(results))
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, Equation):
            out += region.summed(node)
        else:
            body = placement.bodies.pop(node)
            kept = [*node.carry_out, *(node.ys if isinstance(node, Loop) else ())]
            inner: Any = sum_by_mesh(node.body, body, kept)
            out.append(dataclasses.replace(node, body=tuple(inner)))
            placement.bodies[out[-1]] = body
    return out


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A sum of several terms.

    Attributes:
      terms: in order.
      adds: the equations that add them, the last first.
    """

    terms: list[Atom]
    adds: list[Equation]

    @property
    def result(self) -> Var:
        return self.adds[0].outvars[0]


class _Region:
    """One list of nodes."""

    def __init__(self, nodes: Sequence[Node], placement: Placement, results: frozenset[Var]):
        self.placement, self.results = placement, results
        self.maker: Mapping[Var, Node] = {v: n for n in nodes for v in n.outvars}
        self.users: dict[Var, list[Node]] = {}
        for node in nodes:
            for a in filter(is_var, node.invars):
                self.users.setdefault(a, []).append(node)
        self.dropped: set[Node] = set()
        self.made: dict[Node, list[Equation]] = {}
        self.adds = {e for e in nodes if isinstance(e, Equation) and self._is_addition(e)}
        for e in nodes:
            if e in self.adds and not self._is_term(e.outvars[0]):
                found = self._sum_of(e)
                if (new := self._rewritten(found)) is not None:
                    self.dropped.update(found.adds)
                    self.made[e] = new

    def summed(self, e: Equation) -> list[Equation]:
        """What takes the place of an equation."""
        return self.made.get(e, [] if e in self.dropped else [e])

    def _is_addition(self, e: Equation) -> bool:
        """Whether an equation adds two gradients in the flow of the backward."""
        at = self.placement.locations.get(e) if e.name == "add_any" else None
        return at is not None and at.position is not None and self.placement.phases[e] == "backward"

    def _is_term(self, v: Var) -> bool:
        """Whether an addition reads a value, and nothing else does."""
        users = self.users.get(v, ())
        return len(users) == 1 and v not in self.results and users[0] in self.adds

    def _sum_of(self, last: Node) -> _Sum:
        terms: list[Atom] = []
        adds: list[Equation] = []
        queue: list[Atom] = [last.outvars[0]]
        while queue:
            a = queue.pop(0)
            e = self.maker.get(a) if is_var(a) else None
            if isinstance(e, Equation) and e in self.adds and (e is last or self._is_term(a)):
                adds.append(e)
                queue = [*e.invars, *queue]
            else:
                terms.append(a)
        return _Sum(terms, adds)

    def _rewritten(self, found: _Sum) -> list[Equation] | None:
        """The equations of a sum, if it can be made so that fewer values are sent."""
        locations = [self._location(t) for t in found.terms]
        if any(s is None and self.placement.mesh_of(t) is not None for s, t in zip(locations, found.terms)):
            return None  # made by a loop, say
        here = self.placement.locations[found.adds[0]]
        end = min([here, *self._first_reader(found, here)], key=lambda end: self._sent_to(found, end))
        if self._sent_to(found, end) >= self._sent_now(found):
            return None
        return self._written(found, end)

    def _location(self, a: Atom) -> Location | None:
        maker = self.maker.get(a) if is_var(a) else None
        return self.placement.locations.get(maker) if maker is not None else None

    def _first_reader(self, found: _Sum, here: Location) -> list[Location]:
        """Where the sum is read first, if it can be made there."""
        users = self.users.get(found.result, ())
        fixed = self.placement.reasons[found.adds[0]] is Reason.IN_TASK or found.result in self.results
        if fixed or not users or any(u not in self.placement.locations for u in users):
            return []
        first = max((self.placement.locations[u] for u in users), key=by_rank)
        return [first] if first.position is not None and first.rank <= here.rank else []

    def _elsewhere(self, a: Atom, adds: Sequence[Node]) -> set[Mesh | None]:
        """The meshes where a value is or comes to, whatever becomes of these additions."""
        users = [u for u in self.users.get(a, ()) if u not in adds and u in self.placement.locations]
        return {self.placement.mesh_of(a), *(self.placement.locations[u].mesh for u in users)}

    def _sent_now(self, found: _Sum) -> int:
        """How many values are sent for a sum, and of it."""
        sent = {
            (a, mesh)
            for e in found.adds
            for a in filter(is_var, e.invars)
            if (mesh := self.placement.locations[e].mesh) not in self._elsewhere(a, found.adds)
            and self.placement.mesh_of(a) is not None
        }
        return len(sent) + self._sent_on(found, self.placement.locations[found.adds[0]])

    def _sent_to(self, found: _Sum, end: Location) -> int:
        """The same, if the terms of each mesh are added up and meet at `end`."""
        away = [terms for mesh, terms in self._groups(found, end).items() if mesh != end.mesh]
        arrived = sum(len(terms) == 1 and end.mesh in self._elsewhere(terms[0], found.adds) for terms in away)
        return len(away) - arrived + self._sent_on(found, end)

    def _sent_on(self, found: _Sum, end: Location) -> int:
        users = [u for u in self.users.get(found.result, ()) if u in self.placement.locations]
        return len({self.placement.locations[u].mesh for u in users} - {end.mesh})

    def _groups(self, found: _Sum, end: Location) -> dict[Mesh, list[Atom]]:
        """The terms of each mesh; what every mesh has is at `end`."""
        groups: dict[Mesh, list[Atom]] = {}
        for term in found.terms:
            groups.setdefault(self.placement.mesh_of(term) or end.mesh, []).append(term)
        return groups

    def _written(self, found: _Sum, end: Location) -> list[Equation]:
        """The equations that add the terms of each mesh, and then these sums."""
        equations: list[Equation] = []
        parts: list[Atom] = []
        groups = self._groups(found, end)
        whole = found.result if len(groups) == 1 else None
        for mesh, terms in groups.items():
            if mesh != end.mesh and len(terms) > 1:
                at = min(filter(None, map(self._location, terms)), key=by_rank)
                parts.append(self._added(equations, found, terms, at, whole))
            else:
                parts += terms
        if parts != [found.result]:
            self._added(equations, found, parts, end, found.result)
        return equations

    def _added(
        self, equations: list[Equation], found: _Sum, terms: Sequence[Atom], at: Location, result: Var | None
    ) -> Atom:
        """Adds up terms in one place, in equations that it appends; the last makes the result, if one is
        given."""
        like = found.adds[0]
        total = terms[0]
        for n, term in enumerate(terms[1:], 2):
            v = result if result is not None and n == len(terms) else jex.Var(like.outvars[0].aval)
            e = dataclasses.replace(like, eqn=like.eqn.replace(invars=[total, term], outvars=[v]))
            self.placement.put(e, at, "backward", Reason.ADDS_TO_SUM)
            self.placement.where[v] = Origin(Kind.ACTIVATION, at.mesh)
            equations.append(e)
            total = v
        return total
