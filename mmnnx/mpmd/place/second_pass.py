"""A second pass, over weights that the step has renewed: the second of two epochs, a loss after the update.

What comes after a first backward is placed equation by equation, as an optimizer is. A second pass has a flow
of its own, though: it is placed as a function whose state are the new values, where they were made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mmnnx.mpmd.ir.equations import Equation, Node, Var, captured_by, is_var
from mmnnx.mpmd.ir.origin import at_home
from mmnnx.mpmd.ir.placement import Location, Placement
from mmnnx.mpmd.place.classify import Role
from mmnnx.mpmd.place.region import Problem, Region


def second_pass(region: Region) -> Problem | None:
    """The problem of placing a second pass and what depends on it; None if there is no such pass."""
    weights = set(region.renewed)  # new values of state, and what is made of them alone
    nodes: list[Node] = []
    after: set[Var] = set()
    for n in region.nodes:
        read = set(filter(is_var, n.invars))
        if not after.isdisjoint(read):
            nodes.append(n)
            after.update(n.outvars)
        elif isinstance(n, Equation) and region.roles.of[n] is Role.UPDATE and not weights.isdisjoint(read):
            others = [a for a in read - weights if a.aval.shape]
            if all(map(region.is_weight, others)):
                weights.update(n.outvars)
            elif weights.isdisjoint(n.outvars) and any(a not in region.out.follows for a in others):
                nodes.append(n)
                after.update(n.outvars)
    if not nodes:
        return None
    follows = {v: state for v, state in region.problem.follows.items() if v in after}
    given = captured_by(nodes, (), list(follows.values()))
    return dataclasses.replace(
        region.problem,
        nodes=nodes,
        inputs={v: at_home(region.where[v].home) if v in weights else region.where[v] for v in given},
        follows=follows,
        tasks=region.tasks,
        roots={v: region.roots[v] for v in given if v in region.roots},
        batch=[v for v in given if v in region.of_batch],
    )


def with_second_pass(first: Placement, nodes: Sequence[Node], second: Placement) -> Placement:
    """The first placement, with some nodes where the second has them.

    They get no position: positions are those of the first flow.
    """
    both = first.copy()
    for n in nodes:
        both.locations.pop(n, None)
        if (location := second.locations.get(n)) is not None:
            phase = "backward" if second.phases[n] == "backward" else "none"
            both.put(n, Location(location.mesh), phase, second.reasons[n])
        both.where.update((v, second.where[v]) for v in n.outvars)
    both.bodies.update(second.bodies)
    both.follows.update(second.follows)
    return both
