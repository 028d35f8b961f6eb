"""Equations are grouped into fragments: those of one TaskMesh, phase and position.

Where one fragment would need its own results by way of another mesh, there are several. This goes over the
nodes from the last to the first: an equation joins a fragment that reads its results, so that work is done as
late as it can be, and what a loop does not read is not done before it. Only what the next microbatch waits
for is not kept waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Equation, Loop, Node, Var, While, is_var
from mmnnx.mpmd.ir.fragments import LoopPlan, PlacedVar, WhilePlan
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.partition.copies import Copies
from mmnnx.mpmd.partition.fragment_order import FragmentOrder

Group = tuple[Mesh, str, "int | None"]  # TaskMesh, phase, position
Needs = Mapping[Var, Mapping[Mesh, Group]]


class Grouping:
    """The fragments of one list of nodes.

    Attributes:
      copies: tells which equations are repeated in every fragment that reads them.
      needs: for each variable, the meshes that need it, each with the group of the first equation that does.
      groups: by number of a fragment, its group; for a loop, its plan.
      contents: by number of a fragment, its equations.
      order: which comes after which.

    Args:
      carried: what a microbatch leaves to the next one; nothing outside of microbatch loops.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        placement: Placement,
        required: Sequence[PlacedVar],
        plan_loop: Callable[[Loop | While, Needs], LoopPlan | WhilePlan],
        in_loop: bool,
        carried: Collection[Var] = (),
    ):
        self.placement = placement
        self.copies = Copies(nodes, placement, (v for v, _ in required), in_loop)
        self.needs: dict[Var, dict[Mesh, Group]] = {}
        self.groups: list[Group | LoopPlan | WhilePlan] = []
        self.contents: list[list[Equation]] = []
        self.order = FragmentOrder()
        # For each variable, which fragments read it, as a bit set, by the mesh that makes it for them.
        self._readers: dict[Var, dict[Mesh, int]] = {}
        self._copied_into: set[tuple[Var, Mesh, int | None]] = set()
        self._numbers: dict[Group, list[int]] = {}  # the fragments of each group
        # What the next microbatch may wait for, such as a counter, shares no fragment with what waits for
        # others in this one: these are the equations that wait for nothing, and their fragments.
        self._carried = {*carried}
        self._ready = self._waiting_for_nothing(nodes) if carried else set()
        self._ready_fragments: set[int] = set()
        for v, mesh in required:
            self._read(v, mesh, (mesh, "none", None), None)
        for node in reversed(nodes):
            if not isinstance(node, Equation):
                self._add_loop(plan_loop(node, self.needs))
            elif not self.copies.is_copied(node) and self._is_needed(node):
                for mesh in self._meshes(node):
                    self._add(node, mesh)

    def made_on(self, var: Var, mesh: Mesh) -> Mesh:
        """The mesh that makes what `mesh` reads: that of the variable, or `mesh` itself for unplaced work."""
        return self.placement.where[var].home or mesh

    def _waiting_for_nothing(self, nodes: Sequence[Node]) -> set[Node]:
        """The equations without a position that are made of nothing that has one."""
        found: set[Node] = set()
        for node in nodes:
            location = self.placement.locations.get(node)
            if isinstance(node, Equation) and (location is None or location.position is None):
                makers = (self.copies.maker.get(a) for a in node.invars if is_var(a))
                if all(maker is None or maker in found for maker in makers):
                    found.add(node)
        return found

    def _is_needed(self, node: Equation) -> bool:
        return bool(node.eqn.effects) or any(v in self.needs for v in node.outvars)

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
            maker = self.copies.maker.get(atom)
            if isinstance(maker, Equation) and self.copies.is_copied(maker):
                if (atom, mesh, fragment) not in self._copied_into:
                    self._copied_into.add((atom, mesh, fragment))
                    pending += maker.invars
                continue
            needed = self.needs.setdefault(atom, {})
            # The earliest reader counts. What a forward reads is no part of a backward, whose equations may
            # stand further in front: with its value, a function's derivative is computed there.
            if group[1] == "forward" or mesh not in needed or needed[mesh][1] != "forward":
                needed[mesh] = group
            if maker is not None and fragment is not None:
                readers, home = self._readers.setdefault(atom, {}), self.made_on(atom, mesh)
                readers[home] = readers.get(home, 0) | 1 << fragment

    def _add(self, node: Equation, mesh: Mesh) -> None:
        location = self.placement.locations.get(node)
        if location is not None and location.position is not None:
            group: Group = (mesh, self.placement.phases[node], location.position)
        else:  # what is not part of the flow joins the first that reads it
            reading = (self.needs[v][mesh] for v in node.outvars if mesh in self.needs.get(v, ()))
            group = next(reading, (mesh, "none", None))
        targets = 0
        for v in node.outvars:
            targets |= self._readers.get(v, {}).get(mesh, 0)
        # Joining f must not put f before a fragment that comes before f.
        beyond = self.order.beyond(targets)
        free = [f for f in self._numbers.get(group, ()) if not beyond >> f & 1]
        joined = [f for f in free if targets >> f & 1]
        ready = node in self._ready and group[1:] == ("none", None)
        alike = [f for f in free if (f in self._ready_fragments) == ready]
        if ready and (self._carried & {*node.outvars} or {*joined} & {*alike}):
            joined = [f for f in joined if f in alike]  # other readers would keep it waiting
        f = joined[-1] if joined else alike[-1] if alike else self._new(group)
        if ready and not self.contents[f]:
            self._ready_fragments.add(f)
        self.contents[f].append(node)
        self.order.come_after(targets & ~(1 << f), f)
        for a in node.invars:
            self._read(a, mesh, group, f)

    def _add_loop(self, plan: LoopPlan | WhilePlan) -> None:
        f = self._new(plan)
        targets = 0
        for v in plan.loop.outvars:
            for fragments in self._readers.get(v, {}).values():
                targets |= fragments
        self.order.come_after(targets, f)
        for a, mesh in plan.reads:
            self._read(a, mesh, (mesh, "none", None), f)

    def _new(self, group: Group | LoopPlan | WhilePlan) -> int:
        f = self.order.add()
        self.groups.append(group)
        self.contents.append([])
        if isinstance(group, tuple):
            self._numbers.setdefault(group, []).append(f)
        return f
