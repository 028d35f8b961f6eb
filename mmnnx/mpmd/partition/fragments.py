"""Placed equations become fragments: one program for each task and phase.

A fragment holds the equations of one TaskMesh, phase and position. Where one program would need its own
results by way of another mesh, there are several. Values that cross between fragments are residuals (on one
mesh) or transfers (between meshes). Work that depends on no placed state is copied into the fragments that
need it; what costs more to compute than to keep (random bits, products) is done once on each mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import LAYOUT, Equation, Loop, Node, Var, is_var, nbytes
from mmnnx.mpmd.ir.fragments import Body, Fragment, LoopPlan, PlacedVar, Plan
from mmnnx.mpmd.ir.origin import Kind
from mmnnx.mpmd.ir.placement import Placed, Placement
from mmnnx.mpmd.ir.timetable import PARTS
from mmnnx.mpmd.partition.change_mesh import change_mesh
from mmnnx.mpmd.partition.joins import set_joins_apart
from mmnnx.mpmd.partition.rematerialise import rematerialise
from mmnnx.mpmd.partition.split_backward import split_backward
from mmnnx.mpmd.partition.stages import split_positions, task_remat, timetable


def plan_fragments(
    placed: Placed, required: Iterable[PlacedVar], name_of: dict[Mesh, str], choice: int = 0
) -> Plan:
    """Partitions placed nodes into fragments.

    Args:
      placed: all nodes, in order, and where they go.
      required: results, each with the mesh on which it is wanted.
      name_of: names for meshes whose work is in no named task.
      choice: for loops that ask for no schedule, which of those that would do; 0 is the shortest.

    Raises:
      IndexError: if there is no such choice.
    """
    nodes, placement = rematerialise(placed.nodes, placed.placement, task_remat(placed.placement))
    placement = split_backward(nodes, placement, split_positions(placement))
    return _Partitioner(nodes, placement, list(required), name_of, choice).run()


# Worth doing once and keeping, even where the inputs are at hand everywhere.
_COSTLY = {
    "random_bits", "threefry2x32", "rng_bit_generator", "dot_general", "conv_general_dilated", "sort", "scan",
    "while", "cond", "cumsum", "cumprod", "cumlogsumexp", "cummax", "reduce_window_sum", "top_k", "fft",
    "cholesky", "eigh", "svd", "qr", "lu", "triangular_solve", "custom_jvp_call", "custom_vjp_call",
    "shard_map", "remat2", "checkpoint",
}  # fmt: skip
_SMALL = 1024  # bytes: below this nothing is costly

Group = tuple[Mesh, str, "int | None"]


class _Partitioner:
    """One pass over the nodes, last to first: an equation joins a fragment that reads its results.

    So work is done as late as it can be, and what the loop does not read is not done before it.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        placement: Placement,
        required: list[PlacedVar],
        name_of: dict[Mesh, str],
        choice: int,
    ):
        self.nodes = nodes
        self.choice = choice
        self.placement = placement
        self.required = list(dict.fromkeys(required))
        self.name_of = name_of
        self.maker: dict[Var, Node] = {v: n for n in nodes for v in n.outvars}
        self.index = {n: i for i, n in enumerate(nodes)}
        self.kept = self._kept()
        # For each variable, the meshes that need it, each with the group of the first equation that does.
        self.needs: dict[Var, dict[Mesh, Group]] = {}
        # For each variable, which fragments read it, as a bit set, by the mesh that makes it for them.
        self.readers: dict[Var, dict[Mesh, int]] = {}
        self.copied_into: set[tuple[Var, Mesh, int | None]] = set()
        # Per fragment: its group (for a loop, its plan), its equations, and the fragments that come after it.
        self.groups: list[Group | LoopPlan] = []
        self.numbers: dict[Group, list[int]] = {}  # the fragments of each group
        self.contents: list[list[Equation]] = []
        self.after: list[int] = []

    def run(self) -> Plan:
        for v, mesh in self.required:
            self._read(v, mesh, (mesh, "none", None), None)
        for node in reversed(self.nodes):
            if isinstance(node, Loop):
                self._add_loop(node)
            elif not self._copied(node) and (node.eqn.effects or any(v in self.needs for v in node.outvars)):
                for mesh in self._meshes(node):
                    self._add(node, mesh)
        steps = self._finish()
        homes = {v: m for v in self.maker if (m := self.placement.where[v].home) is not None}
        outside = [(v, m) for v, meshes in self.needs.items() if v not in self.maker for m in meshes]
        return Plan(steps, homes, tuple(outside))

    # -- what is needed where -------------------------------------------------------------------------------

    def _kept(self) -> set[Node]:
        """Equations that are never copied: results, what loops read, and free work that is costly."""
        kept: set[Node] = set()
        results = {v for v, _ in self.required}
        for node in self.nodes:
            if isinstance(node, Loop):
                results.update(filter(is_var, node.invars))
        for node in self.nodes:
            if isinstance(node, Loop):
                continue
            large = sum(map(nbytes, node.outvars)) > _SMALL
            derived = any(self.maker.get(a) in kept for a in node.invars if is_var(a)) and not _expands(node)
            costly = node not in self.placement.locations and large and (node.name in _COSTLY or derived)
            if costly or node.kept or results & set(node.outvars) or node.eqn.effects:
                kept.add(node)
        return kept

    def _copied(self, node: Equation) -> bool:
        """Whether an equation is repeated in every fragment that reads it."""
        if node in self.kept:
            return False
        if node not in self.placement.locations or _expands(node):
            return True
        return node.name in LAYOUT and self.placement.where[node.outvars[0]].kind is Kind.STATE

    def _meshes(self, node: Equation) -> list[Mesh]:
        location = self.placement.locations.get(node)
        if location is not None:
            return [location.mesh]
        return list(dict.fromkeys(m for v in node.outvars for m in self.needs.get(v, ())))

    def _read(self, atom: Any, mesh: Mesh, group: Group, fragment: int | None) -> None:
        """Notes that a fragment reads a value on a mesh, through the equations that are copied into it."""
        pending = [atom]
        while pending:
            atom = pending.pop()
            if not is_var(atom):
                continue
            maker = self.maker.get(atom)
            if isinstance(maker, Equation) and self._copied(maker):
                if (atom, mesh, fragment) not in self.copied_into:
                    self.copied_into.add((atom, mesh, fragment))
                    pending += maker.invars
                continue
            needed = self.needs.setdefault(atom, {})
            # The earliest reader counts. What a forward reads is no part of a backward, whose equations may
            # stand further in front: with its value, a function's derivative is computed there.
            if group[1] == "forward" or mesh not in needed or needed[mesh][1] != "forward":
                needed[mesh] = group
            if maker is not None and fragment is not None:
                readers, home = self.readers.setdefault(atom, {}), self._made_on(atom, mesh)
                readers[home] = readers.get(home, 0) | 1 << fragment

    def _made_on(self, var: Var, mesh: Mesh) -> Mesh:
        """The mesh that makes what `mesh` reads: the variable's home, or `mesh` itself for free work."""
        return self.placement.where[var].home or mesh

    def _plan_loop(self, loop: Loop) -> LoopPlan:
        placement = set_joins_apart(loop, self.placement.bodies[loop])
        times = timetable(loop, placement, self.choice)
        nodes, placement = rematerialise(loop.body, placement, times.remat)
        placement = split_backward(nodes, placement, times.split)
        carried: list[dict[Mesh, None]] = []
        for enters, after in zip(loop.carry_in, loop.carries):
            home = placement.where[enters].home
            carried.append(dict.fromkeys(self.needs.get(after, ()) if home is None else [home]))
        kept = []
        for y, row in zip(loop.ys, loop.stacks):
            home = placement.where[y].home
            kept.append(
                dict.fromkeys([home] if home is not None else (m for v in row for m in self.needs.get(v, ())))
            )
        while True:
            required = [(v, m) for v, meshes in zip(loop.carry_out, carried) for m in meshes]
            required += [(v, m) for v, meshes in zip(loop.ys, kept) for m in meshes]
            body = _body(_Partitioner(nodes, placement, required, self.name_of, self.choice).run())
            grown = False
            for v, meshes in zip(loop.carry_in, carried):
                missing = [m for w, m in body.needs if w is v and m not in meshes]
                # A counter is kept on every mesh that reads it; placed state has one home.
                if placement.where[v].home is None and missing:
                    meshes.update(dict.fromkeys(missing))
                    grown = True
            if not grown:
                break
        outer = dict(zip(loop.carry_in, ([a] for a in loop.init))) | dict(zip(loop.slice_vars, loop.slices))
        reads: dict[PlacedVar, None] = {}
        for v, mesh in body.needs:
            if v in loop.carry_in:
                mesh = placement.where[v].home or mesh
            reads.update({(a, mesh): None for a in outer.get(v, [v])})
        return LoopPlan(loop, body, tuple(map(tuple, carried)), tuple(map(tuple, kept)), tuple(reads), times)

    # -- which fragment -------------------------------------------------------------------------------------

    def _add(self, node: Equation, mesh: Mesh) -> None:
        location = self.placement.locations.get(node)
        if location is not None and location.position is not None:
            group: Group = (mesh, self.placement.phases[node], location.position)
        else:  # what is not part of the flow joins the first that reads it
            reading = (self.needs[v][mesh] for v in node.outvars if mesh in self.needs.get(v, ()))
            group = next(reading, (mesh, "none", None))
        targets = 0
        for v in node.outvars:
            targets |= self.readers.get(v, {}).get(mesh, 0)
        # Joining f must not put f before a fragment that comes before f.
        beyond = self._beyond(targets)
        free = [f for f in self.numbers.get(group, ()) if not beyond >> f & 1]
        joined = [f for f in free if targets >> f & 1]
        f = joined[-1] if joined else free[-1] if free else self._new(group)
        self.contents[f].append(node)
        self._come_after(targets & ~(1 << f), f)
        for a in node.invars:
            self._read(a, mesh, group, f)

    def _add_loop(self, loop: Loop) -> None:
        plan = self._plan_loop(loop)
        f = self._new(plan)
        targets = 0
        for v in loop.outvars:
            for fragments in self.readers.get(v, {}).values():
                targets |= fragments
        self._come_after(targets, f)
        for a, mesh in plan.reads:
            self._read(a, mesh, (mesh, "none", None), f)

    def _new(self, group: Group | LoopPlan) -> int:
        self.groups.append(group)
        self.contents.append([])
        self.after.append(0)
        if not isinstance(group, LoopPlan):
            self.numbers.setdefault(group, []).append(len(self.groups) - 1)
        return len(self.groups) - 1

    def _beyond(self, targets: int) -> int:
        """What comes after any of these fragments."""
        found = 0
        for t in _bits(targets):
            found |= self.after[t]
        return found

    def _come_after(self, targets: int, f: int) -> None:
        later = targets | self._beyond(targets)
        if not later & ~self.after[f]:
            return
        self.after[f] |= later
        for g in range(len(self.after)):
            if self.after[g] >> f & 1:
                self.after[g] |= later

    # -- the result -----------------------------------------------------------------------------------------

    def _order(self) -> list[int]:
        """Fragments, each before those that come after it, otherwise the last begun (earliest read) first."""
        left, order = set(range(len(self.groups))), []
        while left:
            waiting = 0
            for f in left:
                waiting |= self.after[f]
            f = max(f for f in left if not waiting >> f & 1)
            left.remove(f)
            order.append(f)
        return order

    def _finish(self) -> tuple[Fragment | LoopPlan, ...]:
        assembled = {f: self._assemble(f) for f in range(len(self.groups))}
        crossing = {*self.required}
        for f, group in enumerate(self.groups):
            if isinstance(group, LoopPlan):
                crossing.update(group.reads)
            else:
                crossing.update((v, group[0]) for v in assembled[f][1])
        crossing = {(v, self._made_on(v, m)) for v, m in crossing if v in self.maker}
        steps: list[Fragment | LoopPlan] = []
        for f in self._order():
            group = self.groups[f]
            if isinstance(group, LoopPlan):
                steps.append(group)
                continue
            mesh, phase, position = group
            eqns, invars = assembled[f]
            outvars = [v for n in self.contents[f] for v in n.outvars if (v, mesh) in crossing]
            task = self.placement.positions[position].task if position is not None else None
            owner = task.name if task is not None and task.name else self.name_of[mesh]
            if position is not None and phase.startswith("backward"):
                owner = self.placement.backward_tasks.get(position, owner)
            name = owner if phase == "none" else f"{owner} {phase}"
            if task is not None and task.split_backprop and phase in PARTS:
                name = task.split_backprop[PARTS.index(phase)]
            jaxpr = _compat.close_jaxpr(invars, outvars, [change_mesh(e, mesh) for e in eqns])
            steps.append(Fragment(name, owner, mesh, phase, position, jaxpr, tuple(invars), tuple(outvars)))
        return tuple(steps)

    def _assemble(self, f: int) -> tuple[list[Any], list[Var]]:
        """The equations of a fragment with the copies they need, and its inputs."""
        own = self.contents[f]
        present = {v for n in own for v in n.outvars}
        needed, pending = set(own), list(own)
        while pending:
            for a in pending.pop().invars:
                maker = self.maker.get(a) if is_var(a) and a not in present else None
                if isinstance(maker, Equation) and maker not in needed and self._copied(maker):
                    needed.add(maker)
                    pending.append(maker)
        nodes = sorted(needed, key=self.index.__getitem__)
        made = {v for n in nodes for v in n.outvars}
        invars = dict.fromkeys(a for n in nodes for a in n.invars if is_var(a) and a not in made)
        return [n.eqn for n in nodes], list(invars)


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _expands(node: Equation) -> bool:
    """Whether an equation only spreads a smaller value, so that it is cheaper redone than kept."""
    return node.name == "broadcast_in_dim" and sum(map(nbytes, node.invars)) < sum(map(nbytes, node.outvars))


def _body(plan: Plan) -> Body:
    fragments = tuple(step for step in plan.steps if isinstance(step, Fragment))  # which are all
    return Body(fragments, plan.homes, plan.needs)
