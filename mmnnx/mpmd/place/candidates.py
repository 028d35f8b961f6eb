"""What is compared where there are several ways to place: bytes sent, and another order of the forward."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Equation, Loop, Node, Var, is_var, nbytes
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
    for a, meshes in readers.items():
        total += nbytes(a) * len(meshes) * (1 if placement.where[a].kind is Kind.STATE else times)
    return total


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
    late = sorted(forward, key=depth.__getitem__)
    same = [e for e in late if e in region.tied] == [e for e in forward if e in region.tied]
    return None if same else late


def _home(region: Region, e: Equation) -> Mesh:
    """The mesh of an equation that is tied to one."""
    scoped, homes = region.task_of(e.scope), region.state_homes(e) or region.renewed_homes(e)
    return scoped[1] if scoped is not None else max(homes, key=homes.__getitem__)
