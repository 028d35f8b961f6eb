"""What comes after a backward or a loop, such as an optimizer: at the state that it updates."""

from __future__ import annotations

from mmnnx.mpmd.ir.equations import Equation, is_cheap, is_var
from mmnnx.mpmd.ir.origin import FREE, Kind
from mmnnx.mpmd.ir.placement import Location, Reason, by_rank
from mmnnx.mpmd.place.classify import Role
from mmnnx.mpmd.place.region import Region


def place_update(region: Region, e: Equation) -> None:
    """Places one equation."""
    if region.stays(e):
        return
    kinds = {region.origin_of(a).kind for a in e.invars}
    if e in region.replicated and Kind.FREE in kinds and Kind.STATE not in kinds:
        region.where.update(dict.fromkeys(e.outvars, FREE))
        return
    scoped, weight = region.task_of(e.scope), region.state_homes(e)
    arriving = region.made_by(e, (Role.FORWARD, Role.BACKWARD, Role.UPDATE))
    arrays = {region.origin_of(a).kind for a in e.invars if a.aval.shape}
    # A scalar of state that scales a gradient is sent to it.
    if scoped is None and (not weight or (Kind.ACTIVATION in arrays and Kind.STATE not in arrays)):
        weight = region.at_hand(e)
        # Sums of a gradient are done at the home of its parameter, if a part of it is there, and scalings
        # after the loop in any case: there may be several of one gradient, as in Adam.
        home = region.followed_home(e)
        alone = not region.in_loop and len([a for a in e.invars if a.aval.shape]) == 1
        if home is not None and (home in weight or alone):
            weight = {home: 0}
        else:
            weight = region.renewed_homes(e) or weight
    mesh = scoped[1] if scoped is not None else max(weight, key=weight.__getitem__)
    # In a loop, sums of gradients and the like join the fragment that made what they sum.
    joined = [s for s in arriving if s.mesh == mesh and s.position is not None] if region.in_loop else []
    if joined:
        region.put(e, min(joined, key=by_rank), "backward", Reason.ADDS_TO_SUM)
    else:
        reason = Reason.IN_TASK if scoped is not None else Reason.UPDATE
        region.put(e, Location(mesh), "none", reason)
    region.note_renewed(e)


def replicated_updates(region: Region) -> set[Equation]:
    """The equations that make scalars of which every mesh gets a copy, such as counters that go on where
    gradients are finite. Each mesh may make those itself, of what it is sent anyway."""
    wanted, found = set(region.problem.replicated), set()
    for e in reversed(region.roles.all(Role.UPDATE)):
        scalars = all(a.aval.shape == () for a in (*e.invars, *e.outvars))
        cheap = scalars and is_cheap(e)
        read = not wanted.isdisjoint(e.outvars) and region.problem.on_one_mesh.isdisjoint(e.outvars)
        if cheap and read and region.task_of(e.scope) is None:
            found.add(e)
            wanted.update(filter(is_var, e.invars))
    return found
