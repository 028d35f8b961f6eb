"""Sums over a data axis that are taken once, after the microbatch loop.

The gradient of a weight is a product over the examples of a microbatch. Where these are sharded over a mesh
axis, XLA adds up what the devices make, in every microbatch. Here the product is divided into as many parts
as the axis has devices, each over the examples of one: the accumulator holds a part for each device, and the
parts are added up after the loop. With a gradient f32[4,8] of 6 examples that are sharded over 2 devices:

    before, in the loop:    sum f32[4,8] += dot_general x f32[6,4] dy f32[6,8], and XLA reduces over devices
    now, in the loop:       parts f32[2,4,8] += dot_general x f32[2,3,4] dy f32[2,3,8], batched over devices
    after the loop:         sum f32[4,8] = reduce_sum parts, over its first dimension

A sum that a scan in the loop carries is divided likewise, from the zeros that it starts from.

It is the same sum in another order, whatever is sharded how: what `mmnnx.mpmd.hoist.sharding_propagation`
finds decides about speed alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from mmnnx.mpmd.hoist.contractions import CannotHoist
from mmnnx.mpmd.hoist.partial_sums import Groups, PartialSums, adds_to
from mmnnx.mpmd.hoist.sharding_propagation import Axes, Known, follow, of_spec
from mmnnx.mpmd.ir.dataflow import is_zero
from mmnnx.mpmd.ir.equations import Atom, Equation, Loop, Node, Var
from mmnnx.mpmd.ir.origin import CONST, Kind, Origin
from mmnnx.mpmd.ir.placement import Location, Placed, Placement, Reason
from mmnnx.mpmd.ir.rewrite import trace_equations
from mmnnx.mpmd.ir.shardings import same_shape


def hoist_reductions(placed: Placed, given: Mapping[Var, NamedSharding | None]) -> Placed:
    """Divides the accumulators of loops whose terms are sums over sharded examples.

    Args:
      placed: the function.
      given: the shardings of its inputs.

    Returns:
      The function, with loops replaced that hold such accumulators.
    """
    nodes: list[Node] = []
    maker = {v: node for node in placed.nodes if isinstance(node, Equation) for v in node.outvars}
    for node in placed.nodes:
        if isinstance(node, Loop) and node.spec.length > 1:
            zeros = {a for a in node.init if is_zero(a, maker)}
            nodes += _hoisted(node, placed.placement, given, zeros)
        else:
            nodes.append(node)
    return Placed(placed.flat, nodes, placed.placement)


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A carry whose accumulator will hold a part for each device.

    Attributes:
      last: the equation that adds to it.
      term: what that adds.
      groups: of the parts.
    """

    last: Equation
    term: Var
    groups: Groups


@dataclasses.dataclass(frozen=True)
class _Accumulator:
    """What takes the place of a carry: before the loop, in it, and after it."""

    start: Var
    enters: Var
    leaves: Var
    parts: Var


