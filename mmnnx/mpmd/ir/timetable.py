"""What a schedule says: actions, stages, and the timetable of a microbatch loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

Phase = Literal["forward", "backward", "backward-input", "backward-weight"]


PHASES: tuple[Phase, ...] = get_args(Phase)

LETTERS: Mapping[Phase, str] = dict(zip(PHASES, "FBIW"))


PARTS: tuple[Phase, ...] = ("backward-input", "backward-weight")


class Action(NamedTuple):
    """One step of a mesh: a phase of one stage, for one microbatch.

    A "backward" is whole; or it is split into "backward-input" (what other meshes wait for) and, any time
    after it, "backward-weight".

    Example:
      >>> Action(stage=0, phase="forward", microbatch=3)
      Action(stage=0, phase='forward', microbatch=3)
    """

    stage: int
    phase: Phase
    microbatch: int


# Rows of actions. The actions of a row run in its order, and are all of one mesh; a mesh may have several
# rows, which take turns as soon as what each waits for is there.
Table = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Stages:
    """The stages of a microbatch loop, as schedules see them.

    Attributes:
      meshes: for each stage, in the order in which activations reach them, the number of its TaskMesh.
      reads: for each stage, the stages before it whose activations it reads.
      carried: what a microbatch reads of the one before it, by stage and phase ("forward" or "backward"): who
        makes it, and who reads it.
      tasks: for each stage, the name of its task, for messages; empty if there are none.

    Example:
      >>> Stages.chain((0, 1, 0, 1)).after  # two stages on each of two meshes
      (3, 2, 1, 0)
    """

    meshes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    carried: tuple[tuple[tuple[int, Phase], tuple[int, Phase]], ...] = ()
    tasks: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __repr__(self) -> str:
        return f"Stages({self.num_stages} stages on {self.num_meshes} meshes)"

    @classmethod
    def chain(cls, meshes: Sequence[int]) -> Stages:
        """Stages of which each reads the one before it, on the given meshes."""
        return cls(tuple(meshes), tuple((s - 1,) if s else () for s in range(len(meshes))))

    @property
    def num_stages(self) -> int:
        return len(self.meshes)

    @property
    def num_meshes(self) -> int:
        return len(set(self.meshes))

    @functools.cached_property
    def after(self) -> tuple[int, ...]:
        """For each stage, how many stages lie on the longest way from it to the end; 0 for a last stage."""
        far = [0] * self.num_stages
        for stage in reversed(range(self.num_stages)):
            for before in self.reads[stage]:
                far[before] = max(far[before], far[stage] + 1)
        return tuple(far)

    def rounds(self, name: str, interleave: int | None = None) -> int:
        """How often a chain goes round the meshes: stage i is on mesh i % num_meshes.

        Raises:
          ValueError: if it does not, or not `interleave` times.
        """
        self._check_chain(name)
        times, rest = divmod(self.num_stages, self.num_meshes)
        if rest or any(mesh != s % self.num_meshes for s, mesh in enumerate(self.meshes)):
            raise ValueError(
                f"schedule {name!r} needs stages that go round the meshes in turn, such as 0, 1, 0, 1 for "
                f"four stages on two; here they are on meshes {self._where()}"
            )
        if interleave not in (None, times):
            raise ValueError(
                f"interleave={interleave}, but each mesh has {times} of the stages: have {interleave} tasks "
                "on each mesh, or leave interleave= out"
            )
        return times

    def vee(self, name: str, interleave: int | None = None) -> int:
        """The number of meshes of a chain that goes down them and back up: two stages on each.

        Raises:
          ValueError: if the stages lie otherwise.
        """
        self._check_chain(name)
        down = tuple(range(self.num_meshes))
        if self.meshes != (*down, *reversed(down)):
            advice = (
                "Two stages in a row on one mesh are told apart by their tasks: give each a Task of its own "
                "name in the TaskSharding, or a mm.task in the model"
            )
            if self.num_stages > 2 * self.num_meshes:
                advice = (
                    "A further stage begins wherever a later stage waits for what another mesh computes. "
                    "The program for schedule='1f1b', printed, shows what that is; compute it in an earlier "
                    "stage, or add it to the loss"
                )
            raise ValueError(
                f"schedule {name!r} needs two stages on each mesh, in a V, such as 0, 1, 1, 0 on two meshes; "
                f"here they are on meshes {self._where()}. {advice}"
            )
        if interleave not in (None, 2):
            raise ValueError(f"interleave={interleave}, but schedule {name!r} has two stages on each mesh")
        return self.num_meshes

    def _check_chain(self, name: str) -> None:
        # Reading also from further back changes nothing: what lies between is waited for anyway.
        other = [s for s, read in enumerate(self.reads) if s and s - 1 not in read]
        if other:
            reads = [
                f"{self._name(s)} reads {', '.join(map(self._name, self.reads[s])) or 'no other'}"
                for s in other
            ]
            raise ValueError(
                f"schedule {name!r} is for a chain, in which each stage reads the one before it; here "
                f"{'; '.join(reads)}. Leave schedule= out, or take '1f1b', which is for any graph"
            )

    def _where(self) -> str:
        """The meshes of the stages, in order, with their tasks."""
        return ", ".join(f"{mesh}{self._task(stage)}" for stage, mesh in enumerate(self.meshes))

    def _name(self, stage: int) -> str:
        return f"stage {stage}{self._task(stage)}"

    def _task(self, stage: int) -> str:
        return f" ({self.tasks[stage]!r})" if self.tasks and self.tasks[stage] else ""


@dataclasses.dataclass(frozen=True)
class Timetable:
    """What is decided about a loop before its body is partitioned.

    Attributes:
      schedule: the name of its schedule.
      stages: its stages, as schedules see them.
      positions: for each stage, its position in the flow.
      table: what each mesh runs in which order; empty for a custom schedule that names fragments.
      split: the positions whose backward is split in two.
      remat: for each position, what its backward may compute again.
    """

    schedule: str
    stages: Stages
    positions: tuple[int, ...]
    table: list[list[Action]]
    split: frozenset[int]
    remat: Mapping[int, Remat]


# None for the cheap alone, True for everything, or a policy of `jax.checkpoint`.
Remat = Any
