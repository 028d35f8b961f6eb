"""What a scan stacks only to be added to a sum is added row by row, inside the scan.

The backward of stacked layers stacks their gradients, and the sum over microbatches is added after it. XLA
keeps the whole stack for that. Carried by the scan, the sum has its own buffer, and only one layer's gradient
is held beside it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import Var, is_var
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.instructions import Call
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.rewrite import trace_equations
from mmnnx.mpmd.ir.scans import split_operands


@dataclasses.dataclass(frozen=True)
class _Sum:
    """An addition of what a scan stacks to an input of its fragment.

    Attributes:
      stacked: the number of the stack among those of the scan.
      before, after: the sum as it comes in, and with the stack.
    """

    stacked: int
    before: Var
    after: Var


def add_inside_scans(program: Program) -> Program:
    """A program whose fragments add what scans stack to running sums inside the scans."""
    changed = {f: _rewritten(f) for f in dict.fromkeys(c.fragment for c in program.calls)}
    instructions = tuple(
        dataclasses.replace(i, fragment=changed[i.fragment]) if isinstance(i, Call) else i
        for i in program.instructions
    )
    return dataclasses.replace(program, instructions=instructions)


def _rewritten(f: Fragment) -> Fragment:
    eqns = list(f.jaxpr.eqns)
    found = _find_sums(f, eqns)
    if not found:
        return f
    gone = {s.after for sums in found.values() for s in sums}
    written: list[Any] = []
    for n, e in enumerate(eqns):
        if n in found:
            written += _with_sums(e, found[n])
        elif gone.isdisjoint(e.outvars):
            written.append(e)
    return dataclasses.replace(f, jaxpr=_compat.close_jaxpr(f.invars, f.outvars, written))


def _find_sums(f: Fragment, eqns: Sequence[Any]) -> dict[int, list[_Sum]]:
    """By the number of a scan, the sums that can be inside: of inputs of the fragment that nothing else reads,
    with stacks that nothing else reads."""
    uses = Counter(a for e in eqns for a in e.invars if is_var(a))
    uses.update(f.outvars)
    stacks = {}
    for n, e in enumerate(eqns):
        if e.primitive.name == "scan":
            _, carries = _compat.scan_counts(e.params)
            stacks |= {v: (n, k) for k, v in enumerate(e.outvars[carries:])}
    found: dict[int, list[_Sum]] = {}
    for e in eqns:
        if e.primitive.name not in ("add", "add_any") or not all(map(is_var, e.invars)):
            continue
        for before, stack in (e.invars, e.invars[::-1]):
            alike = before.aval.shape == stack.aval.shape and before.aval.dtype == stack.aval.dtype
            if stack in stacks and before in f.invars and alike and uses[before] == uses[stack] == 1:
                n, k = stacks[stack]
                found.setdefault(n, []).append(_Sum(k, before, e.outvars[0]))
    return found


def _with_sums(eqn: Any, sums: Sequence[_Sum]) -> list[Any]:
    """The equations of a scan that takes sums and returns them with what it stacks added."""
    consts, carries = _compat.scan_counts(eqn.params)
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    within = {s.stacked for s in sums}

    def scan(befores: Any, *operands: jax.Array) -> Any:
        given, init, xs = split_operands(operands, consts, carries)

        def body(carry: Any, row: Any) -> Any:
            n, totals, own = carry
            made = jex.jaxpr_as_fun(eqn.params["jaxpr"])(*given, *own, *row)
            own, ys = made[:carries], made[carries:]
            totals = [_add_row(total, n, ys[s.stacked]) for total, s in zip(totals, sums)]
            carry = n + (-1 if reverse else 1), totals, own
            return carry, [None if k in within else y for k, y in enumerate(ys)]

        first = jnp.int32(length - 1 if reverse else 0)
        start = first, list(befores), init
        (_, afters, own), ys = jax.lax.scan(body, start, xs, length, reverse, eqn.params["unroll"])
        return afters, own, ys

    def flat(*args: jax.Array) -> Any:
        return scan(args[: len(sums)], *args[len(sums) :])

    kept = [v for k, v in enumerate(eqn.outvars[carries:]) if k not in within]
    results = [*(s.after for s in sums), *eqn.outvars[:carries], *kept]
    made, atoms = trace_equations(flat, *(s.before for s in sums), *eqn.invars, scope="")
    named = dict(zip(atoms, results))
    return [e.eqn.replace(outvars=[named.get(v, v) for v in e.eqn.outvars]) for e in made]


def _add_row(total: jax.Array, n: jax.Array, row: jax.Array) -> jax.Array:
    """A stack with something added to one row, in place if XLA can."""
    before = jax.lax.dynamic_index_in_dim(total, n, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, before + row, n, 0)