def _hoisted(
    loop: Loop, placement: Placement, given: Mapping[Var, NamedSharding | None], zeros: Collection[Atom]
) -> list[Node]:
    """A loop with what comes before and after it; `zeros` are its inputs that are all zeros."""
    body = placement.bodies[loop]
    meshes = dict.fromkeys(location.mesh for location in body.locations.values())
    if all(mesh.size == 1 for mesh in meshes):
        return [loop]
    names = {mesh: _names(mesh, meshes) for mesh in meshes}
    known = _slices(loop, given)
    follow((e.eqn for e in loop.body), known)
    partial = PartialSums(loop.body, [*loop.carry_out, *loop.ys], known)
    sums, reasons = _sums(loop, body, partial, names)
    lasts = {found.last for found in sums.values()}
    before: list[Node] = []
    after: list[Node] = []
    inside: list[Equation] = []
    for e in loop.body:
        if e not in lasts:
            rewritten = partial.rewritten(e)
            inside += rewritten
            if rewritten != [e]:
                body.put_like(rewritten, e)
    accumulators: dict[int, _Accumulator] = {}
    axes: dict[Var, tuple[Axes, ...]] = {}
    for n, found in sums.items():
        start = None if loop.init[n] in zeros else loop.init[n]
        made = _accumulator(found, loop.carry_in[n], partial.parts[found.term])
        summed = _total(found, made.accumulator.parts, start, loop.carries[n])
        _place(placement, body, loop, n, found.last, made, summed)
        before += made.zeros
        inside += made.adds
        after += summed
        accumulators[n] = made.accumulator
        own = names[body.locations[found.last].mesh]
        axes[made.accumulator.parts] = tuple(
            tuple(own[axis] for axis in group if axis in own) for group, _ in found.groups
        )

    def replaced(name: str, old: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(getattr(accumulators[n], name) if n in accumulators else v for n, v in enumerate(old))

    hoisted = dataclasses.replace(
        loop,
        body=tuple(inside),
        init=replaced("start", loop.init),
        carry_in=replaced("enters", loop.carry_in),
        carry_out=replaced("leaves", loop.carry_out),
        carries=replaced("parts", loop.carries),
        parts=axes,
        not_hoisted=reasons,
    )
    placement.bodies[hoisted] = placement.bodies.pop(loop)
    return [*before, hoisted, *after]


def _sums(
    loop: Loop, body: Placement, partial: PartialSums, names: Mapping[Mesh, Mapping[Any, Any]]
) -> tuple[dict[int, _Sum], dict[Var, str]]:
    """The carries, by number, that can be kept as parts; and why others cannot that XLA may reduce."""
    sums: dict[int, _Sum] = {}
    reasons: dict[Var, str] = {}
    for n, (enters, leaves) in enumerate(zip(loop.carry_in, loop.carry_out)):
        last = partial.maker.get(leaves)
        if last is None or last not in body.locations or not adds_to(last, enters, partial.uses):
            continue
        mesh = body.locations[last].mesh
        sizes = {axis: mesh.shape[own] for axis, own in names[mesh].items()}
        term = next(a for a in last.invars if a is not enters)
        try:
            sums[n] = _Sum(last, term, partial.plan(term, sizes))
        except CannotHoist as reason:
            # A larger value, which the sum is made of, is an activation: XLA reduces it for other readers.
            small = reason.of is None or reason.of.aval.size == enters.aval.size
            if str(reason) and small and partial.is_sharded(last, sizes):
                reasons[loop.carries[n]] = str(reason)
    return sums, reasons


@dataclasses.dataclass(frozen=True)
class _Made:
    """An accumulator of parts, the zeros that it starts from, and the equations that add to it."""

    accumulator: _Accumulator
    zeros: list[Equation]
    adds: list[Equation]


def _accumulator(found: _Sum, enters: Var, term: Var) -> _Made:
    """An accumulator for the parts of a term, in place of the carry that enters."""
    counts = tuple(count for _, count in found.groups)
    aval = enters.aval.update(shape=(*counts, *enters.aval.shape))
    zeros, (start,) = trace_equations(
        lambda: jnp.copy(jnp.zeros(aval.shape, aval.dtype)), scope=found.last.scope
    )
    running = jex.Var(aval)
    adds, (leaves,) = trace_equations(
        lambda acc, x: acc + x.astype(acc.dtype), running, term, scope=found.last.scope
    )
    return _Made(_Accumulator(start, running, leaves, jex.Var(aval)), zeros, adds)


def _total(found: _Sum, parts: Var, start: Atom | None, total: Var) -> list[Equation]:
    """The equations that add up the parts after the loop, and what the sum started from."""
    lead = tuple(range(len(found.groups)))
    starts = [] if start is None else [start]
    summed, _ = trace_equations(
        lambda x, *s: sum(s, jnp.sum(x, lead, dtype=x.dtype)), parts, *starts, scope=""
    )
    return [*summed[:-1], Equation(summed[-1].eqn.replace(outvars=[total]), "")]


def _place(
    placement: Placement,
    body: Placement,
    loop: Loop,
    n: int,
    last: Equation,
    made: _Made,
    summed: Sequence[Equation],
) -> None:
    """Places what is new for carry number n: in the loop where it was added to, after it at home."""
    a, total = made.accumulator, loop.carries[n]
    for e in made.zeros:
        placement.where.update(dict.fromkeys(e.outvars, CONST))
    body.where[a.enters] = body.where[loop.carry_in[n]]
    body.put_like(made.adds, last)
    placement.where[a.parts] = placement.where[total]
    home = placement.mesh_of(total)
    if total in placement.follows:
        placement.follows[a.parts] = state = placement.follows[total]
        home = placement.where[state].home
    assert home is not None  # what is placed in the loop has a home after it
    for e in summed:
        placement.put(e, Location(home), "none", Reason.REDUCES_SUM)
        placement.where.update(dict.fromkeys(e.outvars, Origin(Kind.ACTIVATION, home)))


def _names(mesh: Mesh, meshes: Iterable[Mesh]) -> dict[Any, Any]:
    """What the axes of a mesh are called where its values come from, and here: what is sent to a mesh of the
    same shape stays sharded over the axes that stand at the same places."""
    others = (other for other in meshes if same_shape(other, mesh))
    names = {axis: own for other in others for axis, own in zip(other.axis_names, mesh.axis_names)}
    return names | {own: own for own in mesh.axis_names}


def _slices(loop: Loop, given: Mapping[Var, NamedSharding | None]) -> Known:
    """How the slices of a loop are sharded, where the argument that they are of says it."""
    known: Known = {}
    for v, row in zip(loop.slice_vars, loop.slices):
        own = given.get(loop.sources[row[0]]) if row[0] in loop.sources else None
        if own is not None:
            known[v] = tuple(axes or () for axes in of_spec(own.spec, v.aval.ndim)[: v.aval.ndim])
    return known
