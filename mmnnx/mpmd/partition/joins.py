"""Where branches of a graph meet: what a stage does with results of a stage that it does not wait for.

Two encoders side by side are read by one decoder. Their sum may be made on the mesh of the second, where it
is sent on from; but the second is no stage behind the first. Such work is cut off the end of the stage, and
runs when what it joins is there.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from mmnnx.mpmd.ir.equations import PRODUCTS, Equation, Loop, Node, Var, is_var
from mmnnx.mpmd.ir.origin import Kind
from mmnnx.mpmd.ir.placement import Placement


def set_joins_apart(loop: Loop, placement: Placement) -> Placement:
    """Gives equations of a loop's body that join branches the phase "none".

    Work, here, is what depends on the microbatch and is a product or reads state. An equation of the forward
    (or backward) of a stage joins branches if it depends on another stage on which no work of that forward
    (or backward) depends.

    Args:
      loop: the loop.
      placement: of its body.
    """
    # What each value depends on: a bit for the microbatch, and for each position and phase.
    behind: dict[Var, int] = dict.fromkeys(loop.slice_vars, 1)
    waits: dict[Node, int] = {}
    base: defaultdict[int, int] = defaultdict(int)  # the same, for the work proper of a position and phase
    group: dict[Node, int] = {}
    for node in loop.body:
        needed = 0
        for a in filter(is_var, node.invars):
            needed |= behind.get(a, 0)
        location = placement.locations.get(node)
        if location is not None and location.position is not None:
            group[node] = 2 << 2 * location.position + (placement.phases[node] != "forward")
            waits[node] = needed
            if needed and _is_work(node, placement):
                base[group[node]] |= needed | group[node]
            needed |= group[node] if needed else 0
        behind.update(dict.fromkeys(node.outvars, needed))
    joins = [n for n, g in group.items() if g in base and waits[n] & ~base[g]]
    return dataclasses.replace(placement, phases=placement.phases | dict.fromkeys(joins, "none"))


def _is_work(node: Node, placement: Placement) -> bool:
    if not isinstance(node, Equation) or node.name in PRODUCTS:
        return True
    return any(placement.where[a].kind is Kind.STATE for a in node.invars if is_var(a))
