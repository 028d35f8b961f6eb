"""Forward equations: tied to a mesh by their task or by state they read, or with their latest operand."""

from __future__ import annotations

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Equation, Node, is_var
from mmnnx.mpmd.ir.origin import Kind
from mmnnx.mpmd.ir.placement import Location, Reason
from mmnnx.mpmd.place.classify import Role
from mmnnx.mpmd.place.region import Region


def place_forward(region: Region, e: Equation) -> None:
    """Places one equation after those that it reads."""
    if region.stays(e):
        return
    before = max(
        (s.position for s in region.made_by(e, (Role.FORWARD,)) if s.position is not None), default=-1
    )
    scoped, homes, renewed = region.task_of(e.scope), region.state_homes(e), region.renewed_homes(e)
    homes = homes or renewed
    moves = False
    reason = Reason.READS_STATE if homes else Reason.FOLLOWS_OPERANDS
    if scoped is not None:
        task, mesh = scoped
        position = region.position(mesh, task, before)
        reason = Reason.IN_TASK
    elif homes:
        mesh = max(homes, key=homes.__getitem__)
        ahead = any(p.mesh == mesh for p in region.positions[max(before, 0) :])
        flow = [a for a in e.invars if a.aval.shape and region.origin_of(a).kind is Kind.ACTIVATION]
        roots = region.roots_of(e)
        here = region.positions[before].mesh if flow and before >= 0 else None
        again = here is not None and not ahead and bool(renewed or roots & region.used_state)
        if here is not None:
            for root in roots:
                region.read_from.setdefault(root, set()).add(here)
        moves = here is not None and not roots.isdisjoint(region.moving) and region.combines_state(e)
        if moves:
            position, reason = before, Reason.STATE_IS_SENT
        elif (again and not region.returning) or (here not in (None, mesh) and roots & region.shared):
            # Shared state used again further on: it is sent there, rather than the flow sent back. (A
            # scalar is sent back: such as the norm of all weights, which scales each of them.)
            region.sent |= roots or {a for a in e.invars if is_var(a) and a in region.renewed}
            position = before
            reason = Reason.STATE_IS_SENT
        else:
            position = region.position_of_state(e, mesh, before)
    else:
        position = max(before, 0)
    if scoped is not None or homes:
        if not moves:
            region.tied.add(e)
        region.used_state |= region.roots_of(e)
    region.put(e, Location(region.positions[position].mesh, position), region.forward_phase, reason)
    if e in region.roles.after_inner:
        region.note_renewed(e)


def bring_home(region: Region) -> None:
    """Has new values of state made at its home, where most bytes of what they are made of are: a cache
    whose rows are chosen by what the last mesh says, say."""
    home: dict[Node, Mesh] = {}
    for e in reversed(region.forward):
        users = [u for v in e.outvars for u in region.users.get(v, ())]
        homes = {region.where[region.out.follows[v]].mesh for v in e.outvars if v in region.out.follows}
        homes |= {home[u] for u in users if u in home}
        if len(homes) == 1 and all(u in home for u in users):
            (home[e],) = homes
    for e in region.forward:
        if (
            e in home
            and e not in region.tied
            and e in region.locations
            and region.locations[e].mesh != home[e]
        ):
            held = region.at_hand(e)
            if home[e] == max(held, key=held.__getitem__, default=None):
                region.put(e, Location(home[e]), "none", Reason.NEW_STATE)
