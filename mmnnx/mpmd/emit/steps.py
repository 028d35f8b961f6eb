"""The steps of a plan as instructions: calls of fragments, microbatch loops, and whiles around such steps."""

from __future__ import annotations

from mmnnx.mpmd.emit.loop import emit_loop
from mmnnx.mpmd.emit.outer_values import OuterValues
from mmnnx.mpmd.emit.writer import Writer, remote_readers, sends_of
from mmnnx.mpmd.ir.fragments import Fragment, LoopPlan, Plan, WhilePlan
from mmnnx.mpmd.ir.instructions import Control


def emit_steps(plan: Plan, outer: OuterValues, writer: Writer) -> None:
    """Writes the instructions of steps that are in no microbatch loop."""
    readers = remote_readers(plan.steps, plan.homes)
    for step in plan.steps:
        if isinstance(step, Fragment):
            mesh = writer.meshes.at(step.mesh, None)
            inputs = [outer.buffer(v, mesh) for v in step.invars]
            writer.call(step, mesh, None, inputs, sends_of(step, readers))
        elif isinstance(step, LoopPlan):
            emit_loop(step, outer, writer)
        else:
            _emit_while(step, outer, writer)


def _emit_while(plan: WhilePlan, outer: OuterValues, writer: Writer) -> None:
    """Writes a while. Each of its carries has one buffer on a mesh: before it, in it, and after it."""
    loop, at = plan.loop, writer.meshes.at
    for v, mesh in plan.reads:  # an iteration that may never run brings nothing from outside
        outer.buffer(v, mesh)
    held = [(n, mesh) for n, meshes in enumerate(plan.carried) for mesh in meshes]
    carries = [outer.buffer(loop.init[n], mesh) for n, mesh in held]
    for (n, mesh), buffer in zip(held, carries):
        for v in (loop.carry_in[n], loop.carries[n]):
            writer.buffers[v, at(mesh, None), None] = buffer
    outer.enter(plan)
    writer.instructions.append(Control("while", tuple(carries[: len(plan.carried[0])])))
    first = len(writer.instructions)
    emit_steps(plan.body, outer, writer)
    made = [outer.buffer(loop.carry_out[n], mesh) for n, mesh in held]
    inside = writer.instructions[first:]
    own = {s for i in inside for s in i.outputs} - {*carries}
    read = dict.fromkeys(s for i in inside for s in i.inputs if s not in own)
    writer.instructions.append(Control("repeat", tuple(made), tuple(carries)))
    writer.instructions.append(Control("end", tuple(dict.fromkeys([*carries, *read]))))
