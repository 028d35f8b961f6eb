"""Moving meshes: the mesh of a task with `loop_dependent_mesh_slice` is another one for each microbatch."""

from __future__ import annotations

from jax.sharding import Mesh

from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.partition.change_mesh import fragment_on
from mmnnx.mpmd.schedule.dispatch_order import Moves


class MovingMeshes:
    """Replaces moving meshes by those that they are for a microbatch.

    Args:
      moves: for each moving mesh, from a microbatch to a mesh.
    """

    def __init__(self, moves: Moves):
        self.moves = moves
        self._moved: dict[tuple[Fragment, Mesh], Fragment] = {}

    def at(self, mesh: Mesh, microbatch: int | None) -> Mesh:
        """What a mesh is for a microbatch; outside loops a moving one is what it is for the first."""
        return self.moves[mesh](microbatch or 0) if mesh in self.moves else mesh

    def fragment_on(self, f: Fragment, mesh: Mesh) -> Fragment:
        """A fragment compiled for one of the meshes that its own moves to."""
        if f.mesh == mesh:
            return f
        if (f, mesh) not in self._moved:
            self._moved[f, mesh] = fragment_on(f, mesh)
        return self._moved[f, mesh]

    def variants(self, f: Fragment) -> tuple[Fragment, ...]:
        """A fragment, and what `fragment_on` has made of it."""
        return (f, *(moved for (g, _), moved in self._moved.items() if g is f))
