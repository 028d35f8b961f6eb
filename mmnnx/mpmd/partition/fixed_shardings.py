"""Shardings that are decided before XLA is asked: of what loops carry and slice, and of results.

What a loop carries and slices must have one sharding for all microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.ir.equations import Flat, Var, While
from mmnnx.mpmd.ir.fragments import LoopPlan, PlacedVar, Plan, WhilePlan
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.ir.shardings import entering, mesh_of, transferred, without
from mmnnx.mpmd.schedule.dispatch_order import Moves

Fixed = dict[PlacedVar, NamedSharding]


def fixed_shardings(
    function: Function,
    flat: Flat,
    plan: Plan,
    placement: Placement | None,
    results: Sequence[Sequence[PlacedVar]],
) -> Fixed:
    """The shardings of values that are decided, where they are made or read.

    Args:
      function: the function.
      flat: its equations.
      plan: its fragments and loops.
      placement: where the equations are; None for a plan without loops.
      results: the values that hold each result.
    """
    fixed: Fixed = {}
    given = function.given(flat)
    if placement is not None:
        fixed |= _of_loops(plan, placement, given, function.meshes.moving)
    by_type = function.traced.result_shardings
    for values, asked, typed in zip(results, function.shardings.out_shardings, by_type):
        if len(values) == 1 and (sharding := asked or typed) is not None:
            if asked is None:
                sharding = entering(values[0][0].aval, values[0][1], sharding)
            fixed |= _result(values[0], sharding, plan)
    return fixed


def _of_loops(
    plan: Plan, placement: Placement, given: Mapping[Var, NamedSharding | None], moving: Moves
) -> Fixed:
    """The shardings that loops ask for, and those in whiles."""
    fixed: Fixed = {}
    for step in plan.steps:
        if isinstance(step, LoopPlan):
            fixed |= _carried(step, placement, given, moving) | _sliced(step, plan, given, moving)
        elif isinstance(step, WhilePlan):
            fixed |= _carried(step, placement, given, moving)
            # What it carries is sharded in its body as it is on the way in.
            inside = {v: fixed[v, meshes[0]] for v, meshes in zip(step.loop.carry_in, step.carried) if meshes}
            fixed |= _of_loops(step.body, placement.bodies[step.loop], {**given, **inside}, moving)
    return fixed


def _carried(
    step: LoopPlan | WhilePlan, placement: Placement, given: Mapping[Var, NamedSharding | None], moving: Moves
) -> Fixed:
    """What a loop carries is sharded as the state that it is for; parts of a sum, over the axes of these."""
    fixed: Fixed = {}
    loop = step.loop
    for i, meshes in enumerate(step.carried):
        state = placement.follows.get(loop.carries[i]) or loop.sources.get(loop.init[i])
        groups = () if isinstance(loop, While) else loop.parts.get(loop.carries[i], ())
        for mesh in itertools.chain.from_iterable(_meshes(m, step, moving) for m in meshes):
            sharding = NamedSharding(mesh, PartitionSpec(*groups))
            if state is not None and state.aval.shape == loop.init[i].aval.shape[len(groups) :]:
                own = given.get(state)
                if own is not None and own.mesh.devices.shape == mesh.devices.shape:
                    spec = without(transferred(own, mesh).spec, set(itertools.chain(*groups)))
                    sharding = NamedSharding(mesh, PartitionSpec(*groups, *spec))
            for v in (loop.init[i], loop.carry_in[i], loop.carry_out[i], loop.carries[i]):
                fixed[v, mesh] = sharding
    return fixed


def _sliced(step: LoopPlan, plan: Plan, given: Mapping[Var, NamedSharding | None], moving: Moves) -> Fixed:
    """The slices of an argument are sharded as it is, where they are read and where they are made."""
    fixed: Fixed = {}
    root = {v: step.loop.sources.get(row[0]) for row in step.loop.slices for v in row}
    for v, mesh in step.reads:
        if v in root:
            home = (plan.homes[v],) if v in plan.homes else ()
            for here in (*_meshes(mesh, step, moving), *home):
                fixed[v, here] = entering(v.aval, here, given.get(root[v]))
    return fixed


def _meshes(mesh: Mesh, step: LoopPlan | WhilePlan, moving: Moves) -> Iterable[Mesh]:
    """The meshes that a moving mesh is in turn, outside of loops the first; any other, itself."""
    if isinstance(step, WhilePlan):
        return [moving[mesh](0) if mesh in moving else mesh]
    return dict.fromkeys(map(moving[mesh], range(step.loop.spec.length))) if mesh in moving else [mesh]


def _result(value: PlacedVar, sharding: NamedSharding, plan: Plan) -> Fixed:
    """The sharding of a result, and where it is made elsewhere, the one it is sent with."""
    v, mesh = value
    home = plan.homes.get(v, mesh)
    if home == mesh:
        return {value: sharding} if mesh_of(sharding) == mesh else {}
    return {(v, home): transferred(sharding, home)} if home.devices.shape == mesh.devices.shape else {}
