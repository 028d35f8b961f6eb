"""A scan over several tasks becomes one scan for each task."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.inline.distribution import distribute
from mmnnx.mpmd.inline.scan_equation import Body, Scan, write_body
from mmnnx.mpmd.inline.writer import HoldsLoop, InLoop, Writer
from mmnnx.mpmd.ir.equations import Atom, Node, Var, is_var
from mmnnx.mpmd.ir.scans import run_scan


def write_distributed(
    writer: Writer, scan: Scan, scope: str, out: list[Node], inside: InLoop
) -> list[Atom] | None:
    """Writes a scan as one scan for each task, one after the other.

    Args:
      inside: which kind of loop its body is in.

    Returns:
      Its results in the list; None, with nothing added to `out`, if that cannot be done.
    """
    try:
        body = write_body(writer, scan, scope, inside)
    except HoldsLoop:
        return None
    columns = dict(zip(body.slice_vars, scan.xs))  # of a variable, its values in all iterations

    def available_on(v: Var) -> Sequence[Mesh]:
        return writer.available.get(columns.get(v, v), ())

    parts = distribute(body.equations, body.carry_in, body.carry_out, writer.pinned_mesh, available_on)
    if parts is None or any(e.eqn.effects for e in body.equations):
        return None
    ys = _without_copies(body)
    carries: dict[Var, Var] = {}
    for part in parts:
        own = {v for e in part.nodes for v in e.outvars}
        enters, leaves, init = (
            [vs[i] for i in part.carries] for vs in (body.carry_in, body.carry_out, scan.init)
        )
        gives = list(dict.fromkeys([*part.gives, *(y for y in ys if y in own or y in enters)]))
        reads = dict.fromkeys(a for e in part.nodes for a in e.invars if is_var(a) and a not in own)
        takes = [v for v in reads if v in columns and v not in enters]
        captured = [v for v in reads if v not in columns and v not in enters]
        eqns = [e.eqn for e in part.nodes]
        jaxpr = _compat.close_jaxpr([*captured, *enters, *takes], [*leaves, *gives], eqns)
        run = functools.partial(run_scan, jaxpr, len(captured), len(enters), scan.eqn.params)
        made = writer.write_part(run, [*captured, *init, *(columns[v] for v in takes)], part, scope, out)
        carries.update(zip(leaves, made))
        given = list(zip(gives, made[len(leaves) :]))
        columns.update(given)
        writer.record_part(given, part, parts)
    return [*(carries[v] for v in body.carry_out), *(columns[y] for y in ys)]


def _without_copies(body: Body) -> list[Var]:
    """The results that are not carries; for a copy of what another part may take, that itself.

    It would be stacked twice.
    """
    inside = {*body.carry_in, *(v for e in body.equations for v in e.outvars)}
    copied = {e.outvars[0]: e.invars[0] for e in body.equations if e.name == "copy" and is_var(e.invars[0])}
    return [copied[y] if copied.get(y) in inside else y for y in body.ys]
