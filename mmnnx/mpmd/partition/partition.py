"""The partitions of a function: its fragments, what holds its results, and the shardings that are fixed.

A function that touches one mesh is one fragment. Any other is partitioned by mesh, phase and position;
where its loops ask for no schedule, once for each schedule that would do, that of lowest step latency first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jax.sharding import Mesh, NamedSharding

from mmnnx import _compat
from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.inline.calls import inline_calls
from mmnnx.mpmd.inline.logical_constraints import resolve_logical_constraints
from mmnnx.mpmd.ir.equations import Equation, Flat, Loop, Var, is_var, with_bodies
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar, Plan
from mmnnx.mpmd.ir.placement import Placed, Placement
from mmnnx.mpmd.partition.change_mesh import change_mesh
from mmnnx.mpmd.partition.fixed_shardings import fixed_shardings
from mmnnx.mpmd.partition.fragments import plan_fragments
from mmnnx.mpmd.partition.results import held_results
from mmnnx.mpmd.partition.scalar_packing import pack_scalars
from mmnnx.mpmd.partition.scan_microbatches import CannotShareCalls
from mmnnx.mpmd.partition.ways import choices, decide, ways_of_loops
from mmnnx.mpmd.place.logical_shard_maps import over_mesh


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """A function as fragments.

    Attributes:
      flat: its equations, as they were before they were placed.
      plan: its fragments and loops.
      results: for each result, the values that hold it; none for an argument or a constant.
      fixed: the shardings that are decided.
      not_hoisted: the inputs whose gradients are reduced in every microbatch, with the reason.
      follows: for gradients and what becomes of them, the input that they will be combined with.
    """

    flat: Flat
    plan: Plan
    results: list[list[PlacedVar]]
    fixed: dict[PlacedVar, NamedSharding]
    not_hoisted: dict[Var, str] = dataclasses.field(default_factory=dict)
    follows: dict[Var, Var] = dataclasses.field(default_factory=dict)


def partitions(function: Function, placed: Placed) -> Iterator[Partition]:
    """The ways to partition a function, one for each choice of schedules.

    Raises:
      ValueError: if a loop cannot have the schedule, or the number of stages, that it asks for.
    """
    flat, placement, names = placed.flat, placed.placement, function.meshes.names()
    results = held_results(function, flat, placement)
    required = [value for values in results for value in values]
    loops = [node for node in with_bodies(placed.nodes) if isinstance(node, Loop)]
    reasons = {
        placement.follows[v]: why
        for loop in loops
        for v, why in loop.not_hoisted.items()
        if v in placement.follows
    }
    refused, made = None, 0
    for chosen in choices(ways_of_loops(placed.nodes, placement)):
        if refused is not None and len(chosen) == 1 and max(way.per_call for way in chosen.values()) > 1:
            continue  # its microbatches share no calls, whatever the schedule
        decided = decide(placed, chosen)
        try:
            plan, held = pack_scalars(plan_fragments(decided, required, names), results, names)
        except CannotShareCalls as error:
            refused = error
            continue
        made += 1
        fixed = fixed_shardings(function, flat, plan, decided.placement, held)
        yield Partition(flat, plan, held, fixed, reasons, _follows(placement, loops))
    if refused is not None and not made:
        raise refused


def _follows(placement: Placement, loops: Sequence[Loop]) -> dict[Var, Var]:
    """What a placement says that gradients follow, and their sums in loops."""
    placements = [placement]
    for one in placements:
        placements += one.bodies.values()
    found = {v: state for one in placements for v, state in one.follows.items()}
    for loop in loops:
        for enters, leaves, after in zip(loop.carry_in, loop.carry_out, loop.carries):
            if after in found:
                found[enters] = found[leaves] = found[after]
    return found


def one_fragment(function: Function, mesh: Mesh) -> Partition:
    """A function that touches one mesh."""
    names = function.meshes.names()
    count = len(function.jaxpr.in_avals)
    flat = inline_calls(function.jaxpr, [None] * count, lambda scope: None, names, loops=False)
    flat = resolve_logical_constraints(flat, function.task_of)
    whole = [n for n in flat.nodes if isinstance(n, Equation)]  # which are all
    equations = [new for e in whole for new in over_mesh(function, e, mesh)]
    made = {v for e in equations for v in e.outvars}
    outvars = tuple(dict.fromkeys(v for v in flat.outvars if is_var(v) and v in made))
    read = {a for e in equations for a in e.invars if is_var(a)}
    invars = tuple(v for v in (*flat.invars, *(c for c, _ in flat.constants)) if v in read)
    jaxpr = _compat.close_jaxpr(invars, outvars, [change_mesh(e.eqn, mesh) for e in equations])
    fragment = Fragment(names[mesh], names[mesh], mesh, "none", None, jaxpr, invars, outvars)
    steps = (fragment,) if equations else ()
    plan = Plan(steps, dict.fromkeys(outvars, mesh), tuple((v, mesh) for v in invars))
    results = [[(v, mesh)] if is_var(v) and v in made else [] for v in flat.outvars]
    return Partition(flat, plan, results, fixed_shardings(function, flat, plan, None, results))
