"""Placed equations become fragments: one program for each task and phase.

A fragment holds the equations of one TaskMesh, phase and position. Where one program would need its own
results by way of another mesh, there are several. Values that cross between fragments are residuals (on one
mesh) or transfers (between meshes). Work that depends on no placed state is copied into the fragments that
need it; what costs more to compute than to keep (random bits, products) is done once on each mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.place import Placement
from mmnnx.mpmd.trace import LAYOUT, Equation, Kind, Loop, Node, Var, is_var, nbytes

# A value on a mesh: the unit in which data is needed, made, sent and freed.
Held = tuple[Var, Mesh]


@dataclasses.dataclass(frozen=True, eq=False)
class Fragment:
    """One SPMD program.

    Attributes:
      name: the task and the phase, such as "stage0 forward".
      mesh: the TaskMesh that it is compiled for.
      phase: "forward", "backward" or "none" (outside autodiff).
      position: its place in the flow of activations, None outside the flow.
      jaxpr: what it computes.
      invars, outvars: the variables that it reads and makes, all on `mesh`.
    """

    name: str
    mesh: Mesh
    phase: str
    position: int | None
    jaxpr: Any
    invars: tuple[Var, ...]
    outvars: tuple[Var, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class LoopPlan:
    """A microbatch loop whose body is cut into fragments.

    Attributes:
      loop: what it was cut from.
      body: the plan of one microbatch.
      carried: for each carry, the meshes that hold it between microbatches.
      kept: for each result that is kept per microbatch, the meshes that hold it.
      reads: the outer values that the loop reads.
      depths: for each position of the body, its stage: how many stages come before it.
    """

    loop: Loop
    body: Plan
    carried: tuple[tuple[Mesh, ...], ...]
    kept: tuple[tuple[Mesh, ...], ...]
    reads: tuple[Held, ...]
    depths: dict[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Fragments and loops in an order in which each comes after what it needs.

    Attributes:
      steps: the fragments and loops.
      homes: the mesh where each variable is made; variables made on every mesh that needs them are absent.
      needs: values from outside that the steps read.
    """

    steps: tuple[Fragment | LoopPlan, ...]
    homes: dict[Var, Mesh]
    needs: tuple[Held, ...]


def cut(
    nodes: Sequence[Node], placement: Placement, required: Iterable[Held], name_of: dict[Mesh, str]
) -> Plan:
    """Cuts placed nodes into fragments.

    Args:
      nodes: all nodes, in order.
      placement: where they go.
      required: results, each with the mesh on which it is wanted.
      name_of: names for meshes whose work is in no named task.
    """
    return _Cutter(nodes, placement, list(required), name_of).run()


# Worth doing once and keeping, even where the inputs are at hand everywhere.
_COSTLY = {
    "random_bits", "threefry2x32", "rng_bit_generator", "dot_general", "conv_general_dilated", "sort", "scan",
    "while", "cond", "cumsum", "cumprod", "cumlogsumexp", "cummax", "reduce_window_sum", "top_k", "fft",
    "cholesky", "eigh", "svd", "qr", "lu", "triangular_solve", "custom_jvp_call", "custom_vjp_call", "shard_map",
    "remat2", "checkpoint",
}  # fmt: skip
_SMALL = 1024  # bytes: below this nothing is costly

Group = tuple[Mesh, str, "int | None"]


