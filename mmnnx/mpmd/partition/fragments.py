"""Placed equations become fragments: SPMD programs of one mesh, phase and position each.

Values that cross between fragments are saved activations (on one mesh) or transfers (between meshes).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.distributed.processes import holders
from mmnnx.mpmd.ir.equations import Loop, Node, Var, While, is_var
from mmnnx.mpmd.ir.fragments import Body, Fragment, Kept, LoopPlan, PlacedVar, Plan, Step, WhilePlan
from mmnnx.mpmd.ir.placement import Placed, Placement
from mmnnx.mpmd.ir.timetable import PARTS
from mmnnx.mpmd.partition.change_mesh import change_mesh
from mmnnx.mpmd.partition.grouping import Group, Grouping, Needs
from mmnnx.mpmd.partition.joins import set_joins_apart
from mmnnx.mpmd.partition.rematerialise import rematerialise
from mmnnx.mpmd.partition.scan_microbatches import scan_microbatches
from mmnnx.mpmd.partition.split_backward import split_backward
from mmnnx.mpmd.partition.split_scans import split_scans
from mmnnx.mpmd.partition.timetable import split_positions, task_remat, timetable

Names = dict[Mesh, str]


def plan_fragments(placed: Placed, required: Iterable[PlacedVar], names: Names) -> Plan:
    """Partitions placed nodes into fragments.

    Args:
      placed: all nodes, in order, and where they go.
      required: results, each with the mesh on which it is wanted.
      names: for meshes whose work is in no named task.
    """
    nodes, placement = _as_tasks_say(placed.nodes, placed.placement)
    return _plan(nodes, placement, required, names)


def _as_tasks_say(nodes: Sequence[Node], placement: Placement) -> tuple[list[Node], Placement]:
    """Nodes that are in no microbatch loop, with backwards as the options of their tasks ask for them."""
    nodes, placement = rematerialise(nodes, placement, task_remat(placement))
    nodes, placement = split_scans(nodes, placement, split_positions(placement))
    return nodes, split_backward(nodes, placement, split_positions(placement))


def _plan(
    nodes: Sequence[Node],
    placement: Placement,
    required: Iterable[PlacedVar],
    names: Names,
    in_loop: bool = False,
    carried: Collection[Var] = (),
) -> Plan:
    """The fragments and loops of nodes, as they are."""
    results = list(dict.fromkeys(required))

    def plan_loop(loop: Loop | While, needs: Needs) -> LoopPlan | WhilePlan:
        if isinstance(loop, While):
            return _plan_while(loop, placement.bodies[loop], needs, names)
        return _plan_loop(loop, placement.bodies[loop], needs, names)

    grouping = Grouping(nodes, placement, results, plan_loop, in_loop, carried)
    steps = _steps(grouping, results, names)
    maker = grouping.copies.maker
    homes = {v: m for v in maker if (m := placement.where[v].home) is not None}
    outside = [(v, m) for v, meshes in grouping.needs.items() if v not in maker for m in meshes]
    return Plan(steps, homes, tuple(outside))


def _plan_loop(loop: Loop, placement: Placement, needs: Needs, names: Names) -> LoopPlan:
    """The plan of a loop whose body is placed so, and whose results are needed on these meshes."""
    placement = set_joins_apart(loop, placement)
    times = timetable(loop, placement)
    nodes, placement = rematerialise(loop.body, placement, times.remat)
    nodes, placement = split_scans(nodes, placement, times.split)
    placement = split_backward(nodes, placement, times.split)
    carried = _carried(loop, placement, needs)
    kept = []
    for y, row in zip(loop.ys, loop.stacks):
        home = placement.where[y].home
        held_on = dict.fromkeys([home] if home is not None else (m for v in row for m in needs.get(v, ())))
        kept.append(Kept(y, row, tuple(held_on)))
    results = [(y, m) for y, _, meshes in kept for m in meshes]
    plan = _plan_body(loop, nodes, placement, carried, results, names)
    slices = dict(zip(loop.slice_vars, loop.slices))
    reads = _reads(loop, plan, placement, slices)
    fragments = tuple(step for step in plan.steps if isinstance(step, Fragment))  # which are all
    body = Body(fragments, plan.homes, plan.needs)
    made = LoopPlan(loop, body, slices, tuple(map(tuple, carried)), tuple(kept), tuple(reads), times)
    return scan_microbatches(made)


def _plan_while(loop: While, placement: Placement, needs: Needs, names: Names) -> WhilePlan:
    """The plan of a while whose body is placed so, and whose results are needed on these meshes."""
    nodes, placement = _as_tasks_say(loop.body, placement)
    carried = _carried(loop, placement, needs)
    while True:
        plan = _plan_body(loop, nodes, placement, carried, [], names)
        # Every process that has a part in the loop reads whether it goes on, on one mesh.
        taking_part = [f.mesh for f in _fragments(plan)] + [m for meshes in carried[1:] for m in meshes]
        informed = frozenset().union(*map(holders, carried[0]))
        missing = next((m for m in taking_part if not holders(m) <= informed), None)
        if missing is None:
            break
        carried[0][missing] = None
    reads = _reads(loop, plan, placement, {})
    reads |= {(a, m): None for a, meshes in zip(loop.init, carried) for m in meshes}
    return WhilePlan(loop, plan, tuple(map(tuple, carried)), tuple(reads))


def _fragments(plan: Plan) -> list[Fragment]:
    steps = plan.all_steps
    return [
        f
        for s in steps
        for f in (s.body.fragments if isinstance(s, LoopPlan) else [s])
        if isinstance(f, Fragment)
    ]


def _carried(loop: Loop | While, placement: Placement, needs: Needs) -> list[dict[Mesh, None]]:
    """For each carry, its home, or the meshes where it is needed after the loop."""
    homes = [placement.where[v].home for v in loop.carry_in]
    return [
        dict.fromkeys(needs.get(after, ()) if home is None else [home])
        for home, after in zip(homes, loop.carries)
    ]


def _plan_body(
    loop: Loop | While,
    nodes: Sequence[Node],
    placement: Placement,
    carried: list[dict[Mesh, None]],
    results: Sequence[PlacedVar],
    names: Names,
) -> Plan:
    """The plan of the body of a loop.

    Args:
      carried: for each carry, the meshes that hold it; those that read it are added, if it has no home.
      results: what else is wanted of an iteration.
    """
    while True:
        required = [(v, m) for v, meshes in zip(loop.carry_out, carried) for m in meshes]
        leaves = loop.carry_out if isinstance(loop, Loop) else ()  # iterations of a while do not overlap
        plan = _plan(nodes, placement, [*required, *results], names, in_loop=True, carried=leaves)
        grown = False
        held_on = dict(zip(loop.carry_in, carried))
        for v, mesh in plan.needs:
            # A counter is kept on every mesh that reads it; placed state has one home.
            if v in held_on and mesh not in held_on[v] and placement.where[v].home is None:
                held_on[v][mesh] = None
                grown = True
        if not grown:
            return plan


def _reads(
    loop: Loop | While, plan: Plan, placement: Placement, slices: Mapping[Var, Sequence[Var]]
) -> dict[PlacedVar, None]:
    """The outer values that the body of a loop reads, carries as they enter it."""
    outer: dict[Var, Sequence[Var]] = dict(zip(loop.carry_in, ([a] for a in loop.init)))
    outer.update(slices)
    reads: dict[PlacedVar, None] = {}
    carries = {*loop.carry_in}
    for v, mesh in plan.needs:
        if v in carries:
            mesh = placement.where[v].home or mesh
        reads.update({(a, mesh): None for a in outer.get(v, [v])})
    return reads


def _steps(grouping: Grouping, required: Sequence[PlacedVar], names: Names) -> tuple[Step, ...]:
    """The fragments and loops of a grouping, in order, each fragment as a jaxpr."""
    equations = [grouping.copies.with_copies(own) for own in grouping.contents]
    inputs = []
    for own in equations:
        made = {v for e in own for v in e.outvars}
        inputs.append(tuple(dict.fromkeys(a for e in own for a in e.invars if is_var(a) and a not in made)))
    crossing = {*required}
    for group, invars in zip(grouping.groups, inputs):
        crossing.update(((v, group[0]) for v in invars) if isinstance(group, tuple) else group.reads)
    crossing = {(v, grouping.made_on(v, m)) for v, m in crossing if v in grouping.copies.maker}
    steps: list[Step] = []
    for f in grouping.order.in_order():
        group = grouping.groups[f]
        if not isinstance(group, tuple):
            steps.append(group)
            continue
        mesh, phase, position = group
        outvars = tuple(v for e in grouping.contents[f] for v in e.outvars if (v, mesh) in crossing)
        jaxpr = _compat.close_jaxpr(inputs[f], outvars, [change_mesh(e.eqn, mesh) for e in equations[f]])
        name, task = _name(group, grouping.placement, names)
        steps.append(Fragment(name, task, mesh, phase, position, jaxpr, inputs[f], outvars))
    return tuple(steps)


def _name(group: Group, placement: Placement, names: Names) -> tuple[str, str]:
    """The name of a fragment, and that of its task."""
    mesh, phase, position = group
    task = placement.positions[position].task if position is not None else None
    owner = task.name if task is not None and task.name else names[mesh]
    if position is not None and phase.startswith("backward"):
        owner = placement.backward_tasks.get(position, owner)
    if task is not None and task.split_backprop and phase in PARTS:
        return task.split_backprop[PARTS.index(phase)], owner
    return owner if phase == "none" else f"{owner} {phase}", owner
