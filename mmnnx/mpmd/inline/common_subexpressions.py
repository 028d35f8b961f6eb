"""Common subexpression elimination: what is computed twice from weights is computed once.

A train step may call a model twice on one batch: for its loss, and for a metric or for old probabilities.
XLA makes one forward of the two, where it sees both. It cannot once they are cut, and every activation would
be sent twice. So they become one before anything is placed.

Where layers of two meshes do the same to one value, such as a norm without weights, it stays twice: each mesh
makes its own, and what they would share may be larger than the value.

What no weight is in (masks, positions) stays: each mesh that reads it makes it itself. So does what backwards
alone read: they may compute a forward again on purpose (`jax.checkpoint`), each in a position of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from mmnnx.mpmd.ir.equality import equation_key
from mmnnx.mpmd.ir.equations import Atom, Equation, Flat, Loop, Node, Var, While, is_var
from mmnnx.mpmd.ir.rewrite import prune, read
from mmnnx.sharding.name_stack import is_backward

_NEVER = {"optimization_barrier"}  # is there to keep apart what is equal


def merge_common_subexpressions(
    flat: Flat, homes: Sequence[Mesh | None], task_of: Callable[[str], Hashable]
) -> Flat:
    """The same function, without the second of two equal equations that weights are in.

    Args:
      homes: for each input, the mesh where that state lives, if it is placed.
      task_of: the task of a name stack, if any: equal equations of two tasks stay two.
    """
    merger = _Merger(task_of)
    merger.home.update((v, home) for v, home in zip(flat.invars, homes) if home is not None and _is_float(v))
    merger.weighted.update(merger.home)
    return dataclasses.replace(flat, nodes=tuple(merger.merged(flat.nodes, flat.outvars)))


class _Merger:
    """Goes over nodes in order.

    Attributes:
      first: for the result of an equation that equals earlier ones, that of the earliest.
      shared: for that of the earliest, the results that are read in place of all equal ones.
      instead: for results that are not read any more, what is.
      weighted: values that weights are in.
      home: of weights, and of what is made of those of one mesh alone.
      met: for each value, the homes of the weights that it meets first in the forward.
    """

    def __init__(self, task_of: Callable[[str], Hashable]):
        self.task_of = task_of
        self.first: dict[Var, Var] = {}
        self.shared: dict[Var, Sequence[Var]] = {}
        self.instead: dict[Var, Var] = {}
        self.weighted: set[Var] = set()
        self.home: dict[Var, Mesh] = {}
        self.met: dict[Var, set[Mesh]] = {}
        self._seen: dict[Hashable, Equation] = {}

    def merged(self, nodes: Sequence[Node], results: Iterable[Atom]) -> list[Node]:
        """The nodes, of which some read other values that equal theirs.

        Args:
          results: what is made for others. Each keeps an equation of its own, as what loops begin with does.
        """
        kept, read_forward = set(filter(is_var, results)), set[Var]()
        for node in nodes:
            if isinstance(node, Loop):
                kept.update(v for row in node.slices for v in row)
            if not isinstance(node, Equation):
                kept.update(filter(is_var, node.init))
            elif not is_backward(node.scope):
                read_forward.update(filter(is_var, node.invars))
        self._meet(nodes)
        merged: list[Node] = []
        for node in nodes:
            if isinstance(node, Equation):
                self._merge(node, kept, read_forward)
                merged.append(self._renamed(node))
            else:
                merged.append(self._loop(node))
        return prune(merged, kept) if self.instead else merged

    def _meet(self, nodes: Sequence[Node]) -> None:
        """Finds the homes of weights, and which of them each value meets first in the forward."""
        forward = [node for node in nodes if isinstance(node, Equation) and not is_backward(node.scope)]
        reads = {e: [a for a in e.invars if is_var(a)] for e in forward}
        for e in forward:
            homes = {self.home.get(a) for a in reads[e]}
            if len(homes) == 1 and (home := homes.pop()) is not None:
                self.home.update(dict.fromkeys(e.outvars, home))
        for e in reversed(forward):
            own = {self.home[a] for a in reads[e] if a in self.home}
            first = own or set().union(*(self.met.get(v, ()) for v in e.outvars))
            for a in reads[e]:
                if a not in self.home and first:
                    self.met.setdefault(a, set()).update(first)

    def _are_apart(self, e: Equation, shared: Sequence[Var]) -> bool:
        """Whether an equation that reads no weights, and the one that it equals, are for layers of two
        meshes."""
        if any(a in self.home for a in e.invars if is_var(a)):
            return False
        here, there = (set().union(*(self.met.get(v, ()) for v in own)) for own in (e.outvars, shared))
        return bool(here) and bool(there) and here.isdisjoint(there)

    def _merge(self, e: Equation, kept: set[Var], read_forward: set[Var]) -> None:
        if not self.weighted.isdisjoint(filter(is_var, e.invars)):
            self.weighted.update(e.outvars)
        if e.eqn.effects or e.kept or e.name in _NEVER:
            return
        self._number(e)
        if self.weighted.isdisjoint(e.outvars) or read_forward.isdisjoint(e.outvars):
            return
        v = e.outvars[0]
        shared = self.shared.setdefault(self.first.get(v, v), e.outvars)
        if shared is not e.outvars and kept.isdisjoint(e.outvars) and not self._are_apart(e, shared):
            self.instead.update(zip(e.outvars, shared))

    def _number(self, e: Equation) -> None:
        """Finds the earliest equation that equals one."""
        reads = tuple(read(self.first, a) if is_var(a) else None for a in e.invars)
        try:
            key = e.name, reads, self.task_of(e.scope), equation_key(e.eqn)
        except TypeError:  # such as a parameter that is not hashable
            return
        equal = self._seen.setdefault(key, e)
        if equal is not e:
            self.first.update(zip(e.outvars, equal.outvars))

    def _renamed(self, e: Equation) -> Equation:
        if self.instead.keys().isdisjoint(filter(is_var, e.invars)):
            return e
        return dataclasses.replace(e, eqn=e.eqn.replace(invars=[read(self.instead, a) for a in e.invars]))

    def _loop(self, loop: Loop | While) -> Loop | While:
        inside = _Merger(self.task_of)
        inside.first, inside.instead, inside.weighted = {**self.first}, {**self.instead}, {*self.weighted}
        inside.home.update(self.home)
        given = [(v, a) for v, a in zip(loop.carry_in, loop.init)]
        results = [*loop.carry_out]
        if isinstance(loop, Loop):
            given += ((v, row[0]) for v, row in zip(loop.slice_vars, loop.slices))
            results += loop.ys
        inside.weighted.update(v for v, a in given if is_var(a) and a in self.weighted)
        inside.home.update((v, self.home[a]) for v, a in given if is_var(a) and a in self.home)
        body: Any = inside.merged(loop.body, results)
        made = [*zip(loop.carries, loop.carry_out)]
        if isinstance(loop, Loop):
            made += ((v, y) for y, row in zip(loop.ys, loop.stacks) for v in row)
        self.weighted.update(v for v, inner in made if is_var(inner) and inner in inside.weighted)
        return dataclasses.replace(loop, body=tuple(body))


def _is_float(v: Var) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)
