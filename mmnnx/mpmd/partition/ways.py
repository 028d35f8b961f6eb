"""In which way each loop of a function runs: its schedule, and how many microbatches share a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from mmnnx.mpmd.ir.equations import Loop, Node, While
from mmnnx.mpmd.ir.placement import Placed, Placement
from mmnnx.mpmd.partition.timetable import ways_to_run
from mmnnx.mpmd.schedule.choose import Way


def ways_of_loops(nodes: Sequence[Node], placement: Placement) -> dict[Loop, Iterator[Way]]:
    """The ways in which each microbatch loop may run, the fastest first; those in whiles too.

    Raises:
      ValueError: as `timetable.ways_to_run`.
    """
    found: dict[Loop, Iterator[Way]] = {}
    for node in nodes:
        if isinstance(node, Loop):
            found[node] = ways_to_run(node, placement.bodies[node])
        elif isinstance(node, While):
            found |= ways_of_loops(node.body, placement.bodies[node])
    return found


def choices(found: Mapping[Loop, Iterator[Way]]) -> Iterator[dict[Loop, Way]]:
    """The first way of each loop, then the second, and so on; a loop that has no other keeps its last."""
    yield (chosen := {loop: next(ways) for loop, ways in found.items()})
    while more := {loop: way for loop, ways in found.items() if (way := next(ways, None)) is not None}:
        yield (chosen := chosen | more)


def decide(placed: Placed, chosen: Mapping[Loop, Way]) -> Placed:
    """A function whose loops ask for the ways that were chosen for them."""
    nodes, placement = _decided(placed.nodes, placed.placement, chosen)
    return dataclasses.replace(placed, nodes=nodes, placement=placement)


def _decided(
    nodes: Sequence[Node], placement: Placement, chosen: Mapping[Loop, Way]
) -> tuple[list[Node], Placement]:
    bodies: dict[Node, Placement] = {}
    new: list[Node] = []
    for node in nodes:
        if isinstance(node, Loop):
            new.append(dataclasses.replace(node, spec=chosen[node].asked_of(node.spec)))
            bodies[new[-1]] = placement.bodies[node]
        elif isinstance(node, While):
            body, inside = _decided(node.body, placement.bodies[node], chosen)
            new.append(dataclasses.replace(node, body=tuple(body)))
            bodies[new[-1]] = inside
        else:
            new.append(node)
    return new, dataclasses.replace(placement, bodies=bodies)
