"""The backward of a value that is made of shared state: of each stage's gradient, and not of their sum.

A normalised embedding, or a bias by relative positions, is the same for all microbatches. Its gradients come
from every stage that uses it. JAX adds them up, and takes the backward of how the value was made of their
sum: all of them would be sent, in every microbatch. That backward is linear, so it may be taken of each: then
each mesh sums up gradients of the state itself, which are sent home once (`place/gradient_sums.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from mmnnx.mpmd.ir.dataflow import is_zero, sum_terms
from mmnnx.mpmd.ir.equations import LAYOUT, Atom, Equation, Flat, Loop, Node, Var, is_var, nbytes
from mmnnx.mpmd.ir.rewrite import name_results, rename, trace_equations

_ADDS = {"add_any", "neg", "reduce_sum"} | LAYOUT
_OF_A_BIAS = _ADDS - {"transpose"}  # what the backward of a bias of one layer is made of, too
_FEW = 8  # gradients whose backwards are taken one by one


def distribute_shared_backward(flat: Flat, homes: Sequence[Mesh | None]) -> Flat:
    """The same function, whose loops take the backward of shared values apart.

    Args:
      homes: for each input, the mesh where that state lives, if it is placed.
    """
    home = {v: mesh for v, mesh in zip(flat.invars, homes) if mesh is not None}
    nodes: list[Node] = []
    for node in flat.nodes:
        if isinstance(node, Equation):
            found = {home.get(a) for a in node.invars if is_var(a)}
            if len(found) == 1 and (mesh := found.pop()) is not None:  # made of state of one mesh
                home.update(dict.fromkeys(node.outvars, mesh))
        elif isinstance(node, Loop):
            node = _Body(node, home).distributed()
        nodes.append(node)
    return dataclasses.replace(flat, nodes=tuple(nodes))


class _Body:
    """The body of a loop.

    Attributes:
      maker, users: of each variable; a result of the body has a user None.
      varying: variables that differ between microbatches.
      met: for each variable, the homes of the state that was met last on the ways to it.
      terms: of running sums; `added` are the equations that add them up.
      not_linear: variables of which something is made that is not linear in them.
      instead: what replaces an equation.
    """

    def __init__(self, loop: Loop, home: dict[Var, Mesh]):
        self.loop = loop
        self.maker = {v: e for e in loop.body if isinstance(e, Equation) for v in e.outvars}
        self.users: dict[Var, list[Node | None]] = {}
        for e in loop.body:
            for a in filter(is_var, e.invars):
                self.users.setdefault(a, []).append(e)
        for v in filter(is_var, (*loop.carry_out, *loop.ys)):
            self.users.setdefault(v, []).append(None)
        self.varying = {*loop.carry_in, *loop.slice_vars}
        self.met: dict[Var, frozenset[Mesh]] = {}
        for e in loop.body:
            reads = [a for a in e.invars if is_var(a)]
            if not isinstance(e, Equation) or e.eqn.effects or not self.varying.isdisjoint(reads):
                self.varying.update(e.outvars)
            own = frozenset(home[a] for a in reads if a in home)
            before = (self.met.get(a, frozenset()) for a in reads)
            self.met.update(dict.fromkeys(e.outvars, own or frozenset().union(*before)))
        self.terms: set[Var] = set()
        self.added: set[Equation] = set()
        self._find_sums()
        self.not_linear: set[Var] = set()
        self._find_not_linear()
        self.instead: dict[Node, list[Equation]] = {}

    def distributed(self) -> Loop:
        """The loop, with a backward for the gradients that come from each group of meshes."""
        for e in self.loop.body:  # the first sum that all the rest is made of, and not one on the way
            if isinstance(e, Equation) and e.name == "add_any" and e not in self.added:
                self._distribute(e)
        if not self.instead:
            return self.loop
        body = tuple(new for e in self.loop.body for new in self.instead.get(e, [e]))
        return dataclasses.replace(self.loop, body=body)

    def _find_sums(self) -> None:
        uses = Counter({v: len(users) for v, users in self.users.items()})
        for enters, leaves in zip(self.loop.carry_in, self.loop.carry_out):
            if (last := self.maker.get(leaves)) is not None and uses[leaves] == 1:
                found, adds = sum_terms(last, enters, self.maker, uses)
                self.terms.update(filter(is_var, found))
                self.added.update(adds)

    def _find_not_linear(self) -> None:
        self.not_linear.update(v for v, users in self.users.items() if None in users and v not in self.terms)
        for e in reversed(self.loop.body):
            whole = not isinstance(e, Equation) or len(e.outvars) != 1 or not self._is_linear(e, self.varying)
            if whole or not self.not_linear.isdisjoint(e.outvars):
                self.not_linear.update(a for a in e.invars if is_var(a) and a not in self.terms)

    def _distribute(self, total: Equation) -> None:
        """Takes the backward of a sum of gradients apart, if it is linear and one of a shared value."""
        backward = self._backward(total.outvars[0])
        if total in self.instead or all(e.name in _OF_A_BIAS for e in backward):
            return
        adds, gradients = self._gradients(total)
        if not all(map(is_var, gradients)) or not self._sends_less(total, backward):
            return
        groups: dict[Any, list[Atom]] = {}
        for v in gradients:
            # Whether two come from one mesh is not known yet, unless they met no state of another. Of many,
            # those are taken together that met the same, though on some ways that is met from several meshes.
            met = self.met.get(v, frozenset())
            groups.setdefault(met if len(met) == 1 or len(gradients) > _FEW else v, []).append(v)
        if len(groups) < 2:
            return
        self.instead.update({e: [] for e in (*adds, total)})
        named: list[dict[Var, Atom]] = []
        for members in groups.values():
            equations, (own,) = trace_equations(_sum, *members, scope=total.scope)
            self.instead[total] += equations
            named.append({total.outvars[0]: own})
        for e in backward:
            copies = [dataclasses.replace(e, eqn=rename(e.eqn, names)) for names in named]
            (v,) = e.outvars
            if v in self.terms:
                equations, whole = trace_equations(_sum, *(names[v] for names in named), scope=e.scope)
                copies += name_results(equations, whole, [v])
            self.instead[e] = copies

    def _sends_less(self, total: Equation, backward: Sequence[Equation]) -> bool:
        """Whether what the backward reads and makes has fewer bytes than all gradients that would be sent."""
        made = {*total.outvars, *(v for e in backward for v in e.outvars)}
        read = {a for e in backward for a in e.invars if is_var(a)} - made
        once = sum(map(nbytes, read)) + sum(nbytes(v) for v in made & self.terms)
        return once < self.loop.spec.length * nbytes(total.outvars[0])

    def _gradients(self, total: Equation) -> tuple[list[Equation], list[Atom]]:
        """The additions that a sum of gradients is made of, but for the last, and the gradients."""
        adds: list[Equation] = []
        found: list[Atom] = []
        queue = list(total.invars)
        while queue:
            v = queue.pop(0)
            e = self.maker.get(v) if is_var(v) else None
            if e is not None and e.name == "add_any" and len(self.users[v]) == 1:
                adds.append(e)
                queue += e.invars
            else:
                found.append(v)
        return adds, found

    def _backward(self, v: Var) -> list[Equation]:
        """The equations from a variable to terms of running sums, in order; none if others read it, or one is
        not linear in what is made of it alone."""
        if v in self.not_linear:
            return []
        made, found, queue = {v}, set[Equation](), [v]
        while queue:
            for e in self.users.get(queue.pop(), ()):
                if not isinstance(e, Equation) or len(e.outvars) != 1 or e in self.instead:
                    return []
                if e not in found:
                    found.add(e)
                    made.update(e.outvars)
                    queue += [o for o in e.outvars if o not in self.terms]
        if not all(self._is_linear(e, made) for e in found):
            return []
        return [e for e in self.loop.body if e in found]

    def _is_linear(self, e: Equation, made: set[Var]) -> bool:
        """Whether an equation is linear in what is in `made`, and all else that it reads is fixed."""
        own = [is_var(a) and a in made for a in e.invars]
        if any(is_var(a) and a in self.varying for a, is_own in zip(e.invars, own) if not is_own):
            return False
        match e.name:
            case "mul" | "dot_general":
                return sum(own) == 1
            case "div":
                return own == [True, False]
            case "pad":  # the backward of a slice
                return own == [True, False] and is_zero(e.invars[1], self.maker)
            case "scatter-add":  # of a gather
                return own == [False, False, True] and is_zero(e.invars[0], self.maker)
            case "convert_element_type":
                return e.invars[0].aval.dtype == e.outvars[0].aval.dtype
            case _:
                return e.name in _ADDS and all(own)


def _sum(*xs):
    return functools.reduce(jnp.add, xs)
