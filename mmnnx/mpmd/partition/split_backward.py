"""A backward in two parts: what other stages wait for, and what nobody waits for.

Zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241) run the second part, the gradients of weights, when
a mesh would otherwise idle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence

from mmnnx._compat import subjaxprs
from mmnnx.mpmd.ir.equations import Equation, Node, Var, is_var
from mmnnx.mpmd.ir.placement import Location, Placement


def split_backward(
    nodes: Sequence[Node], placement: Placement, positions: Container[int | None]
) -> Placement:
    """Divides the backward phase of some positions into "backward-input" and "backward-weight".

    An equation is of the input part if another stage waits for what becomes of it, or if several gradients
    are made of it: it is part of the chain from layer to layer. Otherwise it leads to one gradient alone and
    is of the weight part. So is a shard_map each of whose results leads to one gradient. No equation is in
    both.

    Args:
      nodes: the nodes of a function or of a loop body, in order.
      placement: where they are.
      positions: the numbers of those whose backward is divided.
    """
    phases = dict(placement.phases)
    backward = {n: s for n, s in placement.locations.items() if placement.phases[n] == "backward"}
    joins = {
        n for n, s in placement.locations.items() if placement.phases[n] == "none" and s.position is not None
    }
    made_at = {v: backward.get(n) for n in nodes for v in n.outvars}
    # For each value: the gradients that are made of it; None stands for what another stage waits for.
    ends: dict[Var, set[Var | None]] = {}
    for node in reversed(nodes):
        location = backward.get(node)
        of_results = [ends.get(v, {v}) for v in node.outvars]
        reached: set[Var | None] = set().union(*of_results)
        if location is not None and location.position in positions:
            several = of_results if isinstance(node, Equation) and node.name == "shard_map" else [reached]
            chained = any(None in found or len(found) > 1 for found in several)
            phases[node] = "backward-input" if chained else "backward-weight"
        for a in filter(is_var, node.invars):
            becomes: set[Var | None] = {None}
            if location is None and node not in joins:
                becomes = {a}
            elif location is not None and made_at.get(a) == location:
                becomes = reached
            ends.setdefault(a, set()).update(becomes)
    _add_up_what_is_there(nodes, phases, made_at)
    return dataclasses.replace(placement, phases=phases)


def _add_up_what_is_there(
    nodes: Sequence[Node], phases: dict[Node, str], made_at: Mapping[Var, Location | None]
) -> None:
    """Puts into the input part what is done, entry by entry, to gradients that the input part makes whole."""
    whole: set[Var] = set()
    for node in nodes:
        if phases.get(node) == "backward-input" and isinstance(node, Equation) and subjaxprs(node.eqn):
            whole.update(node.outvars)
        elif phases.get(node) == "backward-weight" and isinstance(node, Equation) and node.outvars:
            read = [a for a in node.invars if is_var(a) and made_at.get(a) == made_at[node.outvars[0]]]
            sizes = {a.aval.size for a in (*read, *node.outvars)}
            if read and whole.issuperset(read) and len(sizes) == 1:
                phases[node] = "backward-input"
                whole.update(node.outvars)
