"""Several microbatches share a call: each fragment of a loop becomes a scan over them.

The fewer calls, arrays and transfers, the less the host has to start. What fragments hand on is stacked by
microbatch and goes as one array; XLA compiles the body once, however many there are.
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import Body, Fragment, Kept, LoopPlan
from mmnnx.mpmd.ir.rewrite import name_results, trace_equations


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
    names = _Names(plan, count)
    fragments = tuple(_scan(f, names) for f in _in_order(plan, names))
    slices = {
        v: row[n::count] for one, row in plan.slices.items() for n, v in enumerate(names.slices[one])
    }
    kept = tuple(
        Kept(v, row[n::count], meshes)
        for one, row, meshes in plan.kept
        for n, v in enumerate(names.kept[one])
    )
    needs = tuple((new, mesh) for v, mesh in plan.body.needs for new in names.slices.get(v, (v,)))
    body = Body(fragments, names.homes(plan.body.homes), needs)
    return dataclasses.replace(plan, body=body, slices=slices, kept=kept)


class _Names:
    """Which variables of a call stand for those of one microbatch.

    Attributes:
      count: how many microbatches share a call.
      leaves: for each carry as it enters, as it leaves. Both stand for themselves: before and after the call.
      slices, kept: for a slice, or a result that is kept, one variable for each microbatch.
      stacks: for a value that fragments hand on, one variable for all microbatches.
      read: what fragments read.
      passed: the carries that a fragment reads and does not update.
    """

    def __init__(self, plan: LoopPlan, count: int):
        self.count = count
        self.leaves: dict[Var, Var] = dict(zip(plan.loop.carry_in, plan.loop.carry_out))
        self.slices = {v: self._fresh(v) for v in plan.slices}
        self.kept = {v: self._fresh(v) for v, *_ in plan.kept}
        self.stacks: dict[Var, Var] = {}
        self.read = {v for f in plan.body.fragments for v in f.invars}
        self.passed = {
            v for f in plan.body.fragments for v in f.invars if v in self.leaves and v not in self.updated(f)
        }

    def _fresh(self, v: Var) -> tuple[Var, ...]:
        return tuple(jex.Var(v.aval) for _ in range(self.count))

    def updated(self, f: Fragment) -> list[Var]:
        """The carries that a fragment of one microbatch reads and updates."""
        return [v for v, leaves in self.leaves.items() if v in f.invars and leaves in f.outvars]

    def homes(self, homes: dict[Var, Mesh]) -> dict[Var, Mesh]:
        """The mesh where each variable of a call is made, from those of one microbatch."""
        found = {v: mesh for v, mesh in homes.items() if v in self.leaves.values()}
        for v, stack in self.stacks.items():
            if (mesh := homes.get(self.leaves.get(v, v))) is not None:
                found[stack] = mesh
        return found | {new: homes[v] for v, own in self.kept.items() if v in homes for new in own}


def _in_order(plan: LoopPlan, names: _Names) -> list[Fragment]:
    """The fragments of one microbatch, each after those that must have run for all microbatches of a call."""
    makers: dict[Var, list[Fragment]] = {}
    for f in plan.body.fragments:
        for v in f.outvars:
            makers.setdefault(v, []).append(f)
    waits: dict[Fragment, list[Fragment]] = {}
    for f in plan.body.fragments:
        read = [names.leaves.get(v, v) for v in f.invars if v not in names.updated(f)]
        waits[f] = [m for v in read for m in makers.get(v, ()) if m.mesh == plan.body.homes.get(v, f.mesh)]
    try:
        return list(graphlib.TopologicalSorter(waits).static_order())
    except graphlib.CycleError as error:
        one, other, *_ = error.args[1]
        raise CannotShareCalls(
            f"microbatch: per_call={names.count}, but {one.name!r} and {other.name!r} wait for one another "
            "from microbatch to microbatch: leave per_call out"
        ) from None


def _scan(f: Fragment, names: _Names) -> Fragment:
    """The fragment of a call, from that of one microbatch."""
    count, leaves = names.count, names.leaves
    entering = [v for v in names.passed if leaves[v] in f.outvars]  # what others read of its carries
    carries = list(dict.fromkeys([*names.updated(f), *entering]))
    updates = [leaves[v] for v in carries]
    rows = [v for v in f.invars if v not in carries and (v in names.slices or v in names.stacks)]
    whole = [v for v in f.invars if v not in carries and v not in rows]
    own = [v for v in f.outvars if v in leaves.values() and v not in updates]  # carries that it sets anew
    handed_on = [v for v in f.outvars if v in names.read]
    kept = [v for v in f.outvars if v in names.kept]
    stacked = list(dict.fromkeys([*own, *handed_on, *kept]))
    run_one = jex.jaxpr_as_fun(f.jaxpr)

    def run(*args: jax.Array) -> list[jax.Array]:
        given = iter(args)
        constants: dict[Var, Any] = {v: next(given) for v in whole}
        init = [next(given) for _ in carries]
        xs = [
            jnp.stack([next(given) for _ in names.slices[v]]) if v in names.slices else next(given)
            for v in rows
        ]

        def body(carry: Sequence[jax.Array], row: Sequence[jax.Array]) -> Any:
            env = constants | dict(zip(carries, carry)) | dict(zip(rows, row))
            made = dict(zip(f.outvars, run_one(*(env[v] for v in f.invars))))
            return [made[v] for v in updates], [*(made[v] for v in stacked), *(env[v] for v in entering)]

        carry, ys = jax.lax.scan(body, init, xs, count)
        stacks = dict(zip((*stacked, *entering), ys))
        return [
            *carry,
            *(stacks[v][-1] for v in own),
            *(stacks[v] for v in (*handed_on, *entering)),
            *(stacks[v][n] for v in kept for n in range(count)),
        ]

    invars = [*whole, *carries, *(new for v in rows for new in names.slices.get(v, (names.stacks.get(v),)))]
    made, atoms = trace_equations(run, *invars, scope="")
    for v, atom in zip((*handed_on, *entering), atoms[len(updates) + len(own) :]):
        names.stacks.setdefault(v, jex.Var(atom.aval))
    outvars = [
        *(*updates, *own),
        *(names.stacks[v] for v in (*handed_on, *entering)),
        *(new for v in kept for new in names.kept[v]),
    ]
    jaxpr = _compat.close_jaxpr(invars, outvars, [e.eqn for e in name_results(made, atoms, outvars)])
    return dataclasses.replace(f, jaxpr=jaxpr, invars=tuple(invars), outvars=tuple(outvars))