class _Cutter:
    def __init__(
        self, nodes: Sequence[Node], placement: Placement, required: list[Held], name_of: dict[Mesh, str]
    ):
        self.nodes = nodes
        self.placement = placement
        self.required = list(dict.fromkeys(required))
        self.name_of = name_of
        self.maker: dict[Var, Node] = {v: n for n in nodes for v in n.outvars}
        self.kept = self._kept()
        # For each variable, the meshes that need it, each with the group of the first equation that does.
        self.needs: dict[Var, dict[Mesh, Group]] = {}
        self.loops: dict[Node, LoopPlan] = {}
        # Per fragment: its group (None for a loop), its equations, and which fragments come before (a bit set).
        self.groups: list[Group | None] = []
        self.contents: list[list[Node]] = []
        self.before: list[int] = []
        self.made_in: dict[Held, int] = {}
        self.copy_sources: dict[Held, int] = {}

    def run(self) -> Plan:
        self._find_needs()
        for node in self.nodes:
            if isinstance(node, Loop):
                self._add_loop(node)
            elif not self._copied(node):
                for mesh in self._meshes(node):
                    self._add(node, mesh)
        steps, order = self._finish(), self._order()
        homes = {v: m for v in self.maker if (m := self.placement.where[v].home) is not None}
        outside = [(v, m) for v, meshes in self.needs.items() if v not in self.maker for m in meshes]
        return Plan(tuple(steps[f] for f in order if steps[f] is not None), homes, tuple(outside))

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
            costly = node not in self.placement.spots and large and (node.name in _COSTLY or derived)
            if costly or results & set(node.outvars) or node.eqn.effects:
                kept.add(node)
        return kept

    def _copied(self, node: Node) -> bool:
        """Whether an equation is repeated in every fragment that reads it."""
        if isinstance(node, Loop) or node in self.kept:
            return False
        if node not in self.placement.spots or _expands(node):
            return True
        return node.name in LAYOUT and self.placement.where[node.outvars[0]].kind is Kind.STATE

    def _meshes(self, node: Equation) -> list[Mesh]:
        spot = self.placement.spots.get(node)
        if spot is not None:
            return [spot.mesh]
        return list(dict.fromkeys(m for v in node.outvars for m in self.needs.get(v, ())))

    def _need(self, atom: Any, mesh: Mesh, group: Group) -> None:
        if is_var(atom):
            self.needs.setdefault(atom, {})[mesh] = group

    def _find_needs(self) -> None:
        for v, mesh in self.required:
            self._need(v, mesh, (mesh, "none", None))
        for node in reversed(self.nodes):
            if isinstance(node, Loop):
                self._plan_loop(node)
            elif node in self.placement.spots and not self._copied(node):
                spot = self.placement.spots[node]
                for a in node.invars:
                    self._need(a, spot.mesh, (spot.mesh, self.placement.phases[node], spot.position))
            else:
                for v in node.outvars:
                    for mesh, group in self.needs.get(v, {}).items():
                        for a in node.invars:
                            self._need(a, mesh, group)

    def _plan_loop(self, loop: Loop) -> None:
        placement = self.placement.bodies[loop]
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
            body = _Cutter(loop.body, placement, required, self.name_of).run()
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
        reads: dict[Held, None] = {}
        for v, mesh in body.needs:
            if v in loop.carry_in:
                mesh = placement.where[v].home or mesh
            reads.update({(a, mesh): None for a in outer.get(v, [v])})
        for a, mesh in reads:
            self._need(a, mesh, (mesh, "none", None))
        self.loops[loop] = LoopPlan(
            loop, body, tuple(map(tuple, carried)), tuple(map(tuple, kept)), tuple(reads), _depths(body)
        )

    # -- which fragment -------------------------------------------------------------------------------------

    def _sources(self, atom: Any, mesh: Mesh) -> int:
        """The fragments that a value on a mesh comes from, as a bit set; copies come from their operands'."""
        maker = self.maker.get(atom) if is_var(atom) else None
        if maker is None:
            return 0
        if self._copied(maker):
            held = (atom, mesh)
            if held not in self.copy_sources:
                self.copy_sources[held] = 0
                for a in maker.invars:
                    self.copy_sources[held] |= self._sources(a, mesh)
            return self.copy_sources[held]
        return 1 << self.made_in[atom, self._made_on(atom, mesh)]

    def _made_on(self, var: Var, mesh: Mesh) -> Mesh:
        """The mesh that makes what `mesh` reads: the variable's home, or `mesh` itself for free work."""
        return self.placement.where[var].home or mesh

    def _add(self, node: Equation, mesh: Mesh) -> None:
        spot = self.placement.spots.get(node)
        if spot is not None and spot.position is not None:
            group: Group = (mesh, self.placement.phases[node], spot.position)
        else:  # what is not part of the flow joins the first that reads it
            readers = (self.needs[v][mesh] for v in node.outvars if mesh in self.needs.get(v, ()))
            group = next(readers, (mesh, "none", None))
        sources = 0
        for a in node.invars:
            sources |= self._sources(a, mesh)
        mine = [f for f, g in enumerate(self.groups) if g == group]
        # Joining f must not make f wait for a fragment that waits for f.
        free = [f for f in mine if not any(self.before[s] >> f & 1 for s in _bits(sources & ~(1 << f)))]
        joined = [f for f in free if sources >> f & 1]
        f = joined[-1] if joined else free[0] if free else self._new(group)
        self.contents[f].append(node)
        self._come_before(sources & ~(1 << f), f)
        self.made_in.update({(v, mesh): f for v in node.outvars})

    def _add_loop(self, loop: Loop) -> None:
        plan = self.loops[loop]
        f = self._new(None)
        self.contents[f].append(loop)
        sources = 0
        for v, mesh in plan.reads:
            sources |= self._sources(v, mesh)
        self._come_before(sources, f)
        for v in loop.outvars:
            for mesh in self.needs.get(v, {}):
                self.made_in[v, self._made_on(v, mesh)] = f

    def _new(self, group: Group | None) -> int:
        self.groups.append(group)
        self.contents.append([])
        self.before.append(0)
        return len(self.groups) - 1

    def _come_before(self, sources: int, f: int) -> None:
        earlier = sources
        for s in _bits(sources):
            earlier |= self.before[s]
        self.before[f] |= earlier
        for g in range(len(self.before)):
            if self.before[g] >> f & 1:
                self.before[g] |= earlier

    # -- the result -----------------------------------------------------------------------------------------

    def _order(self) -> list[int]:
        """Fragments, each after those that come before it, otherwise as they were begun."""
        done, order = 0, []
        while len(order) < len(self.groups):
            f = next(
                f for f in range(len(self.groups)) if not done >> f & 1 and not self.before[f] & ~done & ~(1 << f)
            )
            done |= 1 << f
            order.append(f)
        return order

    def _finish(self) -> list[Fragment | LoopPlan | None]:
        index = {id(n): i for i, n in enumerate(self.nodes)}
        bodies: list[tuple[list[Any], list[Var]] | None] = []
        read: set[Held] = set(self.required)
        for f, group in enumerate(self.groups):
            if group is None:
                read.update(self.loops[self.contents[f][0]].reads)
                bodies.append(None)
                continue
            eqns, invars = self._assemble(f, sorted(self.contents[f], key=lambda n: index[id(n)]))
            read.update((v, group[0]) for v in invars)
            bodies.append((eqns, invars))
        crossing = {(v, self._made_on(v, m)) for v, m in read if v in self.maker}
        steps: list[Fragment | LoopPlan | None] = []
        for f, group in enumerate(self.groups):
            if group is None:
                steps.append(self.loops[self.contents[f][0]])
                continue
            mesh, phase, position = group
            eqns, invars = bodies[f]
            outvars = [v for n in self.contents[f] for v in n.outvars if (v, mesh) in crossing]
            if not eqns:
                steps.append(None)
                continue
            task = self.placement.positions[position].task if position is not None else None
            name = task.name if task is not None and task.name else self.name_of[mesh]
            jaxpr = _compat.close_jaxpr(invars, outvars, [localise(e, mesh) for e in eqns])
            name = name if phase == "none" else f"{name} {phase}"
            steps.append(Fragment(name, mesh, phase, position, jaxpr, tuple(invars), tuple(outvars)))
        return steps

    def _assemble(self, f: int, nodes: list[Equation]) -> tuple[list[Any], list[Var]]:
        """The equations of a fragment with the copies they need, and its inputs."""
        present = {v for n in nodes for v in n.outvars}
        eqns: list[Any] = []
        invars: dict[Var, None] = {}
        done: set[Var] = set()

        def emit(node: Equation) -> None:
            for a in node.invars:
                if not is_var(a) or a in done or a in present:
                    continue
                maker = self.maker.get(a)
                if maker is not None and self._copied(maker):
                    emit(maker)
                else:
                    invars.setdefault(a)
            eqns.append(node.eqn)
            done.update(node.outvars)

        for node in nodes:
            emit(node)
        return eqns, list(invars)


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _expands(node: Equation) -> bool:
    """Whether an equation only spreads a smaller value, so that it is cheaper redone than kept."""
    return node.name == "broadcast_in_dim" and sum(map(nbytes, node.invars)) < sum(map(nbytes, node.outvars))


