"""Work that depends on no placed state: where it is done if it is done once, and callbacks."""

from __future__ import annotations

from mmnnx.mpmd.ir.equations import LAYOUT, Equation
from mmnnx.mpmd.ir.origin import Kind
from mmnnx.mpmd.ir.placement import Location, Reason, by_rank
from mmnnx.mpmd.place.region import Region


def place_free(region: Region) -> None:
    """Gives work that depends on no placed state the place where its result is read first."""
    for e in reversed(region.nodes):
        if not isinstance(e, Equation) or e in region.locations or e.name in LAYOUT or e.eqn.effects:
            continue
        if region.where[e.outvars[0]].kind is not Kind.FREE or not any(v.aval.shape for v in e.outvars):
            continue  # constants and scalars are no bytes worth sending
        found: list[Location] = []
        for u in (u for v in e.outvars for u in region.users.get(v, ())):
            if not isinstance(u, Equation):
                body = region.out.bodies[u]
                inner = [
                    body.locations[n]
                    for n in u.body
                    if n in body.locations and set(n.invars) & set(e.outvars)
                ]
                found += [Location(s.mesh) for s in sorted(inner, key=by_rank)[:1]]
            elif u in region.locations:
                found.append(region.locations[u])
        if found:
            phase = region.forward_phase if found[0].position is not None else "none"
            region.put(e, min(found, key=by_rank), phase, Reason.READ_FIRST)


def place_effects(region: Region) -> None:
    """Callbacks that depend on no placed state happen once: where the flow begins; where there is none,
    with the first work, that of loops too, or where state is."""
    locations = [
        *region.locations.values(),
        *(s for body in region.out.bodies.values() for s in body.locations.values()),
    ]
    homes = (Location(o.home) for o in region.where.values() if o.home is not None)
    first = Location(locations[0].mesh) if locations else next(homes, None)
    begin = Location(region.positions[0].mesh, 0) if region.positions else first
    for e in region.nodes:
        if isinstance(e, Equation) and e.eqn.effects and e not in region.locations and begin is not None:
            region.put(e, begin, region.forward_phase if region.positions else "none", Reason.CALLBACK)
