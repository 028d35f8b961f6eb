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
from mmnnx.mpmd.ir.rewrite import name_results, trace_equations
from mmnnx.mpmd.ir.scan_fragment import scan_fragment
from mmnnx.mpmd.ir.scans import split_operands


@dataclasses.dataclass(frozen=True)
class _Stack:
    """What a scan stacks, as it is, or converted and transposed.

    Attributes:
      scan: the number of the equation.
      number: which of its stacks.
      order: the dimensions of the stack, in the order that they have now; 0 is the scanned one.
      made: the variables that hold it now and on the way, none for the stack as it is.
    """

    scan: int
    number: int
    order: tuple[int, ...]
    made: tuple[Var, ...] = ()

    def converted(self, made: Var) -> _Stack:
        return dataclasses.replace(self, made=(*self.made, made))

    def transposed(self, order: Sequence[int], made: Var) -> _Stack:
        return dataclasses.replace(self, order=tuple(self.order[d] for d in order), made=(*self.made, made))


@dataclasses.dataclass(frozen=True)
class _Sum:
    """An addition of a stack to an input of its fragment: the sum as it comes in, and with the stack."""

    stack: _Stack
    before: Var
    after: Var

    def add_row(self, total: jax.Array, n: jax.Array, row: jax.Array) -> jax.Array:
        """The sum with a row of the stack added to its own, in place if XLA can."""
        order = self.stack.order
        row = row.transpose([d - 1 for d in order if d])
        for v in self.stack.made:
            row = row.astype(v.aval.dtype)
        before = jax.lax.dynamic_index_in_dim(total, n, order.index(0), keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, before + row, n, order.index(0))


def add_inside_scans(program: Program) -> Program:
    """A program whose fragments add what scans stack to running sums inside the scans."""
    changed = {f: rewrite_fragment(f) for f in dict.fromkeys(c.fragment for c in program.calls)}
    instructions = tuple(
        i._replace(fragment=changed[i.fragment]) if isinstance(i, Call) else i for i in program.instructions
    )
    return dataclasses.replace(program, instructions=instructions)


def rewrite_fragment(f: Fragment) -> Fragment:
    """The fragment with what its scans stack for a sum added inside them; itself if there is no such sum."""
    if f.scan is not None:
        one = rewrite_fragment(f.scan.one)
        return f if one is f.scan.one else scan_fragment(one, f.scan.microbatches)
    eqns = list(f.jaxpr.eqns)
    found = _find_sums(f, eqns)
    if not found:
        return f
    gone = {v for sums in found.values() for s in sums for v in (*s.stack.made, s.after)}
    written: list[Any] = []
    for n, e in enumerate(eqns):
        if n in found:
            written += _with_sums(e, found[n])
        elif gone.isdisjoint(e.outvars):
            written.append(e)
    return dataclasses.replace(f, jaxpr=_compat.close_jaxpr(f.invars, f.outvars, written))


def _find_sums(f: Fragment, eqns: Sequence[Any]) -> dict[int, list[_Sum]]:
    """The sums that can be inside, by the number of their scan: nothing else reads the stack or the input."""
    uses = Counter(a for e in eqns for a in e.invars if is_var(a))
    uses.update(f.outvars)
    stacks: dict[Var, _Stack] = {}
    found: dict[int, list[_Sum]] = {}
    for n, e in enumerate(eqns):
        name = e.primitive.name
        once = [a for a in e.invars if is_var(a) and uses[a] == 1]
        held = [stacks[a] for a in once if a in stacks]
        if name == "scan" and e.params["length"]:
            _, carries = _compat.scan_counts(e.params)
            stacked = enumerate(e.outvars[carries:])
            stacks |= {v: _Stack(n, k, tuple(range(v.aval.ndim))) for k, v in stacked}
        elif name == "convert_element_type" and held:
            stacks[e.outvars[0]] = held[0].converted(e.outvars[0])
        elif name == "transpose" and held:
            stacks[e.outvars[0]] = held[0].transposed(e.params["permutation"], e.outvars[0])
        elif name in ("add", "add_any") and len(once) == 2 and len(held) == 1:
            before = next(a for a in once if a not in stacks)
            if before in f.invars:
                found.setdefault(held[0].scan, []).append(_Sum(held[0], before, e.outvars[0]))
    return found


def _with_sums(eqn: Any, sums: Sequence[_Sum]) -> list[Any]:
    """The equations of a scan that takes sums and returns them with what it stacks added."""
    consts, carries = _compat.scan_counts(eqn.params)
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    within = {s.stack.number for s in sums}

    def scan(befores: Any, *operands: jax.Array) -> Any:
        given, init, xs = split_operands(operands, consts, carries)

        def body(carry: Any, row: Any) -> Any:
            n, totals, own = carry
            made = jex.jaxpr_as_fun(eqn.params["jaxpr"])(*given, *own, *row)
            own, ys = made[:carries], made[carries:]
            totals = [s.add_row(total, n, ys[s.stack.number]) for total, s in zip(totals, sums)]
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
    return [e.eqn for e in name_results(made, atoms, results)]
