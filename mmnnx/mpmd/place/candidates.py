"""What is compared where there are several ways to place: bytes sent, and other orders of the forward."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Equation, Loop, Node, Var, is_repeated, is_var, nbytes
from mmnnx.mpmd.ir.origin import Kind
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.place.classify import Role
from mmnnx.mpmd.place.region import Region


def bytes_sent(nodes: Sequence[Node], placement: Placement, times: int) -> int:
    """Bytes of the values that a mesh reads from another, for all microbatches; of state, once."""
    readers: dict[Var, set[Mesh]] = {}
    total = 0
    for n in nodes:
        if not isinstance(n, Equation):
            total += bytes_sent(n.body, placement.bodies[n], n.spec.length if isinstance(n, Loop) else 1)
        elif n in placement.locations:
            mesh = placement.locations[n].mesh
            for a in filter(is_var, n.invars):
                if placement.where[a].home not in (None, mesh):
                    readers.setdefault(a, set()).add(mesh)
    sent = _sent_instead(nodes, placement)
    received: dict[Var, set[Mesh]] = {}
    for a, meshes in readers.items():
        for v in sent.get(a, [a]):
            received.setdefault(v, set()).update(meshes)
    for a, meshes in received.items():
        total += nbytes(a) * len(meshes) * (1 if placement.where[a].kind is Kind.STATE else times)
    return total


def _sent_instead(nodes: Sequence[Node], placement: Placement) -> dict[Var, list[Var]]:
    """What is sent of values that are made of state alone, where that has fewer bytes, such as labels for a
    mask that is made of them: they are computed again where they are read."""
    found: dict[Var, list[Var]] = {}
    for n in nodes:
        if isinstance(n, Equation) and n in placement.locations and is_repeated(n):
            (*made, v), read = n.outvars, [a for a in n.invars if is_var(a) and placement.where[a].home]
            if not made and placement.where[v].kind is Kind.STATE:
                of = list(dict.fromkeys(o for a in read for o in found.get(a, [a])))
                if sum(map(nbytes, of)) < nbytes(v):
                    found[v] = of
    return found


def latest_order(region: Region) -> list[Equation] | None:
    """The forward with each equation as late as what reads it allows, by the number of times that a flow
    goes to another mesh ahead of it; None where state is come to in the same order."""
    forward = region.roles.all(Role.FORWARD)
    mesh = {e: _home(region, e) for e in forward if e in region.tied}
    depth: dict[Node, int] = {}
    here: dict[Node, Mesh | None] = {}  # the mesh of an equation, or else that of the flow that reaches it

    def hops(a: Node, b: Node) -> int:
        return int(None not in (here[a], here[b]) and here[a] != here[b])

    for e in forward:
        made_of = [m for a in e.invars if is_var(a) and (m := region.maker.get(a)) in depth]
        deepest = max(made_of, key=depth.__getitem__, default=None)
        here[e] = mesh.get(e, here[deepest] if deepest is not None else None)
        depth[e] = max((depth[m] + hops(m, e) for m in made_of), default=0)
    end = max(depth.values(), default=0)
    for e in reversed(forward):
        users = [u for v in e.outvars for u in region.users.get(v, ()) if u in depth]
        depth[e] = min((depth[u] - hops(e, u) for u in users), default=end)
    return _if_other(region, sorted(forward, key=depth.__getitem__))


def frozen_first(region: Region) -> list[Equation] | None:
    """The forward with what is not trained, such as a teacher, ahead of the rest: so the loss is computed
    where its gradient goes on. None where nothing is frozen or state is come to in the same order."""
    forward, backward = region.roles.all(Role.FORWARD), region.roles.all(Role.BACKWARD)
    follows = region.out.follows
    differentiated = {follows[v] for e in backward for v in e.outvars if v in follows}
    differentiated.update(*map(region.roots_of, backward))
    tied = [e for e in forward if e in region.tied]
    trained = {e for e in tied if not differentiated.isdisjoint(region.roots_of(e))}
    connected = _downstream(forward, trained) | _upstream(forward, trained)
    first = _upstream(forward, {e for e in tied if e not in connected})
    return _if_other(region, sorted(forward, key=lambda e: e not in first)) if trained else None


def _if_other(region: Region, order: list[Equation]) -> list[Equation] | None:
    """The order, if it comes to state in another than that of the function."""
    tied = lambda equations: [e for e in equations if e in region.tied]
    return order if tied(order) != tied(region.roles.all(Role.FORWARD)) else None


def _downstream(forward: Sequence[Equation], start: Collection[Equation]) -> set[Equation]:
    """These equations, and all that depend on them."""
    found: set[Equation] = set()
    made: set[Var] = set()
    for e in forward:
        if e in start or not made.isdisjoint(filter(is_var, e.invars)):
            found.add(e)
            made.update(e.outvars)
    return found


def _upstream(forward: Sequence[Equation], start: Collection[Equation]) -> set[Equation]:
    """These equations, and all that they depend on."""
    found: set[Equation] = set()
    read: set[Var] = set()
    for e in reversed(forward):
        if e in start or not read.isdisjoint(e.outvars):
            found.add(e)
            read.update(filter(is_var, e.invars))
    return found


def _home(region: Region, e: Equation) -> Mesh:
    """The mesh of an equation that is tied to one."""
    scoped, homes = region.task_of(e.scope), region.state_homes(e) or region.renewed_homes(e)
    return scoped[1] if scoped is not None else max(homes, key=homes.__getitem__)
