"""Backward equations: where the activations of the forward are that they read, else with their operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Atom, Equation, Node, Var, is_var, nbytes
from mmnnx.mpmd.ir.origin import Kind
from mmnnx.mpmd.ir.placement import Location, Reason, by_rank
from mmnnx.mpmd.place.classify import Role
from mmnnx.mpmd.place.region import Region
from mmnnx.sharding.task import Task


def place_backward(region: Region, e: Equation) -> None:
    """Places one equation, downstream of those that it reads."""
    if region.stays(e):
        return
    location, reason = _where(region, e)
    if reason in (Reason.IN_TASK, Reason.READS_SAVED):
        region.tied.add(e)
    region.put(e, location, "backward", reason)
    if reason is Reason.READS_NEW_STATE:
        region.note_renewed(e)
    scoped = region.task_of(e.scope)
    if scoped is not None and location.position is not None:
        here, name = region.positions[location.position].task, scoped[0].name
        if name and here is not None and name not in (here.name or "").split("+"):
            region.out.backward_tasks[location.position] = name


def _where(region: Region, e: Equation) -> tuple[Location, Reason]:
    """Where a backward equation goes: the first rule that holds decides."""
    incoming = region.made_by(e, (Role.BACKWARD, Role.UPDATE, Role.LOOP))
    came = min((s.position for s in incoming if s.position is not None), default=None)
    if (scoped := region.task_of(e.scope)) is not None:
        return _in_task(region, e, *scoped, came), Reason.IN_TASK
    if residuals := _residuals(region, e):
        if region.in_loop and incoming and all(_is_sent_before(region, a) for a in residuals):
            return _with_fewest_bytes(region, e, residuals, incoming), Reason.READS_SAVED
        return _with_residuals(region, e, residuals, incoming, came)
    if (renewed := region.renewed_homes(e)) and None in (s.position for s in incoming):
        return Location(max(renewed, key=renewed.__getitem__)), Reason.READS_NEW_STATE
    if incoming:
        return _with_operands(region, e, incoming, came), Reason.FOLLOWS_OPERANDS
    if held := region.at_hand(e):  # what a loop made, which no flow followed
        return Location(max(held, key=held.__getitem__)), Reason.FOLLOWS_OPERANDS
    return Location(region.positions[-1].mesh, len(region.positions) - 1), Reason.READS_SAVED


def _in_task(region: Region, e: Equation, task: Task, mesh: Mesh, came: int | None) -> Location:
    """On the mesh of the task scope: where its residuals are, else at the last position that was passed."""
    held = {s for locations in _residuals(region, e).values() for s in locations if s.mesh == mesh}
    if held:
        return max(_reached(held, came), key=by_rank)
    position = region.last_position(mesh, came)
    return Location(mesh, region.position(mesh, task, 0) if position is None else position)


def _with_residuals(
    region: Region,
    e: Equation,
    residuals: Mapping[Var, set[Location]],
    incoming: Sequence[Location],
    came: int | None,
) -> tuple[Location, Reason]:
    """Where the residuals are, as far as the backward has come."""
    shared = set.intersection(*residuals.values())
    if incoming and len(shared) > 1 and all(region.origin_of(a).kind is Kind.FREE for a in residuals):
        # A scalar that several stages use, say, is at hand wherever this comes to be.
        return min(incoming, key=by_rank), Reason.FOLLOWS_OPERANDS
    reached = _reached(shared or _with_most_bytes(residuals), came)
    location, home = max(reached, key=by_rank), region.followed_home(e)
    at_home = [s for s in reached if s.mesh == home]
    if location.mesh != home and at_home and not _reads_state_of(region, location, home):
        location = max(at_home, key=by_rank)  # a gradient is made where its weight is read
    if came is None and all(s.mesh != location.mesh for s in incoming):
        there = _all_there(region, incoming, residuals)
        if there is not None:
            return there, Reason.ALL_HERE
    return location, Reason.READS_SAVED


def _is_sent_before(region: Region, a: Var) -> bool:
    """Whether a value is of state and no flow reads it, but perhaps what was made of it before the loop: to
    wherever the backward reads it, it is sent once."""
    return region.is_weight(a) and not _is_read(region, a)


def _is_read(region: Region, a: Var) -> bool:
    """Whether the forward reads a value of state, or what is made of it."""
    made, seen = [a], {a}
    for v in made:  # grows as it is read
        for u in region.users.get(v, ()):
            if region.roles.of[u] is Role.FORWARD and u in region.locations:
                if region.locations[u].position is not None:
                    return True
                made += [w for w in u.outvars if w not in seen]
                seen.update(u.outvars)
    return False


def _with_fewest_bytes(
    region: Region, e: Equation, residuals: Mapping[Var, set[Location]], incoming: Sequence[Location]
) -> Location:
    """Where state is, which is sent once, or where gradients are, which are sent in every microbatch."""
    home, made = region.followed_home(e), sum(map(nbytes, e.outvars))
    gradients = [a for a in e.invars if region.origin_of(a).kind is Kind.ACTIVATION]

    def sent(location: Location) -> int:
        here = location.mesh
        once = sum(nbytes(a) for a in residuals if region.where[a].home != here)
        once += made if home not in (None, here) else 0
        return once + region.microbatches * sum(
            nbytes(a) for a in gradients if region.origin_of(a).home != here
        )

    return min(_in_order({*incoming, *set().union(*residuals.values())}), key=sent)


def _with_operands(region: Region, e: Equation, incoming: Sequence[Location], came: int | None) -> Location:
    """Where what it reads was made, furthest upstream; a gradient at home, if part of it was made there."""
    ahead = region.made_by(e, (Role.UPDATE,)) if came is None else []
    if ahead:
        return _beside(region, e, ahead)
    # What is recomputed in a backward is no residual: a gradient is made at home even so.
    at_home = [s for s in incoming if s.mesh == region.followed_home(e)]
    return min(at_home or incoming, key=by_rank)


def _reached(choices: set[Location], came: int | None) -> list[Location]:
    """Those that the backward has come to; if there are none, the furthest upstream."""
    ordered = _in_order(choices)
    return [s for s in ordered if came is None or s.rank <= came] or ordered[:1]


def _in_order(locations: set[Location]) -> list[Location]:
    """Upstream first, and by their devices outside the flow: each process has a set in another order."""
    return sorted(locations, key=lambda s: (s.rank, [d.id for d in s.mesh.devices.flat]))


def _residuals(region: Region, e: Equation) -> dict[Var, set[Location]]:
    """What an equation reads of the forward and of state, with where the forward uses it."""
    found: dict[Var, set[Location]] = {}
    for a in filter(is_var, e.invars):
        maker = region.maker.get(a)
        ahead = maker is None or region.roles.of[maker] is Role.FORWARD
        if (ahead or region.origin_of(a).kind is Kind.STATE) and (uses := _available(region, a)):
            found[a] = uses
    return found


def _with_most_bytes(residuals: Mapping[Var, set[Location]]) -> set[Location]:
    """Where most bytes of these values are, if no location has them all."""
    held: Counter[Location] = Counter()
    for a, locations in residuals.items():
        held.update(dict.fromkeys(locations, nbytes(a)))
    return {location for location in held if held[location] == max(held.values())}


def _available(region: Region, atom: Atom) -> set[Location] | None:
    """Where the forward uses a value, None if it nowhere does and every mesh can have it."""
    if not is_var(atom):
        return None
    maker = region.maker.get(atom)
    if maker in region.loose:  # wherever what it is made of is
        operands = [s for a in maker.invars if (s := _available(region, a)) is not None]
        return set.intersection(*operands) or _all_arrived(operands) if operands else None
    origin = region.origin_of(atom)
    if origin.kind is Kind.STATE:
        uses = set().union(*(region.state_uses.get(r, ()) for r in region.roots.get(atom, ())))
        if not uses and atom in region.of_batch:
            return None  # it goes to the flow
        return uses or {Location(origin.mesh, region.last_position(origin.mesh))}
    holders = [maker, *(u for u in region.users.get(atom, ()) if u not in region.loose)]
    held = {
        region.locations[m] for m in holders if m in region.locations and region.roles.of[m] is Role.FORWARD
    }
    # What is unplaced could be had everywhere, but a gradient over it belongs to the stage that used it.
    return held if origin.kind is Kind.ACTIVATION else held or None


def _all_arrived(operands: Sequence[set[Location]]) -> set[Location]:
    """Where values come one after the other, such as those of the steps of a scan: the last of them."""
    found = set()
    for mesh in set.intersection(*({s.mesh for s in locations} for locations in operands)):
        first = [min((s for s in locations if s.mesh == mesh), key=by_rank) for locations in operands]
        found.add(max(first, key=by_rank))
    return found


def _all_there(region: Region, incoming: Sequence[Location], residuals: Iterable[Var]) -> Location | None:
    """For the backward of a second loss, which reads what the first had as well: where a gradient comes
    from, if all else that is read is there."""
    held = [{region.locations[n].mesh for n in region.users[a] if n in region.locations} for a in residuals]
    return next((s for s in incoming if all(s.mesh in meshes for meshes in held)), None)


def _reads_state_of(region: Region, location: Location, home: Mesh | None) -> bool:
    """Whether the forward reads state of a mesh at a location."""
    return any(location in uses and region.where[v].home == home for v, uses in region.state_uses.items())


def _beside(region: Region, e: Equation, ahead: Sequence[Location]) -> Location:
    """For the backward of a second loss: where all it reads is at hand, else where its forward was."""
    held = []
    for a in filter(is_var, e.invars):
        if (maker := region.maker.get(a)) in region.locations:
            users = [
                u for u in region.users[a] if region.roles.of[u] is Role.UPDATE and u in region.locations
            ]
            held.append({region.locations[n].mesh for n in (maker, *users)})
    shared = set.intersection(*held)
    both = [s for s in region.made_by(e, (Role.BACKWARD, Role.UPDATE)) if s.mesh in shared]
    return (both or ahead)[0]


def loose_equations(region: Region) -> set[Node]:
    """Forward equations that only the backward reads: factors of derivatives, computed ahead by JAX."""
    loose: set[Node] = set()
    for e in reversed(region.forward):
        users = [u for v in e.outvars for u in region.users.get(v, ())]
        ahead = [u for u in users if region.roles.of[u] is Role.FORWARD and u not in loose]
        placed = e in region.locations and e not in region.tied and region.locations[e].position is not None
        if placed and not ahead and any(region.roles.of[u] is Role.BACKWARD for u in users):
            loose.add(e)
    return loose


def join_backward(region: Region) -> None:
    """Moves loose equations to where the backward that reads them went."""
    for e in reversed([n for n in region.roles.all(Role.FORWARD) if n in region.loose]):
        users = {
            region.locations[u] for v in e.outvars for u in region.users.get(v, ()) if u in region.locations
        }
        if len(users) == 1:
            (location,) = users
            if location.position is not None and all(
                (held := _available(region, a)) is None
                or any(s.mesh == location.mesh and s.rank <= location.rank for s in held)
                for a in e.invars
            ):
                region.put(e, location, region.out.phases[e], Reason.FOR_BACKWARD)
