"""From a plan to a program: instructions in the order of dispatch, over numbered buffers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import Var, nbytes
from mmnnx.mpmd.ir.fragments import Fragment, LoopPlan, PlacedVar, Plan
from mmnnx.mpmd.ir.instructions import Call, Instruction, LoopRuns, Transfer
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.partition.change_mesh import change_mesh
from mmnnx.mpmd.schedule.dispatch_order import Moves, order_loop, sums


def build(
    plan: Plan,
    inputs: dict[Var, Mesh | None],
    results: Sequence[Sequence[PlacedVar]],
    names: dict[Mesh, str],
    moving: Moves,
    successors: dict[Var, Var],
) -> Program:
    """Turns a plan into instructions.

    Args:
      plan: fragments and loops in order.
      inputs: every input of the function with its home, None for one that every mesh can be given.
      results: for each result of the function, the values that hold it.
      names: for each mesh, what messages call it.
      moving: for meshes that stand for several, which one it is for each microbatch.
      successors: for arguments that may be overwritten, the results that are their new values.
    """
    builder = _Builder(plan, inputs, names, moving)
    builder.emit()
    outputs = tuple(tuple(builder.buffer(v, m) for v, m in held) for held in results)
    loops = [step for step in plan.steps if isinstance(step, LoopPlan)]
    for step in loops:
        successors = successors | dict(zip(step.loop.carry_in, step.loop.carry_out))
    return Program(
        tuple(_free(builder.instructions, {s for buffers in outputs for s in buffers})),
        {s: builder.values[s] for s in builder.inputs},
        outputs,
        tuple(builder.values),
        names,
        tuple(
            LoopRuns(p.timetable.schedule, p.loop.spec.length, tuple(map(builder.variants, p.body.fragments)))
            for p in loops
        ),
        successors,
    )


def _free(instructions: Sequence[Instruction], results: set[int]) -> list[Instruction]:
    """Has every buffer dropped at its last use; what nobody reads, where it is made."""
    dead: dict[int, set[int]] = {}
    seen = set(results)
    for number in reversed(range(len(instructions))):
        i = instructions[number]
        for s in (*i.inputs, *i.outputs):
            if s not in seen:
                seen.add(s)
                dead.setdefault(number, set()).add(s)
    return [
        dataclasses.replace(i, frees=tuple(sorted(dead[n]))) if n in dead else i
        for n, i in enumerate(instructions)
    ]


class _Builder:
    """Walks a plan and writes instructions. A value of a loop body is keyed by its microbatch as well.

    A mesh that stands for several is replaced by the one it is: outside loops the first.
    """

    def __init__(self, plan: Plan, inputs: dict[Var, Mesh | None], names: dict[Mesh, str], moving: Moves):
        self.plan, self.names, self.moving = plan, names, moving
        self.homes = {v: m for v, m in inputs.items() if m is not None}
        self.homes |= {v: self._real(m) for v, m in plan.homes.items()}
        fragments = [f for f in plan.steps if isinstance(f, Fragment) and f.mesh in moving]
        self.movers = {v: f for f in fragments for v in f.outvars}
        self.instructions: list[Instruction] = []
        self.values: list[PlacedVar] = []
        self.inputs: list[int] = []
        self.buffers: dict[tuple[Var, Mesh, int | None], int] = {}
        self.clones: dict[tuple[Fragment, Mesh], Fragment] = {}
        self.readers = _readers(plan.steps, plan.homes)

    def emit(self) -> None:
        for step in self.plan.steps:
            if isinstance(step, Fragment):
                inputs = tuple(self.buffer(v, self._real(step.mesh)) for v in step.invars)
                self._call(step, None, inputs, self.readers)
            else:
                self._loop(step)

    def _real(self, mesh: Mesh, m: int | None = None) -> Mesh:
        return self.moving[mesh](m or 0) if mesh in self.moving else mesh

    def _on(self, f: Fragment, mesh: Mesh) -> Fragment:
        """A fragment as it is on one of the meshes that its own stands for."""
        if f.mesh == mesh:
            return f
        if (f, mesh) not in self.clones:
            jaxpr = _compat.map_equations(f.jaxpr, lambda e: change_mesh(e, mesh))
            self.clones[f, mesh] = dataclasses.replace(f, mesh=mesh, jaxpr=jaxpr)
        return self.clones[f, mesh]

    def variants(self, f: Fragment) -> tuple[Fragment, ...]:
        """A fragment, and as it is on each of the meshes that its own stands for."""
        return (f, *(clone for (g, _), clone in self.clones.items() if g is f))

    def _new(self, var: Var, mesh: Mesh, m: int | None) -> int:
        self.values.append((var, mesh))
        self.buffers[var, mesh, m] = len(self.values) - 1
        return len(self.values) - 1

    def buffer(self, var: Var, mesh: Mesh) -> int:
        """The buffer of a value outside loops; sends or asks for it where it is not there yet."""
        mesh = self._real(mesh)
        if (var, mesh, None) in self.buffers:
            return self.buffers[var, mesh, None]
        home, maker = self.homes.get(var), self.movers.get(var)
        if maker is not None and (home is None or not maker.invars):
            # A moving task's constants, and what every mesh can make of what it is given, are not sent.
            self._call(maker, None, tuple(self.buffer(v, mesh) for v in maker.invars), {}, mesh)
            return self.buffers[var, mesh, None]
        if home is None or home == mesh:
            self.inputs.append(self._new(var, mesh, None))
            return self.inputs[-1]
        return self._send(var, self.buffer(var, home), home, mesh, None)

    def _send(self, var: Var, source: int, home: Mesh, mesh: Mesh, m: int | None) -> int:
        """Sends a value of microbatch m from the buffer that holds it at home; returns the new buffer."""
        target = self._new(var, mesh, m)
        self.instructions.append(
            Transfer(
                self.names[home],
                self.names[mesh],
                tuple(var.aval.shape),
                var.aval.dtype,
                nbytes(var),
                m,
                home,
                mesh,
                (source,),
                (target,),
            )
        )
        return target

    def _call(
        self,
        f: Fragment,
        m: int | None,
        inputs: tuple[int, ...],
        readers: dict[Var, list[Mesh]],
        mesh: Mesh | None = None,
        stage: int | None = None,
    ) -> None:
        """Writes a call, and right after it the transfers of what it made, mesh by mesh."""
        mesh = mesh or self._real(f.mesh, m)
        outputs = tuple(self._new(v, mesh, m) for v in f.outvars)
        self.instructions.append(Call(self._on(f, mesh), m, inputs, outputs, (), stage))
        sends: dict[Mesh, dict[Var, int]] = {}
        for v, s in zip(f.outvars, outputs):
            for reader in readers.get(v, ()):
                to = self._real(reader, m)
                if to != mesh and (v, to, m) not in self.buffers:
                    sends.setdefault(to, {})[v] = s
        for to, values in sends.items():
            for v, s in values.items():
                self._send(v, s, mesh, to, m)

    def _loop(self, plan: LoopPlan) -> None:
        loop, body, last = plan.loop, plan.body, plan.loop.spec.length - 1
        rows = {v: (m,) for row in loop.slices for m, v in enumerate(row)}
        for v, mesh in plan.reads:
            for m in rows.get(v, range(loop.spec.length)) if mesh in self.moving else (0,):
                self.buffer(v, self._real(mesh, m))
        placed = {v: meshes[0] for v, meshes in zip(loop.carry_in, plan.carried) if meshes}
        carried = dict(zip(loop.carry_in, plan.carried))
        starts = dict(zip(loop.carry_in, loop.init))
        leaves = dict(zip(loop.carry_in, loop.carry_out))
        slices = dict(zip(loop.slice_vars, loop.slices))
        any_order = sums(plan)
        totals = {leaves[v] for v in any_order}
        latest: dict[tuple[Var, Mesh], int] = {}  # the microbatch that was last to add to a sum on a mesh
        stage_of: dict[int | None, int] = {p: n for n, p in enumerate(plan.timetable.positions)}
        # Placed carries return to their home after each microbatch; results that are kept, to theirs.
        readers = _readers(body.fragments, body.homes)
        for out, meshes in zip(loop.carry_out, plan.carried):
            if out in body.homes:
                readers.setdefault(out, []).extend(m for m in meshes if m != body.homes[out])

        def find(var: Var, mesh: Mesh, m: int) -> int:
            """The buffer of what microbatch m reads as `var` on `mesh`."""
            here = self._real(mesh, m)
            if var in starts:
                if mesh not in carried[var]:
                    return send_on(var, here, m, placed[var])
                before = latest.get((leaves[var], here)) if var in any_order else m - 1 if m else None
                if before is None:
                    return self.buffer(starts[var], here)
                there = self._real(mesh, before)
                if (leaves[var], here, before) not in self.buffers:  # a moving task's carry that is no sum
                    self._send(leaves[var], self.buffers[leaves[var], there, before], there, here, before)
                return self.buffers[leaves[var], here, before]
            if var in slices:
                return self.buffer(slices[var][m], here)
            if (var, here, m) in self.buffers:
                return self.buffers[var, here, m]
            return self.buffer(var, here)

        def send_on(var: Var, here: Mesh, m: int, home: Mesh) -> int:
            """A carry read away from its home."""
            source, there = find(var, home, m), self._real(home, m)
            if here == there:
                return source
            if (var, here, m) not in self.buffers:
                self._send(var, source, there, here, m)
            return self.buffers[var, here, m]

        for index, m in order_loop(plan, self.moving):
            f = body.fragments[index]
            inputs = tuple(find(v, f.mesh, m) for v in f.invars)
            self._call(f, m, inputs, readers, None, stage_of.get(f.position))
            latest.update(((v, self._real(f.mesh, m)), m) for v in f.outvars if v in totals)
        for enters, out, after, meshes in zip(loop.carry_in, loop.carry_out, loop.carries, plan.carried):
            for mesh in meshes:
                if enters in any_order and mesh in self.moving:
                    parts = {here: m for (v, here), m in latest.items() if v is out}
                    self._add_up(out, after, parts)
                else:
                    self._becomes(out, latest.get((out, mesh), last), after, mesh)
        for y, row, meshes in zip(loop.ys, loop.stacks, plan.kept):
            for m, v in enumerate(row):
                for mesh in meshes:
                    self._becomes(y, m, v, mesh)

    def _becomes(self, inner: Var, m: int, outer: Var, mesh: Mesh) -> None:
        """What microbatch m made as `inner` is known as `outer` after the loop."""
        here = self._real(mesh, m)
        self.buffers[outer, here, None] = self.buffers[inner, here, m]
        if mesh in self.moving:
            self.homes[outer] = here

    def _add_up(self, out: Var, total: Var, last: dict[Mesh, int]) -> None:
        """Adds up the sums that the meshes of a moving task made, at the home of the total.

        `last` is the microbatch that was last on each of its meshes.
        """
        home = self.homes[total]
        parts = []
        for mesh, m in last.items():
            buffer = self.buffers[out, mesh, m]
            parts.append(buffer if mesh == home else self._send(out, buffer, mesh, home, m))
        types = [jax.ShapeDtypeStruct(total.aval.shape, total.aval.dtype)] * len(parts)
        jaxpr = jax.make_jaxpr(lambda *xs: functools.reduce(jnp.add, xs))(*types)
        name = self.names[home]
        add = Fragment(name, name, home, "none", None, jaxpr, (out,) * len(parts), (total,))
        self._call(add, None, tuple(parts), {}, home)
        self.homes[total] = home


def _readers(steps: Sequence[Fragment | LoopPlan], homes: dict[Var, Mesh]) -> dict[Var, list[Mesh]]:
    """For each variable that is made on one mesh, the other meshes that read it."""
    readers: dict[Var, dict[Mesh, None]] = {}
    for step in steps:
        reads = step.reads if isinstance(step, LoopPlan) else [(v, step.mesh) for v in step.invars]
        for v, mesh in reads:
            if v in homes and homes[v] != mesh:
                readers.setdefault(v, {})[mesh] = None
    return {v: list(meshes) for v, meshes in readers.items()}
