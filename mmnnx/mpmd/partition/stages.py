"""The stages of a microbatch loop, as its schedule sees them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import Mesh

from mmnnx.mpmd.ir.dataflow import running_sums
from mmnnx.mpmd.ir.equations import Loop, is_var
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.ir.timetable import Phase
from mmnnx.mpmd.schedule import (
    Stages,
)


def find_stages(loop: Loop, placement: Placement) -> tuple[tuple[int, ...], Stages]:
    """The positions that are stages, in order, and what each reads.

    A task whose slice depends on the microbatch is no stage: it runs where and when others need it.
    """
    reads: dict[int, set[int]] = {}
    made: dict[Any, set[int]] = {}  # by which positions
    for node in loop.body:
        location = placement.locations.get(node)
        makers = set().union(*(made.get(a, ()) for a in node.invars if is_var(a)))
        if location is not None and location.position is not None and placement.phases[node] == "forward":
            reads.setdefault(location.position, set()).update(makers)
            makers = {location.position}
        made.update(dict.fromkeys(node.outvars, makers))
    for p in sorted(reads):
        reads[p].discard(p)
        for before in [b for b in reads[p] if _moves(placement, b)]:
            reads[p] |= reads[before]
    positions = tuple(p for p in sorted(reads) if not _moves(placement, p))
    number = {p: n for n, p in enumerate(positions)}
    meshes: dict[Mesh, int] = {}
    for p in positions:
        meshes.setdefault(placement.positions[p].mesh, len(meshes))
    return positions, Stages(
        tuple(meshes[placement.positions[p].mesh] for p in positions),
        tuple(tuple(sorted(number[b] for b in reads[p] if b in number and b < p)) for p in positions),
        tuple(dict.fromkeys(_carried(loop, placement, number))),
        tuple((task.name if (task := placement.positions[p].task) else None) or "" for p in positions),
    )


def _carried(
    loop: Loop, placement: Placement, number: Mapping[int, int]
) -> Iterator[tuple[tuple[int, Phase], tuple[int, Phase]]]:
    """`Stages.carried` of a loop. Sums are left out, for microbatches add to them in any order."""
    enters = {
        v: frozenset([v]) for v in loop.carry_in
    }  # the carries that a value outside the flow is made of
    makers: dict[Any, frozenset[tuple[int, Phase]]] = {}
    readers: dict[Any, set[tuple[int, Phase]]] = {v: set() for v in loop.carry_in}
    for node in loop.body:
        atoms = [a for a in node.invars if is_var(a)]
        carries = frozenset().union(*(enters.get(a, ()) for a in atoms))
        made_by = frozenset().union(*(makers.get(a, ()) for a in atoms))
        location = placement.locations.get(node)
        if location is not None and location.position is not None and location.position in number:
            phase: Phase = "backward" if placement.phases[node].startswith("backward") else "forward"
            action = number[location.position], phase
            for v in carries:
                readers[v].add(action)
            carries, made_by = frozenset(), frozenset([action])
        enters |= dict.fromkeys(node.outvars, carries)
        makers |= dict.fromkeys(node.outvars, made_by)
    sums = running_sums(loop)
    for v, out in zip(loop.carry_in, loop.carry_out):
        for maker, reader in itertools.product(sorted(makers.get(out, ())), sorted(readers[v])):
            if v not in sums and maker != reader:
                yield maker, reader


def _moves(placement: Placement, position: int) -> bool:
    task = placement.positions[position].task
    return task is not None and task.loop_dependent_mesh_slice is not None
