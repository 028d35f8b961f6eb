"""What a schedule is, and the names under which schedules are found."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

Phase = Literal["forward", "backward", "backward-input", "backward-weight"]
PHASES: tuple[Phase, ...] = get_args(Phase)
PARTS: tuple[Phase, ...] = ("backward-input", "backward-weight")


class Action(NamedTuple):
    """One step of a mesh: a phase of one stage, for one microbatch.

    A "backward" is whole; or it is cut into "backward-input" (what other meshes wait for) and, any time after
    it, "backward-weight".
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

    Example:
      >>> Stages.chain((0, 1, 0, 1)).after  # two stages on each of two meshes
      (3, 2, 1, 0)
    """

    meshes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    carried: tuple[tuple[tuple[int, Phase], tuple[int, Phase]], ...] = ()

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
                f"four stages on two; here they are on meshes {', '.join(map(str, self.meshes))}"
            )
        if interleave not in (None, times):
            raise ValueError(f"interleave={interleave}, but each mesh has {times} of the stages")
        return times

    def vee(self, name: str, interleave: int | None = None) -> int:
        """The number of meshes of a chain that goes down them and back up: two stages on each.

        Raises:
          ValueError: if the stages lie otherwise.
        """
        self._check_chain(name)
        down = tuple(range(self.num_meshes))
        if self.meshes != (*down, *reversed(down)):
            raise ValueError(
                f"schedule {name!r} needs two stages on each mesh, in a V, such as 0, 1, 1, 0 on two meshes; "
                f"here they are on meshes {', '.join(map(str, self.meshes))}. (Two stages in a row on one "
                "mesh are told apart by their tasks: give each a mm.task.)"
            )
        if interleave not in (None, 2):
            raise ValueError(f"interleave={interleave}, but schedule {name!r} has two stages on each mesh")
        return self.num_meshes

    def _check_chain(self, name: str) -> None:
        # Reading also from further back changes nothing: what lies between is waited for anyway.
        if any(s and s - 1 not in read for s, read in enumerate(self.reads)):
            raise ValueError(
                f"schedule {name!r} is for a chain of stages; here they read "
                + "; ".join(f"{s}: {', '.join(map(str, r)) or 'no other'}" for s, r in enumerate(self.reads))
            )


# (stages, number of microbatches) -> table. Options of `mm.microbatch` that a schedule understands
# (interleave, unrolling) are keyword arguments of its function.
Rows = Callable[..., Table]


@dataclass(frozen=True)
class Schedule:
    """A schedule by name.

    Attributes:
      name: what `mm.microbatch(..., schedule=name)` calls it.
      rows: the function that makes its table.
    """

    name: str
    rows: Rows

    @property
    def is_own(self) -> bool:
        """Whether it is one of mmnnx."""
        return self.rows.__module__.startswith(f"{__package__}.")

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `mm.microbatch` that it understands."""
        parameters = list(inspect.signature(self.rows).parameters)
        return tuple(p for p in parameters[2:])

    def table(self, stages: Stages, num_microbatches: int, **options: Any) -> list[list[Action]]:
        """Its table for these stages.

        Raises:
          ValueError: if it is not for such stages, or not for so few microbatches.
          TypeError: if its function gives no rows.
        """
        unknown = [name for name, value in options.items() if value is not None and name not in self.options]
        if unknown:
            raise ValueError(f"schedule {self.name!r} has no option {', '.join(unknown)}")
        given = {name: value for name, value in options.items() if value is not None}
        rows = self.rows(stages, num_microbatches, **given)
        if not isinstance(rows, Iterable):
            raise TypeError(
                f"schedule {self.name!r} gave {rows!r}, and not a row of actions for each TaskMesh"
            )
        return [[Action(*a) for a in row] for row in rows]


_schedules: dict[str, Schedule] = {}


def register_schedule(name: str) -> Callable[[Rows], Rows]:
    """Makes a function a schedule, available as `mm.microbatch(..., schedule=name)`.

    Where its table has "backward-input" and "backward-weight" actions, backwards are cut in two. The rows may
    be in any order.

    Raises:
      ValueError: for the name of a schedule of mmnnx.
      TypeError: for a name that is no str.

    Example:
      >>> @mm.register_schedule("forwards-first")
      ... def forwards_first(stages, num_microbatches):
      ...     order = range(num_microbatches)
      ...     return [
      ...         [mm.Action(s, "forward", m) for m in order] + [mm.Action(s, "backward", m) for m in order]
      ...         for s in range(stages.num_stages)
      ...     ]
    """

    if not isinstance(name, str):
        raise TypeError(f'a schedule is registered by name, as by @register_schedule("mine"), not {name!r}')

    def register(rows: Rows) -> Rows:
        taken = name == "custom" or (name in _schedules and _schedules[name].is_own)
        if taken and not Schedule(name, rows).is_own:
            raise ValueError(f"there is a schedule {name!r} already: register yours by another name")
        _schedules[name] = Schedule(name, rows)
        return rows

    return register


def get_schedule(name: str) -> Schedule:
    """The schedule of that name.

    Raises:
      ValueError: for a name that is not registered, with those that are.
    """
    if name not in _schedules:
        raise ValueError(
            f"unknown schedule {name!r}; there are {', '.join(map(repr, [*sorted(_schedules), 'custom']))}"
        )
    return _schedules[name]


def schedule_names() -> list[str]:
    """The names of all schedules, in the order in which they were registered."""
    return list(_schedules)
