"""A microbatch loop as instructions: its calls in the order of its schedule, and transfers between them.

Fragments read four kinds of values: slices of the batch, carries, what was made for the same microbatch, and
values from outside of the loop. `_BodyValues` knows where each is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mmnnx.mpmd.emit.moving_meshes import MovingMeshes
from mmnnx.mpmd.emit.outer_values import OuterValues
from mmnnx.mpmd.emit.writer import Readers, Writer, remote_readers, sends_of
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import Fragment, LoopPlan, PlacedVar
from mmnnx.mpmd.schedule.dispatch_order import order_loop, sums


def emit_loop(plan: LoopPlan, outer: OuterValues, writer: Writer) -> None:
    """Writes the instructions of a loop."""
    _bring_outer_values(plan, outer, writer.meshes)
    values = _BodyValues(plan, outer, writer)
    readers = _body_readers(plan)
    stages: dict[int | None, int] = {p: n for n, p in enumerate(plan.timetable.positions)}
    fragments = plan.body.fragments
    finders = [[values.finder(v, f.mesh) for v in f.invars] for f in fragments]
    sends = [sends_of(f, readers) for f in fragments]
    for index, m in order_loop(plan, writer.meshes.moves):
        f = fragments[index]
        here = writer.meshes.at(f.mesh, m)
        inputs = [find(m, here) for find in finders[index]]
        writer.call(f, here, m, inputs, sends[index], stages.get(f.position))
        values.note_sums(f, m, here)
    _name_results(plan, values, outer, writer)


def _bring_outer_values(plan: LoopPlan, outer: OuterValues, meshes: MovingMeshes) -> None:
    """Has what the loop reads from outside where it reads it, before it begins."""
    sliced = {v: (m,) for row in plan.slices.values() for m, v in enumerate(row)}
    for v, mesh in plan.reads:
        for m in sliced.get(v, range(plan.loop.spec.length)) if mesh in meshes.moves else (0,):
            outer.buffer(v, meshes.at(mesh, m))


def _body_readers(plan: LoopPlan) -> Readers:
    """Who reads what a microbatch makes. Carries are sent to each mesh that holds them, too."""
    readers = remote_readers(plan.body.fragments, plan.body.homes)
    for out, meshes in zip(plan.loop.carry_out, plan.carried):
        if out in plan.body.homes:
            readers.setdefault(out, []).extend(mesh for mesh in meshes if mesh != plan.body.homes[out])
    return readers


class _BodyValues:
    """Finds the buffers of what the fragments of a loop read.

    Attributes:
      sums: the carries that microbatches add to in any order.
      latest: for each sum (as it leaves a microbatch) on a mesh, the microbatch that was last to add to it.
    """

    def __init__(self, plan: LoopPlan, outer: OuterValues, writer: Writer):
        loop = plan.loop
        self.outer, self.writer, self.meshes = outer, writer, writer.meshes
        self.init = dict(zip(loop.carry_in, loop.init))
        self.carry_out = dict(zip(loop.carry_in, loop.carry_out))
        self.held_on = dict(zip(loop.carry_in, plan.carried))
        self.slices = plan.slices
        self.sums = sums(plan)
        self._made = {v for f in plan.body.fragments for v in f.outvars}
        sums_out = {self.carry_out[v] for v in self.sums}
        self._sums_of = {f: [v for v in f.outvars if v in sums_out] for f in plan.body.fragments}
        self.latest: dict[PlacedVar, int] = {}

    def finder(self, var: Var, mesh: Mesh) -> Callable[[int, Mesh], int]:
        """From a microbatch, and the mesh that `mesh` is for it, to the buffer of what it reads as `var`."""
        buffers, outer = self.writer.buffers, self.outer
        if var in self.init:
            if mesh in self.held_on[var]:
                return lambda m, here: self._carry(var, mesh, m, here)
            return lambda m, here: self._sent_carry(var, m, here)
        if var in self.slices:
            row = self.slices[var]
            return lambda m, here: outer.buffer(row[m], here)
        if var in self._made:
            return lambda m, here: buffers[var, here, m]
        if mesh in self.meshes.moves:
            return lambda m, here: outer.buffer(var, here)
        whole = outer.buffer(var, mesh)
        return lambda m, here: whole

    def _carry(self, var: Var, mesh: Mesh, m: int, here: Mesh) -> int:
        """A carry on a mesh that holds it: as the microbatch before left it, or as it entered the loop."""
        out = self.carry_out[var]
        in_order = m - 1 if m else None
        before = self.latest.get((out, here)) if var in self.sums else in_order
        if before is None:
            return self.outer.buffer(self.init[var], here)
        if (out, here, before) not in self.writer.buffers:  # a moving task left it on its mesh of that time
            there = self.writer.buffers[out, self.meshes.at(mesh, before), before]
            self.writer.send(out, there, here, before)
        return self.writer.buffers[out, here, before]

    def _sent_carry(self, var: Var, m: int, here: Mesh) -> int:
        """A carry on a mesh that does not hold it."""
        home = self.held_on[var][0]
        source = self._carry(var, home, m, there := self.meshes.at(home, m))
        if here == there:
            return source
        if (var, here, m) not in self.writer.buffers:
            self.writer.send(var, source, here, m)
        return self.writer.buffers[var, here, m]

    def note_sums(self, f: Fragment, m: int, here: Mesh) -> None:
        """Remembers that a fragment has just added to sums for microbatch m, on the mesh that its is then."""
        for v in self._sums_of[f]:
            self.latest[v, here] = m


def _name_results(plan: LoopPlan, values: _BodyValues, outer: OuterValues, writer: Writer) -> None:
    """What the loop made is known by its outer variables from here on."""
    loop, meshes = plan.loop, writer.meshes
    last = loop.spec.length - 1

    def name(inner: Var, m: int, result: Var, mesh: Mesh) -> None:
        here = meshes.at(mesh, m)
        writer.buffers[result, here, None] = writer.buffers[inner, here, m]
        if mesh in meshes.moves:
            outer.homes[result] = here

    for carry, out, result, held_on in zip(loop.carry_in, loop.carry_out, loop.carries, plan.carried):
        for mesh in held_on:
            if carry in values.sums and mesh in meshes.moves:
                parts = {here: m for (v, here), m in values.latest.items() if v is out}
                _add_up(out, result, parts, outer, writer)
            else:
                name(out, values.latest.get((out, mesh), last), result, mesh)
    for y, row, held_on in plan.kept:
        for m, v in enumerate(row):
            for mesh in held_on:
                name(y, m, v, mesh)


def _add_up(out: Var, total: Var, last: dict[Mesh, int], outer: OuterValues, writer: Writer) -> None:
    """Adds up the sums that the meshes of a moving task made, at the home of the total.

    `last` is the microbatch that was last on each of its meshes.
    """
    home = outer.homes[total]
    parts = []
    for mesh, m in last.items():
        buffer = writer.buffers[out, mesh, m]
        parts.append(buffer if mesh == home else writer.send(out, buffer, home, m))
    types = [jax.ShapeDtypeStruct(total.aval.shape, total.aval.dtype)] * len(parts)
    jaxpr = jax.make_jaxpr(lambda *xs: functools.reduce(jnp.add, xs))(*types)
    name = writer.names[home]
    add = Fragment(name, name, home, "none", None, jaxpr, (out,) * len(parts), (total,))
    writer.call(add, home, None, parts)
