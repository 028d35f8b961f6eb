"""Several microbatches of a loop become one: a stage runs them in one call, and sends what they make at once.

The fewer calls and transfers, the less the host has to start. All that comes after this sees a loop of fewer
microbatches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from mmnnx.mpmd.ir.equations import Equation, Loop, Node, Var, While
from mmnnx.mpmd.ir.placement import Placed, Placement
from mmnnx.mpmd.ir.rewrite import read, rename
from mmnnx.mpmd.partition.timetable import ways_to_run
from mmnnx.mpmd.schedule.choose import Way


def ways_of_loops(nodes: Sequence[Node], placement: Placement) -> dict[Loop, list[Way]]:
    """The ways in which each microbatch loop may run, the fastest first; those in whiles too.

    Raises:
      ValueError: as `timetable.ways_to_run`.
    """
    found: dict[Loop, list[Way]] = {}
    for node in nodes:
        if isinstance(node, Loop):
            found[node] = ways_to_run(node, placement.bodies[node])
        elif isinstance(node, While):
            found |= ways_of_loops(node.body, placement.bodies[node])
    return found


def unroll(placed: Placed, chosen: Mapping[Loop, Way]) -> Placed:
    """A function whose loops run in the ways that were chosen for them.

    The body of a loop is there once for each microbatch of a call. What one leaves in the carries the next
    begins with, so that results are those of the loop as it was.
    """
    nodes, placement = _unrolled(placed.nodes, placed.placement, chosen)
    return dataclasses.replace(placed, nodes=nodes, placement=placement)


def _unrolled(
    nodes: Sequence[Node], placement: Placement, chosen: Mapping[Loop, Way]
) -> tuple[list[Node], Placement]:
    bodies: dict[Node, Placement] = {}
    new: list[Node] = []
    for node in nodes:
        if isinstance(node, Loop):
            unrolled, inside = _unrolled_loop(node, placement.bodies[node], chosen[node])
            bodies[unrolled] = inside
            new.append(unrolled)
        elif isinstance(node, While):
            body, inside = _unrolled(node.body, placement.bodies[node], chosen)
            new.append(dataclasses.replace(node, body=tuple(body)))
            bodies[new[-1]] = inside
        else:
            new.append(node)
    return new, dataclasses.replace(placement, bodies=bodies)


def _unrolled_loop(loop: Loop, placement: Placement, way: Way) -> tuple[Loop, Placement]:
    length, placement = loop.spec.length // way.per_call, placement.copy()
    schedule = None if loop.spec.rows else way.schedule
    spec = dataclasses.replace(loop.spec, schedule=schedule, length=length, per_call=way.per_call)
    body, carry = list(loop.body), loop.carry_out
    slice_vars, ys = list(loop.slice_vars), list(loop.ys)
    for _ in range(way.per_call - 1):
        fresh = [jex.Var(v.aval) for v in loop.slice_vars]
        env: dict[Var, Var] = dict(zip((*loop.carry_in, *loop.slice_vars), (*carry, *fresh)))
        body += [_copied(e, env, placement) for e in loop.body]
        for old, copy in env.items():
            placement.where.setdefault(copy, placement.where[old])
            if old in placement.follows:
                placement.follows.setdefault(copy, placement.follows[old])
        slice_vars += fresh
        ys += [read(env, y) for y in loop.ys]
        carry = tuple(read(env, v) for v in loop.carry_out)

    def of_calls(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
        """Rows over microbatches as rows over calls, one for each microbatch of a call."""
        return tuple(tuple(row[n :: way.per_call]) for n in range(way.per_call) for row in rows)

    unrolled = dataclasses.replace(
        loop,
        spec=spec,
        body=tuple(body),
        carry_out=carry,
        slices=of_calls(loop.slices),
        slice_vars=tuple(slice_vars),
        ys=tuple(ys),
        stacks=of_calls(loop.stacks),
    )
    return unrolled, placement


def _copied(e: Equation, env: dict[Var, Var], placement: Placement) -> Equation:
    copy = dataclasses.replace(e, eqn=rename(e.eqn, env))
    if e in placement.locations:
        placement.put(copy, placement.locations[e], placement.phases[e], placement.reasons[e])
    return copy
