"""What becomes of a scan over several tasks: a Loop, one scan for each task, or its iterations in a row."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from mmnnx import _compat
from mmnnx.mpmd.inline.scan_distribution import write_distributed
from mmnnx.mpmd.inline.scan_equation import Scan, write_slices, write_stacks
from mmnnx.mpmd.inline.scan_to_loop import write_loop
from mmnnx.mpmd.inline.writer import HoldsLoop, InLoop, Writer
from mmnnx.mpmd.ir.equations import Atom, Node, scopes_in
from mmnnx.mpmd.ir.loop_spec import LoopSpec, is_transformed, loop_spec
from mmnnx.mpmd.ir.origin import FREE, Kind
from mmnnx.mpmd.ir.rewrite import trace_equations
from mmnnx.sharding.name_stack import is_backward


def write_scan(writer: Writer, eqn: Any, scope: str, out: list[Node], in_loop: InLoop) -> Sequence[Atom]:
    """Writes what a scan of several tasks becomes.

    A loop of `mm.microbatch` becomes a Loop, and so does any other that is in no Loop and no derivative.
    There it is distributed, or else unrolled.

    Returns:
      Its results in the list.
    """
    scan = Scan.of(eqn)
    spec = loop_spec(scope)
    if spec is not None and in_loop is InLoop.NO:
        return write_loop(writer, scan, spec, scope, out, InLoop.MICROBATCHES)
    if is_transformed(scope):
        warnings.warn(
            "a loop of mm.microbatch is inside a gradient or another transformation: its microbatches do not "
            "overlap, and its schedule has no effect. Have the transformation inside the loop, as in "
            "mm.microbatch(jax.value_and_grad(loss_fn), ...)",
            stacklevel=2,
        )
    if in_loop in (InLoop.MICROBATCHES, InLoop.DIVIDED) or not _can_be_loop(eqn, scope):
        inside = InLoop.MICROBATCHES if in_loop is InLoop.MICROBATCHES else InLoop.DIVIDED
        results = write_distributed(writer, scan, scope, out, inside)
        return _write_unrolled(writer, scan, scope, out, in_loop) if results is None else results
    if in_loop is InLoop.ITERATIONS:
        raise HoldsLoop
    try:
        return write_loop(writer, scan, LoopSpec(per_call=1), scope, out, InLoop.ITERATIONS)
    except HoldsLoop:  # loops do not nest; the inner one is where work can overlap
        return _write_unrolled(writer, scan, scope, out, in_loop)


def _can_be_loop(eqn: Any, scope: str) -> bool:
    """Whether a scan can be a Loop: it is no part of a derivative, and holds no loop of `mm.microbatch`."""
    derivative = is_backward(scope) or "jvp(" in scope
    inside = (s for jaxpr in _compat.subjaxprs(eqn) for s in scopes_in(jaxpr, scope))
    return eqn.params["length"] > 0 and not derivative and all(loop_spec(s) is None for s in inside)


def _write_unrolled(writer: Writer, scan: Scan, scope: str, out: list[Node], in_loop: InLoop) -> list[Atom]:
    """Writes the body of a scan once for each iteration."""
    slices = write_slices(writer, scan, scope, out)
    carry, rows = scan.init, []
    for i in range(scan.length)[:: scan.turn]:
        args = [*scan.consts, *carry, *(each[i] for each in slices)]
        results = writer.write_jaxpr(scan.jaxpr, args, scope, out, in_loop)
        writer.record_carries(results[: len(carry)], carry)
        carry = [_counted(writer, v, scope, out) for v in results[: len(carry)]]
        rows.append(results[len(carry) :])
    stacks = zip(*rows) if rows else [()] * len(scan.ys)
    return [*carry, *write_stacks(writer, scan, [stack[:: scan.turn] for stack in stacks], scope, out)]


def _counted(writer: Writer, carry: Atom, scope: str, out: list[Node]) -> Atom:
    """A carry; a copy that is kept if it is a counter, so that no reader counts from the beginning again."""
    if writer.origin_of(carry).kind is not Kind.FREE:
        return carry
    (copy,), (kept,) = trace_equations(jnp.copy, carry, scope=scope)
    writer.record(copy, FREE)
    out.append(dataclasses.replace(copy, kept=True))
    return kept
