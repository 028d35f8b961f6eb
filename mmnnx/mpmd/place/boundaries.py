"""Equations that nothing ties down go where the fewest bytes cross: a minimum cut at each boundary.

The flow is a row of positions, numbered downstream: that of the forward from its first mesh on, that of the
backward from its last. An equation starts out as far upstream as it can be, and may move downstream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Equation, Node, Var, is_var, nbytes
from mmnnx.mpmd.ir.placement import Location, Reason
from mmnnx.mpmd.place.classify import Role
from mmnnx.mpmd.place.min_cut import sink_side
from mmnnx.mpmd.place.region import Region


@dataclasses.dataclass(frozen=True)
class Flow:
    """Equations that values flow through.

    Attributes:
      at: the position of each equation, in the order of the function.
      tied: those that stay.
      wanted: for an equation whose result is to be combined with state, the position of that.
      times: how often other values cross for each time that such a result does.
      meshes: of the positions. The flow may come to one again.
      maker, users: of each value, in this flow or elsewhere.
      once: whether positions are found once, as in the forward. In the backward they are found until none
        changes: an equation that went to where its reader has another operand would go back the next time.
      by_mesh: whether a value costs nothing where it is read on the mesh that made it, though the flow was
        elsewhere in between.
    """

    at: Mapping[Node, int]
    tied: Collection[Node]
    wanted: Mapping[Node, int]
    times: int
    meshes: Sequence[Mesh]
    maker: Mapping[Var, Node]
    users: Mapping[Var, Sequence[Node]]
    once: bool
    by_mesh: bool


def min_cut_positions(flow: Flow) -> dict[Node, int]:
    """The position of each equation, where it was or further downstream.

    For each boundary: of all ways to divide the movable equations between its two sides, with no value
    flowing upstream, the one in which the values that cross have the fewest bytes.
    """
    limit = _limits(flow)
    new = dict(flow.at)
    for boundary in range(max(limit.values(), default=0)):
        movable = [e for e, p in flow.at.items() if e not in flow.tied and p <= boundary < limit.get(e, -1)]
        if movable:
            for e in _beyond(flow, limit, movable, new, boundary):
                new[e] = max(new[e], boundary + 1)
    for e in flow.at:
        if e not in flow.tied:
            made = [a for a in e.invars if is_var(a) and flow.maker.get(a) in new]
            last = max((new[flow.maker[a]] for a in made), default=new[e])
            new[e] = max(new[e], last) if e in limit else _with_another_reader(flow, made, last)
    return new


def _with_another_reader(flow: Flow, values: Sequence[Var], first: int) -> int:
    """For what is read by nobody in this flow: where it is made of, or, in the backward, where the first
    other equation is that has to read that. The gradient of a bias is summed with that of its kernel."""
    readers = (u for v in values for u in flow.users.get(v, ()) if u in flow.tied and u in flow.at)
    ahead = [p for u in readers if (p := flow.at[u]) >= first]
    return first if flow.once else min(ahead, default=first)


def _limits(flow: Flow) -> dict[Node, int]:
    """How far an equation can move: to where its results are needed. Absent where none is further on."""
    limit: dict[Node, int] = {}
    for e in reversed(list(flow.at)):
        bounds = [flow.wanted[e]] if e in flow.wanted else []
        for u in (u for v in e.outvars for u in flow.users.get(v, ()) if u in flow.at):
            if u in flow.tied or u in limit:
                bounds.append(flow.at[u] if u in flow.tied else limit[u])
            elif flow.once and flow.at[u] > flow.at[e]:
                bounds.append(flow.at[u])  # where another operand of it is made
        if bounds:
            limit[e] = min(bounds)
    return limit


def _beyond(
    flow: Flow, limit: Mapping[Node, int], movable: Sequence[Node], new: Mapping[Node, int], boundary: int
) -> list[Node]:
    """The movable equations that belong beyond a boundary; `new` is where those before it left them."""
    at = flow.at
    number = {e: i + 2 for i, e in enumerate(movable)}
    edges: list[tuple[int, int, int]] = []
    count = len(movable) + 2
    values = [a for e in movable for a in (*e.invars, *e.outvars) if is_var(a)]
    for v in dict.fromkeys(values):
        maker, users = flow.maker.get(v), flow.users.get(v, ())
        if maker is None or maker not in at or (maker not in number and at[maker] > boundary):
            continue
        count += 1
        value = count - 1
        # What was made on the mesh that comes next, when the flow was there before, is there already.
        there = maker not in number and flow.meshes[new[maker]] == flow.meshes[boundary + 1]
        edges.append((number.get(maker, 0), value, 0 if there else nbytes(v)))
        for u in users:
            if u in number:
                edges.append((value, number[u], -1))
                if maker in number:
                    edges.append((number[u], number[maker], -1))
            elif u in at and at[u] > boundary and (flow.once or u in flow.tied or u in limit):
                back = flow.by_mesh and _comes_to(flow, limit, u, flow.meshes[new[maker]])
                edges += [] if back else [(value, 1, -1)]
        if new[maker] < boundary:
            # It is sent to the near side only if an equation that reads it stays there. Where that makes
            # no difference it goes straight to the far side: branches do not wait for each other.
            near = [number[u] for u in users if u in number and new[u] > new[maker]]
            if len(near) == sum(new[maker] < new.get(u, -1) <= boundary for u in users):
                count += 1
                edges += [*((u, count - 1, -1) for u in near), (count - 1, 1, nbytes(v) + 1)]
        if maker in number and flow.wanted.get(maker, -1) > boundary:
            edges.append((number[maker], 1, max(1, nbytes(v) // flow.times)))
    beyond = sink_side(count, edges)
    return [e for e in movable if number[e] in beyond]


def _comes_back(flow: Flow) -> bool:
    """Whether a value may be read where it was made, when the flow comes there again."""
    limit = _limits(flow)
    return any(
        flow.at[u] > p and _comes_to(flow, limit, u, flow.meshes[p])
        for e, p in flow.at.items()
        for v in e.outvars
        for u in flow.users.get(v, ())
        if u in flow.at
    )


def _comes_to(flow: Flow, limit: Mapping[Node, int], u: Node, mesh: Mesh) -> bool:
    """Whether an equation is on a mesh, or can move there."""
    last = flow.at[u] if u in flow.tied else limit.get(u, flow.at[u])
    return mesh in flow.meshes[flow.at[u] : last + 1]


def move_across_boundaries(region: Region, equations: Sequence[Equation]) -> bool:
    """Moves equations that nothing ties down across the boundaries between positions, downstream.

    Returns:
      Whether any equation moved.
    """
    flow = {
        e: p for e in equations if e in region.locations and (p := region.locations[e].position) is not None
    }
    if not flow or len(region.positions) < 2:
        return False
    last = len(region.positions) - 1
    backward = region.roles.of[equations[0]] is Role.BACKWARD  # as all of them

    def coordinate(position: int) -> int:
        return last - position if backward else position

    at: dict[Node, int] = {e: coordinate(p) for e, p in flow.items()}
    wanted: dict[Node, int] = {}
    for e in flow:
        for state in (region.out.follows[v] for v in e.outvars if v in region.out.follows):
            position = region.last_position(region.where[state].mesh, flow[e])
            if position is not None and coordinate(position) >= at[e]:
                wanted[e] = coordinate(position)
    # A gradient is summed where it is made and sent home once, not in every microbatch.
    times = region.microbatches if backward else 1
    meshes = [region.positions[coordinate(n)].mesh for n in range(len(region.positions))]
    once = not backward
    values = region.maker, region.users
    whole = Flow(at, region.tied, wanted, times, meshes, *values, once, region.by_mesh)
    new = min_cut_positions(whole)
    if not region.comes_back and len(set(meshes)) < len(meshes):
        region.comes_back = _comes_back(whole)
    for e in flow:
        if e not in region.tied:
            position = coordinate(new[e])
            moved = new[e] != at[e]
            reason = Reason.FEWEST_BYTES if moved else region.out.reasons[e]
            here = Location(region.positions[position].mesh, position)
            region.put(e, here, region.out.phases[e], reason)
    return new != at
