"""From a plan to its program: instructions in the order of dispatch, over numbered buffers."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.emit.liveness import free_after_last_use
from mmnnx.mpmd.emit.moving_meshes import MovingMeshes
from mmnnx.mpmd.emit.outer_values import OuterValues
from mmnnx.mpmd.emit.steps import emit_steps
from mmnnx.mpmd.emit.writer import Writer
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import LoopPlan, PlacedVar, Plan, WhilePlan
from mmnnx.mpmd.ir.instructions import LoopRuns
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.schedule.dispatch_order import Moves


def build_program(
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
      moving: for each moving mesh, which one it is for each microbatch.
      successors: for arguments that may be overwritten, the results that are their new values.
    """
    meshes = MovingMeshes(moving)
    writer = Writer(names, meshes)
    outer = OuterValues(plan, inputs, writer)
    emit_steps(plan, outer, writer)
    outputs = tuple(tuple(outer.buffer(v, mesh) for v, mesh in held) for held in results)
    renamed: dict[Var, Var] = {}  # what a while leaves is in the buffers that it began with
    for step in plan.all_steps:
        if isinstance(step, LoopPlan | WhilePlan):
            successors = successors | dict(zip(step.loop.carry_in, step.loop.carry_out))
        if isinstance(step, WhilePlan):
            renamed.update(zip(step.loop.carries, step.loop.init))
    return Program(
        free_after_last_use(writer.instructions, {s for buffers in outputs for s in buffers}),
        {s: writer.values[s] for s in writer.inputs},
        outputs,
        tuple(writer.values),
        names,
        tuple(_runs(step, meshes) for step in plan.loops),
        {v: renamed.get(after, after) for v, after in successors.items()},
    )


def _runs(plan: LoopPlan, meshes: MovingMeshes) -> LoopRuns:
    fragments = tuple(map(meshes.variants, plan.body.fragments))
    spec = plan.loop.spec
    return LoopRuns(plan.timetable.schedule, spec.length, fragments, spec.per_call or 1)
