"""Where everything in a list of nodes is: what `mmnnx.mpmd.place.place` finds."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Atom, Node, Var, is_var
from mmnnx.mpmd.ir.origin import Origin
from mmnnx.sharding.task import Task


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """Where an equation runs: a TaskMesh, and its position in the flow (None outside the flow)."""

    mesh: Mesh
    position: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """One stop in the flow of activations: a TaskMesh and, if it came from a scope, the task."""

    mesh: Mesh
    task: Task | None


@dataclasses.dataclass(eq=False)
class Placement:
    """Where everything in one list of nodes is.

    Attributes:
      positions: the flow of activations, in order.
      locations: where each equation runs; absent for work that depends on no placed state.
      phases: for each equation in `locations`, "forward", "backward" or "none".
      where: the origin of each variable, with the mesh that holds it unless it is free.
      backward_tasks: the positions whose backward is in a task of another name than the forward.
      follows: for gradients and what becomes of them, the state variable that they will be combined with.
      bodies: for each Loop, the placement of its body.
    """

    positions: list[Position] = dataclasses.field(default_factory=list)
    locations: dict[Node, Location] = dataclasses.field(default_factory=dict)
    phases: dict[Node, str] = dataclasses.field(default_factory=dict)
    where: dict[Var, Origin] = dataclasses.field(default_factory=dict)
    backward_tasks: dict[int, str] = dataclasses.field(default_factory=dict)
    follows: dict[Var, Var] = dataclasses.field(default_factory=dict)
    bodies: dict[Node, Placement] = dataclasses.field(default_factory=dict)

    def mesh_of(self, atom: Atom) -> Mesh | None:
        return self.where[atom].home if is_var(atom) else None
