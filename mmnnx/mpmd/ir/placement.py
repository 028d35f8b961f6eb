"""Where everything in a list of nodes runs: what `place` finds, and `hoist` keeps up to date."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Iterable, Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Atom, Equation, Flat, Node, Var, is_var
from mmnnx.mpmd.ir.origin import Kind, Origin, combine
from mmnnx.sharding.task import Task


class Reason(enum.Enum):
    """Why an equation is where it is, as printed behind its "@". docs/how-it-works.md explains each."""

    IN_TASK = "in the scope of a task"
    MADE_OF_STATE = "made of nothing but state of this mesh"
    READS_STATE = "reads state of this mesh"
    STATE_IS_SENT = "reads state that is sent here"
    FOLLOWS_OPERANDS = "follows the values it reads"
    NEW_STATE = "makes a new value of state of this mesh"
    FEWEST_BYTES = "moved so that the fewest bytes are sent (minimum cut)"
    READS_SAVED = "reads what the forward saved"
    READS_NEW_STATE = "reads a new value of state of this mesh"
    ALL_HERE = "everything it reads is already on this mesh"
    FOR_BACKWARD = "only the backward reads it"
    ADDS_TO_SUM = "adds to a sum kept on this mesh"
    UPDATE = "runs after the backward or the loop"
    READ_FIRST = "its result is read first on this mesh"
    CALLBACK = "a callback that depends on no placed state"
    REDUCES_SUM = "reduces a sum once, after the loop"
    GATHERS_STATE = "gathers sharded state once, before the loop"
    COMPUTED_AGAIN = "computed again for the backward"


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """Where an equation runs: a TaskMesh, and its position in the flow (None outside the flow)."""

    mesh: Mesh
    position: int | None = None

    @property
    def rank(self) -> int:
        """Its place in the flow, to compare: what is outside comes first."""
        return -1 if self.position is None else self.position


by_rank = operator.attrgetter("rank")
"""What locations are compared by."""


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
      reasons: why each equation in `locations` is there.
      where: the origin of each variable, with the mesh that holds it unless it is unplaced.
      backward_tasks: the positions whose backward is in a task of another name than the forward.
      follows: for gradients and what becomes of them, the state variable that they will be combined with.
      bodies: for each Loop and While, the placement of its body.
    """

    positions: list[Position] = dataclasses.field(default_factory=list)
    locations: dict[Node, Location] = dataclasses.field(default_factory=dict)
    phases: dict[Node, str] = dataclasses.field(default_factory=dict)
    reasons: dict[Node, Reason] = dataclasses.field(default_factory=dict)
    where: dict[Var, Origin] = dataclasses.field(default_factory=dict)
    backward_tasks: dict[int, str] = dataclasses.field(default_factory=dict)
    follows: dict[Var, Var] = dataclasses.field(default_factory=dict)
    bodies: dict[Node, Placement] = dataclasses.field(default_factory=dict)

    def mesh_of(self, atom: Atom) -> Mesh | None:
        """The mesh that holds an atom; None for literals, and for what every mesh can have."""
        return self.where[atom].home if is_var(atom) else None

    def copy(self) -> Placement:
        """A placement that may be changed, with those of its loops."""
        return Placement(
            positions=list(self.positions),
            locations=dict(self.locations),
            phases=dict(self.phases),
            reasons=dict(self.reasons),
            where=dict(self.where),
            backward_tasks=dict(self.backward_tasks),
            follows=dict(self.follows),
            bodies={loop: body.copy() for loop, body in self.bodies.items()},
        )

    def put(self, e: Node, location: Location, phase: str, reason: Reason) -> None:
        """Places an equation."""
        self.locations[e], self.phases[e], self.reasons[e] = location, phase, reason

    def put_like(self, new: Iterable[Equation], old: Node) -> None:
        """Places new equations, in order, where an old one is, in whose stead they are.

        Those that depend on no placed state have no place, as everywhere.
        """
        for e in new:
            origin = combine(self.where[a] for a in e.invars if is_var(a))
            if origin.kind in (Kind.STATE, Kind.ACTIVATION):
                origin = self.where[old.outvars[0]]
                if old in self.locations:
                    self.put(e, self.locations[old], self.phases[old], self.reasons[old])
            self.where.update(dict.fromkeys(e.outvars, origin))


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A function whose equations have a place.

    Attributes:
      flat: the function as it was inlined: its inputs, constants and results are those of the nodes, too.
      nodes: its equations and loops, in order.
      placement: where they are.
    """

    flat: Flat
    nodes: Sequence[Node]
    placement: Placement
