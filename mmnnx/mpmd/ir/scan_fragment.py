"""A fragment of one microbatch as one of several that share a call: a scan over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import Fragment, Microbatches, Scan
from mmnnx.mpmd.ir.rewrite import name_results, trace_equations


def scan_fragment(one: Fragment, microbatches: Microbatches) -> Fragment:
    """The fragment that runs another one for all microbatches of a call, in order.

    What becomes of the variables of one microbatch:

    | in the code | are | enter the scan as | leave it as |
    |---|---|---|---|
    | `whole` | the same for all | constants | |
    | `carries` | read and updated | carries | carries after the last microbatch |
    | `rows` | slices, or handed on by others | one row after the other | |
    | `set_anew` | carries that are made, not read | | the row of the last |
    | `handed_on` | read by others | | a stack |
    | `entering` | carries that others read as they entered | | a stack |
    | `kept` | results of the loop | | one value for each microbatch |
    """
    count, leaves, stacks = microbatches.count, microbatches.leaves, microbatches.stacks
    slices, kept_as = microbatches.slices, microbatches.kept
    entering = [v for v, after in leaves.items() if v in microbatches.passed and after in one.outvars]
    carries = list(dict.fromkeys([*microbatches.updated(one), *entering]))
    updates = [leaves[v] for v in carries]
    rows = [v for v in one.invars if v not in carries and (v in slices or v in stacks)]
    whole = [v for v in one.invars if v not in carries and v not in rows]
    left = set(leaves.values())
    set_anew = [v for v in one.outvars if v in left and v not in updates]
    kept = [v for v in one.outvars if v in kept_as]
    others = {v for v in one.outvars if v not in left and v not in kept_as}
    handed_on = [v for v in one.outvars if v in others or v in microbatches.read]
    stacked = list(dict.fromkeys([*set_anew, *handed_on, *kept]))
    run_one = jex.jaxpr_as_fun(one.jaxpr)

    def run(*args: jax.Array) -> list[jax.Array]:
        given = iter(args)
        constants: dict[Var, Any] = {v: next(given) for v in whole}
        init = [next(given) for _ in carries]
        xs = [jnp.stack([next(given) for _ in slices[v]]) if v in slices else next(given) for v in rows]

        def body(carry: Sequence[jax.Array], row: Sequence[jax.Array]) -> Any:
            env = constants | dict(zip(carries, carry)) | dict(zip(rows, row))
            made = dict(zip(one.outvars, run_one(*(env[v] for v in one.invars))))
            return [made[v] for v in updates], [*(made[v] for v in stacked), *(env[v] for v in entering)]

        carry, ys = jax.lax.scan(body, init, xs, count)
        values = dict(zip((*stacked, *entering), ys))
        last = [values[v][-1] for v in set_anew]
        each = [values[v][n] for v in kept for n in range(count)]
        return [*carry, *last, *(values[v] for v in (*handed_on, *entering)), *each]

    of_rows = [new for v in rows for new in (slices[v] if v in slices else (stacks[v],))]
    invars = (*whole, *carries, *of_rows)
    made, atoms = trace_equations(run, *invars, scope="")
    for v, atom in zip((*handed_on, *entering), atoms[len(updates) + len(set_anew) :]):
        stacks.setdefault(v, jex.Var(atom.aval))
    of_stacks = [stacks[v] for v in (*handed_on, *entering)]
    outvars = (*updates, *set_anew, *of_stacks, *(new for v in kept for new in kept_as[v]))
    jaxpr = _compat.close_jaxpr(invars, outvars, [e.eqn for e in name_results(made, atoms, outvars)])
    scan = Scan(one, microbatches)
    return dataclasses.replace(one, jaxpr=jaxpr, invars=invars, outvars=outvars, scan=scan)
