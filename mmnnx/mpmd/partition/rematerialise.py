"""Which values a forward keeps for its backward, and which the backward computes again.

JAX's linearisation keeps every factor of every derivative: for `relu(x @ w)` the product's mask and its
positive part, for a norm half a dozen arrays. Most are cheap functions of a few. Between what a forward has
and what its backward reads, a minimum cut finds the fewest bytes to keep if elementwise work may be redone
(as in Wang et al. 2023, "Min-cut rematerialization" of AOTAutograd). Products, convolutions, loops and random
bits are not redone, unless rematerialisation is asked for: then everything may be, or what a policy of
`jax.checkpoint` does not save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.extend.core as jex

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import Equation, Node, Var, is_cheap, is_var
from mmnnx.mpmd.ir.origin import Kind
from mmnnx.mpmd.ir.placement import Location, Placement, Reason
from mmnnx.mpmd.ir.timetable import Remat
from mmnnx.mpmd.partition.fewest_bytes import computed_again


def rematerialise(
    nodes: Sequence[Node], placement: Placement, remat: Mapping[int, Remat]
) -> tuple[list[Node], Placement]:
    """Has each backward repeat equations of the forward of its position where that keeps fewer bytes.

    Args:
      nodes: the nodes of a function or of a loop body, in order.
      placement: where they are.
      remat: for positions by number, what may be repeated beside the cheap.

    Returns:
      The nodes with the repeated equations added, once each, and their placement.
    """
    maker = {v: n for n in nodes for v in n.outvars}
    repeated = _selected(nodes, placement, remat, maker)
    return _with_repeats(nodes, placement, repeated, maker) if repeated else (list(nodes), placement)


def _selected(
    nodes: Sequence[Node], placement: Placement, remat: Mapping[int, Remat], maker: Mapping[Var, Node]
) -> dict[Location, set[Equation]]:
    """For locations with a backward, the equations of the forward that it repeats."""
    repeated: dict[Location, set[Equation]] = {}
    for location, (forward, values) in _residuals(nodes, placement, maker).items():
        may_repeat = _allowed(remat.get(location.position) if location.position is not None else None)
        if found := _between(forward, values, maker, placement, may_repeat):
            repeated[location] = found
    return repeated


def _with_repeats(
    nodes: Sequence[Node],
    placement: Placement,
    repeated: Mapping[Location, set[Equation]],
    maker: Mapping[Var, Node],
) -> tuple[list[Node], Placement]:
    """The nodes, with each repeated equation ahead of the first backward equation that needs it."""
    out: list[Node] = []
    placed = dataclasses.replace(
        placement,
        locations=dict(placement.locations),
        phases=dict(placement.phases),
        reasons=dict(placement.reasons),
        where=dict(placement.where),
    )
    index = {n: i for i, n in enumerate(nodes)}
    again: dict[tuple[Var, Location], Var] = {}  # what the backward of a location reads instead of a value

    def add(node: Equation, outvars: Sequence[Var], location: Location) -> None:
        invars = [again.get((a, location), a) if is_var(a) else a for a in node.invars]
        copy = Equation(node.eqn.replace(invars=invars, outvars=list(outvars)), node.scope)
        placed.put(copy, location, "backward", Reason.COMPUTED_AGAIN)
        placed.where.update((new, placement.where[old]) for new, old in zip(outvars, node.outvars))
        out.append(copy)

    def missing(node: Node, location: Location) -> list[Equation]:
        """What an equation needs of the repeated ones, and is not there yet; in order."""
        found: set[Equation] = set()
        pending = [node]
        while pending:
            for a in filter(is_var, pending.pop().invars):
                before = maker.get(a)
                known = before in found or (a, location) in again
                if isinstance(before, Equation) and before in repeated[location] and not known:
                    found.add(before)
                    pending.append(before)
        return sorted(found, key=index.__getitem__)

    for node in nodes:
        location = placement.locations.get(node)
        backward = location in repeated and placement.phases[node] == "backward"
        if not isinstance(node, Equation) or location is None or not backward:
            out.append(node)
            continue
        for before in missing(node, location):
            fresh = [jex.Var(v.aval) for v in before.outvars]
            add(before, fresh, location)
            again.update({(v, location): f for v, f in zip(before.outvars, fresh)})
        if any((a, location) in again for a in node.invars if is_var(a)):
            add(node, node.outvars, location)
        else:
            out.append(node)
    return out, placed


def _residuals(
    nodes: Sequence[Node], placement: Placement, maker: Mapping[Var, Node]
) -> dict[Location, tuple[set[Equation], list[Var]]]:
    """For each location with a backward: the equations of its forward, and which of their values
    (read or made) the backward reads."""
    forward: dict[Location, set[Equation]] = {}
    read: dict[Location, set[Var]] = {}
    needed: dict[Location, dict[Var, None]] = {}
    for node in nodes:
        location = placement.locations.get(node)
        if location is None or location.position is None:
            continue
        if placement.phases[node] == "forward" and isinstance(node, Equation):
            forward.setdefault(location, set()).add(node)
            activations = (a for a in node.invars if is_var(a) and placement.where[a].kind is Kind.ACTIVATION)
            read.setdefault(location, set()).update(activations)
        elif placement.phases[node] == "backward":
            for a in node.invars:
                if is_var(a) and (maker.get(a) in forward.get(location, ()) or a in read.get(location, ())):
                    needed.setdefault(location, {})[a] = None
    return {location: (forward[location], list(values)) for location, values in needed.items()}


def _allowed(remat: Remat) -> Callable[[Node], bool]:
    """Which equations may be repeated."""
    if remat is None or remat is False:
        return _cheap

    def allowed(node: Node) -> bool:
        if not isinstance(node, Equation) or node.eqn.effects:
            return False
        if remat is True:
            return True
        avals = [a.aval for a in node.invars]
        return not _compat.is_saved(remat(node.eqn.primitive, *avals, **node.eqn.params))

    return allowed


def _between(
    forward: set[Equation],
    needed: Sequence[Var],
    maker: Mapping[Var, Node],
    placement: Placement,
    may_repeat: Callable[[Node], bool],
) -> set[Equation]:
    """The equations to repeat: between what is at hand and what the backward reads."""

    def made_of(v: Var) -> list[Var] | None:
        node = maker.get(v)
        if node not in forward or not may_repeat(node):
            return None
        return [a for a in node.invars if is_var(a) and placement.where[a].kind is Kind.ACTIVATION]

    makers = (maker[v] for v in computed_again(needed, made_of))
    return {node for node in makers if isinstance(node, Equation)}


def _cheap(node: Node) -> bool:
    return isinstance(node, Equation) and is_cheap(node)