def _depths(body: Plan) -> dict[int, int]:
    """How many stages come before each position of a loop body, along the forward flow."""
    made: dict[Var, int] = {}
    depths: dict[int, int] = {}
    for step in body.steps:
        if step.phase == "forward" and step.position is not None:
            from_ = [made[v] for v in step.invars if v in made and made[v] != step.position]
            depth = max((depths[p] + 1 for p in from_), default=0)
            depths[step.position] = max(depth, depths.get(step.position, 0))
            made.update(dict.fromkeys(step.outvars, step.position))
    return depths


def localise(eqn: Any, mesh: Mesh) -> Any:
    """An equation for one TaskMesh: constraints and shard_maps over another mesh become ones over this one.

    A constraint keeps the axes that this mesh has. A shard_map is moved if its axes have the same sizes here.
    """
    params = {key: _localise_param(key, value, mesh) for key, value in eqn.params.items()}
    return eqn.replace(params=params) if any(params[k] is not eqn.params[k] for k in params) else eqn


def _localise_param(key: str, value: Any, mesh: Mesh) -> Any:
    if isinstance(value, NamedSharding) and value.mesh != mesh:
        return NamedSharding(mesh, _kept_axes(value.spec, mesh))
    if key == "mesh" and isinstance(value, (Mesh, AbstractMesh)) and value != mesh:
        return mesh if dict(value.shape) == dict(mesh.shape) else value
    if isinstance(value, _compat.JAXPR_TYPES):
        return _compat.map_equations(value, lambda e: localise(e, mesh))
    if isinstance(value, tuple) and any(isinstance(v, _compat.JAXPR_TYPES) for v in value):
        return tuple(_localise_param(key, v, mesh) for v in value)
    return value


def _kept_axes(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """A spec without the axes that a mesh lacks."""

    def keep(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(axis for axis in entry if axis in mesh.axis_names) or None
        return entry if entry in (None, PartitionSpec.UNCONSTRAINED) or entry in mesh.axis_names else None

    return PartitionSpec(*map(keep, spec))
