"""A scan over several tasks becomes a Loop, whose microbatches or iterations a schedule overlaps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from mmnnx.mpmd.inline.loop_invariants import split_invariant
from mmnnx.mpmd.inline.scan_equation import Scan, write_body, write_slices, write_stacks
from mmnnx.mpmd.inline.writer import InLoop, Writer
from mmnnx.mpmd.ir.equations import Atom, Loop, Node, Var, is_var
from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.ir.origin import ACTIVATION


def write_loop(
    writer: Writer, scan: Scan, spec: LoopSpec, scope: str, out: list[Node], inside: InLoop
) -> list[Atom]:
    """Writes a scan as a Loop; its results in the list.

    Args:
      spec: the description of the loop.
      inside: which kind of loop its body is in.
    """
    slices = [tuple(row[:: scan.turn]) for row in write_slices(writer, scan, scope, out)]
    for x, row in zip(scan.xs, slices):
        writer.layout_of.update((v, writer.layout_of.get(x, x)) for v in row if is_var(x))
    # Each carry starts in a buffer of its own, so that it can be updated in place.
    init = [writer.write(jnp.copy, [a], scope, out)[0] for a in scan.init]
    body = write_body(writer, scan, scope, inside)
    invariant, varying = split_invariant(body.equations, [*body.carry_in, *body.slice_vars])
    out += invariant
    ahead = {v for e in invariant for v in e.outvars}
    copies: list[Any] = []

    def made_inside(results: Sequence[Var]) -> tuple[Var, ...]:
        return tuple(writer.write(jnp.copy, [v], scope, copies)[0] if v in ahead else v for v in results)

    carry_out, ys = made_inside(body.carry_out), made_inside(body.ys)
    carries = tuple(jex.Var(v.aval) for v in body.carry_in)
    stacks = tuple(tuple(jex.Var(y.aval) for _ in range(scan.length)) for y in ys)
    writer.record_carries(carries, init)
    writer.origin.update((v, ACTIVATION) for row in stacks for v in row)
    loop = Loop(
        spec=dataclasses.replace(spec, length=scan.length),
        body=(*varying, *copies),
        init=tuple(init),
        carry_in=tuple(body.carry_in),
        carry_out=carry_out,
        slices=tuple(slices),
        slice_vars=tuple(body.slice_vars),
        ys=ys,
        carries=carries,
        stacks=stacks,
        sources={v: writer.layout_of[v] for v in itertools.chain(init, *slices) if v in writer.layout_of},
    )
    out.append(loop)
    return [*carries, *write_stacks(writer, scan, [row[:: scan.turn] for row in stacks], scope, out)]
