"""Logical constraints outside of tasks become constraints over the meshes of the tasks that read the value.

A task reads a value if an equation in its scope does, or reads what equations outside of tasks made of it.
What no task reads is constrained as in the task that made it; what none made either, over the MultiMesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from mmnnx import _compat
from mmnnx.mpmd.frontend.function import TaskOf
from mmnnx.mpmd.ir.equations import (
    Atom,
    Equation,
    Flat,
    Loop,
    Node,
    Var,
    While,
    holds,
    is_var,
    join,
    scopes_in,
    with_bodies,
)
from mmnnx.mpmd.ir.rewrite import trace_equations
from mmnnx.sharding.logical import logical_sharding
from mmnnx.sharding.task import Task
from mmnnx.sharding.task_scope import scope_name

_NAME = "logical_constraint"


def resolve_logical_constraints(flat: Flat, task_of: TaskOf) -> Flat:
    """The same function with constraints that name axes of meshes alone.

    Raises:
      ValueError: a rule of a task names an axis that its mesh lacks, or an array has no dimension for one.
    """
    if not any(isinstance(n, Equation) and holds(n.eqn, _NAME) for n in with_bodies(flat.nodes)):
        return flat
    return _Resolver(flat.nodes, task_of).resolved(flat)


class _Resolver:
    """Writes equations anew; a constraint is written when its result is first read.

    Attributes:
      readers: for each variable the first task that reads it.
      makers: for each variable a task that it was made in, or of whose values.
      pending: for the result of a logical constraint, that equation and the list which it belongs to.
      written: what stands for such a result, by its operand, sharding and scope.
    """

    def __init__(self, nodes: Sequence[Node], task_of: TaskOf):
        self.task_of = task_of
        self.readers: dict[Var, Task] = {}
        self.makers: dict[Var, Task] = {}
        self.pending: dict[Var, tuple[Equation, list[Node]]] = {}
        self.written: dict[tuple[Atom, NamedSharding, str], Atom] = {}
        self._note_readers(nodes)

    def resolved(self, flat: Flat) -> Flat:
        nodes: list[Node] = []
        for node in flat.nodes:
            self._write(node, nodes)
        outvars = tuple(self._read(a, None) for a in flat.outvars)
        return dataclasses.replace(flat, nodes=tuple(nodes), outvars=outvars)

    def _note_readers(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            if isinstance(node, Loop | While):
                _hand_on(self.readers, ((v, [o]) for v, o in zip(node.carries, node.carry_out)))
                if isinstance(node, Loop):
                    _hand_on(self.readers, ((v, [y]) for y, row in zip(node.ys, node.stacks) for v in row))
                self._note_readers(node.body)
                if isinstance(node, Loop):
                    _hand_on(self.readers, zip(node.slice_vars, node.slices))
                _hand_on(self.readers, ((v, [a]) for v, a in zip(node.carry_in, node.init)))
            elif (task := self._reader(node)) is not None:
                self.readers.update((a, task) for a in node.invars if is_var(a))

    def _reader(self, e: Equation) -> Task | None:
        """The task that reads the operands of an equation."""
        return self._own_task(e) or next((self.readers[v] for v in e.outvars if v in self.readers), None)

    def _own_task(self, e: Equation) -> Task | None:
        inside = (s for jaxpr in _compat.subjaxprs(e.eqn) for s in scopes_in(jaxpr, e.scope))
        return next((found[0] for s in (e.scope, *inside) if (found := self.task_of(s)) is not None), None)

    def _write(self, node: Node, out: list[Node]) -> None:
        if isinstance(node, Loop | While):
            out.append(self._loop(node))
            return
        made_in = (self.makers[a] for a in node.invars if is_var(a) and a in self.makers)
        maker = self._own_task(node) or next(made_in, None)
        if maker is not None:
            self.makers.update((v, maker) for v in node.outvars)
        if node.name == _NAME:
            self.pending[node.outvars[0]] = node, out
            return
        task = self._reader(node)
        eqn = node.eqn.replace(invars=[self._read(a, task) for a in node.invars])
        around = task or maker
        out.append(dataclasses.replace(node, eqn=eqn if around is None else _over_mesh_of(around, eqn)))

    def _loop(self, loop: Loop | While) -> Loop | While:
        sources: dict[Atom, Atom] = {}

        def entering(a: Atom, inner: Var) -> Atom:
            new = self._read(a, self.readers.get(inner))
            if is_var(a) and a in loop.sources:
                sources[new] = loop.sources[a]
            _hand_on(self.makers, [(a, [inner])])
            return new

        changed: dict[str, Any] = {"sources": sources}
        changed["init"] = tuple(entering(a, v) for a, v in zip(loop.init, loop.carry_in))
        if isinstance(loop, Loop):
            rows = zip(loop.slices, loop.slice_vars)
            changed["slices"] = tuple(tuple(entering(a, v) for a in row) for row, v in rows)
        body: list[Node] = []
        for node in loop.body:
            self._write(node, body)
        changed["body"] = tuple(body)
        changed["carry_out"] = tuple(self._read(v, None) for v in loop.carry_out)
        _hand_on(self.makers, ((o, [v]) for o, v in zip(loop.carry_out, loop.carries)))
        if isinstance(loop, Loop):
            changed["ys"] = tuple(self._read(v, None) for v in loop.ys)
            _hand_on(self.makers, zip(loop.ys, loop.stacks))
        return dataclasses.replace(loop, **changed)

    def _read(self, a: Atom, reader: Task | None) -> Atom:
        """What stands for a value where a task reads it."""
        if not is_var(a) or a not in self.pending:
            return a
        e, out = self.pending[a]
        reader = self._own_task(e) or reader or self.readers.get(a)
        task = reader or self.makers.get(a)
        x, sharding = self._read(e.invars[0], reader), _sharding(e.eqn, task)
        if sharding is None:
            return x
        # Tied to a task an input would become an activation of it: so only where it must not stay at home.
        sent = reader is not None and (a in self.makers or reader != self.readers.get(a))
        scope = join(e.scope, scope_name(reader)) if reader is not None and sent else e.scope
        key = (x, sharding, scope)
        if key not in self.written:
            equations, (self.written[key],) = _constraint(x, sharding, scope)
            out += equations
        return self.written[key]


def _hand_on(tasks: dict[Var, Task], pairs: Iterable[tuple[Atom, Iterable[Atom]]]) -> None:
    """Notes the task of one variable for others."""
    for a, others in pairs:
        if is_var(a) and a in tasks:
            tasks.update((v, tasks[a]) for v in others if is_var(v))


def _sharding(eqn: Any, task: Task | None) -> NamedSharding | None:
    if task is None:
        return eqn.params["default"]
    return logical_sharding(eqn.params["names"], task, task.to_mesh(), eqn.invars[0].aval.ndim)


def _constraint(x: Atom, sharding: Any, scope: str) -> tuple[list[Equation], list[Var]]:
    return trace_equations(lambda x: jax.lax.with_sharding_constraint(x, sharding), x, scope=scope)


def _over_mesh_of(task: Task, eqn: Any) -> Any:
    """The same equation with the logical constraints inside of it over the mesh of a task."""
    if eqn.primitive.name != _NAME:
        return _compat.map_inner_equations(eqn, lambda e: _over_mesh_of(task, e))
    ((made,), _) = _constraint(eqn.invars[0], _sharding(eqn, task), "")
    return made.eqn.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
