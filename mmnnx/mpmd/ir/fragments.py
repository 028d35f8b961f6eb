"""What a function is partitioned into: fragments, loops of fragments, and the plan of all of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Loop, Var, While
from mmnnx.mpmd.ir.timetable import Timetable

# A value on a mesh: the unit in which data is needed, made, sent and freed.
PlacedVar = tuple[Var, Mesh]


@dataclasses.dataclass(frozen=True, eq=False)
class Fragment:
    """One SPMD program: equations of one mesh, phase and position.

    Attributes:
      name: made of the task and the phase, such as "stage0 forward". Several may have the same:
        `Program.labels` tells them apart.
      task: the task.
      mesh: the TaskMesh that it is compiled for.
      phase: "forward", "backward", one of its parts "backward-input" and "backward-weight", or "none"
        (in no forward or backward of a stage, such as the optimizer, joins, and work on state alone).
      position: its place in the flow of activations, None outside the flow.
      jaxpr: what it computes.
      invars, outvars: the variables that it reads and makes, all on `mesh`.
      scan: what it scans over the microbatches of a call (`scan_fragment`); None if a call is of one.
    """

    name: str
    task: str
    mesh: Mesh
    phase: str
    position: int | None
    jaxpr: Any
    invars: tuple[Var, ...]
    outvars: tuple[Var, ...]
    scan: Scan | None = None

    @property
    def one(self) -> Fragment:
        """The fragment of one microbatch: itself, unless it is a scan."""
        return self if self.scan is None else self.scan.one

    def __repr__(self) -> str:
        return f"Fragment({self.name!r}, {dict(self.mesh.shape)})"


class Scan(NamedTuple):
    """What a fragment scans over microbatches: the fragment of one, and what stands for its variables."""

    one: Fragment
    microbatches: Microbatches


@dataclasses.dataclass(frozen=True, eq=False)
class Microbatches:
    """What stands for the variables of one microbatch where several share a call; carries, for themselves.

    Attributes:
      count: how many share a call.
      leaves: for each carry as it enters, as it leaves.
      slices, kept: for a slice, or a result that is kept, one variable for each microbatch.
      read: what fragments read of others.
      passed: the carries that a fragment reads and does not update.
      stacks: for what fragments hand on, one variable for all microbatches; it grows as fragments are made.
    """

    count: int
    leaves: dict[Var, Var]
    slices: dict[Var, tuple[Var, ...]]
    kept: dict[Var, tuple[Var, ...]]
    read: frozenset[Var]
    passed: frozenset[Var]
    stacks: dict[Var, Var] = dataclasses.field(default_factory=dict)

    def updated(self, one: Fragment) -> list[Var]:
        """The carries that a fragment of one microbatch reads and updates."""
        read, made = set(one.invars), set(one.outvars)
        return [v for v, leaves in self.leaves.items() if v in read and leaves in made]


class Kept(NamedTuple):
    """A result of fragments that is kept after a loop: of each call, as one of some outer variables."""

    result: Var
    calls: tuple[Var, ...]
    meshes: tuple[Mesh, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class LoopPlan:
    """A microbatch loop whose body is partitioned into fragments.

    Attributes:
      loop: what it was made of.
      body: the fragments of one call: of one microbatch, or of several that share a call.
      slices: for variables of the body that stand for slices, the outer variable of each call.
      carried: for each carry, the meshes that hold it between calls.
      kept: the results that are kept.
      reads: the outer values that the loop reads.
      timetable: its stages, and what its schedule asks of them.
    """

    loop: Loop
    body: Body
    slices: dict[Var, tuple[Var, ...]]
    carried: tuple[tuple[Mesh, ...], ...]
    kept: tuple[Kept, ...]
    reads: tuple[PlacedVar, ...]
    timetable: Timetable


@dataclasses.dataclass(frozen=True, eq=False)
class WhilePlan:
    """A while whose body is partitioned into fragments.

    Attributes:
      loop: what it was made of.
      body: the plan of one iteration.
      carried: for each carry, the meshes that hold it between iterations.
      reads: the outer values that it reads.
    """

    loop: While
    body: Plan
    carried: tuple[tuple[Mesh, ...], ...]
    reads: tuple[PlacedVar, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """The plan of one call: of fragments alone, for inside a Loop there is no other.

    Attributes:
      fragments: each after those it needs in the same call.
      homes, needs: as in Plan.
    """

    fragments: tuple[Fragment, ...]
    homes: dict[Var, Mesh]
    needs: tuple[PlacedVar, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Fragments and loops in an order in which each comes after what it needs.

    Attributes:
      steps: the fragments, the microbatch loops and the whiles.
      homes: the mesh where each variable is made; variables made on every mesh that needs them are absent.
      needs: values from outside that the steps read.
    """

    steps: tuple[Step, ...]
    homes: dict[Var, Mesh]
    needs: tuple[PlacedVar, ...]

    @property
    def all_steps(self) -> list[Step]:
        """The steps, and those of whiles."""
        return [
            step
            for own in self.steps
            for step in (own, *(own.body.all_steps if isinstance(own, WhilePlan) else ()))
        ]

    @property
    def loops(self) -> list[LoopPlan]:
        """The microbatch loops, those in whiles too."""
        return [step for step in self.all_steps if isinstance(step, LoopPlan)]


Step = Fragment | LoopPlan | WhilePlan
