"""Several microbatches share a call: each fragment of a loop becomes a scan over them.

The fewer calls, arrays and transfers, the less the host has to start. What fragments hand on is stacked by
microbatch and goes as one array; XLA compiles the body once, however many there are.
"""

from __future__ import annotations

import dataclasses
import graphlib

import jax.extend.core as jex
from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import Body, Fragment, Kept, LoopPlan, Microbatches
from mmnnx.mpmd.ir.scan_fragment import scan_fragment


class CannotShareCalls(ValueError):
    """The microbatches of a loop have to run one by one."""


def scan_microbatches(plan: LoopPlan) -> LoopPlan:
    """The plan of a loop whose calls run as many microbatches as its spec says, one after the other.

    Raises:
      CannotShareCalls: if a fragment waits for state that another one leaves after the microbatch before.
    """
    count = plan.loop.spec.per_call or 1
    if count == 1:
        return plan
    microbatches = _microbatches(plan, count)
    fragments = tuple(scan_fragment(f, microbatches) for f in _in_order(plan, microbatches))
    slices = {
        v: row[n::count] for one, row in plan.slices.items() for n, v in enumerate(microbatches.slices[one])
    }
    kept = tuple(
        Kept(v, row[n::count], meshes)
        for one, row, meshes in plan.kept
        for n, v in enumerate(microbatches.kept[one])
    )
    needs = tuple((new, mesh) for v, mesh in plan.body.needs for new in microbatches.slices.get(v, (v,)))
    body = Body(fragments, _homes(plan.body.homes, microbatches), needs)
    return dataclasses.replace(plan, body=body, slices=slices, kept=kept)


def _microbatches(plan: LoopPlan, count: int) -> Microbatches:
    fragments = plan.body.fragments
    each = lambda v: tuple(jex.Var(v.aval) for _ in range(count))
    names = Microbatches(
        count,
        leaves=dict(zip(plan.loop.carry_in, plan.loop.carry_out)),
        slices={v: each(v) for v in plan.slices},
        kept={v: each(v) for v, *_ in plan.kept},
        read=frozenset(v for f in fragments for v in f.invars),
        passed=frozenset(),
    )
    passed = frozenset(
        v for f in fragments for v in (names.leaves.keys() & {*f.invars}).difference(names.updated(f))
    )
    return dataclasses.replace(names, passed=passed)


def _homes(homes: dict[Var, Mesh], microbatches: Microbatches) -> dict[Var, Mesh]:
    """The mesh where each variable of a call is made, from those of one microbatch."""
    leaves = microbatches.leaves
    found = {v: mesh for v, mesh in homes.items() if v in leaves.values()}
    stacked = {stack: homes.get(leaves.get(v, v)) for v, stack in microbatches.stacks.items()}
    found |= {stack: mesh for stack, mesh in stacked.items() if mesh is not None}
    return found | {new: homes[v] for v, own in microbatches.kept.items() if v in homes for new in own}


def _in_order(plan: LoopPlan, microbatches: Microbatches) -> list[Fragment]:
    """The fragments of one microbatch, each after those that must have run for all microbatches of a call."""
    makers: dict[Var, list[Fragment]] = {}
    for f in plan.body.fragments:
        for v in f.outvars:
            makers.setdefault(v, []).append(f)
    waits: dict[Fragment, list[Fragment]] = {}
    for f in plan.body.fragments:
        updated = microbatches.updated(f)
        read = [microbatches.leaves.get(v, v) for v in f.invars if v not in updated]
        waits[f] = [m for v in read for m in makers.get(v, ()) if m.mesh == plan.body.homes.get(v, f.mesh)]
    try:
        return list(graphlib.TopologicalSorter(waits).static_order())
    except graphlib.CycleError as error:
        one, other, *_ = error.args[1]
        raise CannotShareCalls(
            f"microbatch: per_call={microbatches.count}, but {one.name!r} and {other.name!r} wait for one "
            "another from microbatch to microbatch: leave per_call out"
        ) from None
