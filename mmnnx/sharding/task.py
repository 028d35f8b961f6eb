"""`Task`: a named piece of a computation, with its submesh and its options."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mmnnx.sharding.mesh import MultiMesh, TaskMesh, current_multimesh

AxisRules = Mapping[str, Any] | Iterable[tuple[str, str | Sequence[str] | None]]


@dataclass(frozen=True)
class Task:
    """All options of a task. Equal options make equal tasks; a Task can be hashed.

    Args:
      name: what messages, programs and pictures call it.
      mesh: its submesh: a `TaskMesh` or a `jax.sharding.Mesh`. With Explicit axes, types have shardings.
      logical_axes: pairs (logical axis, mesh axis or tuple of them or None), or a mapping. Of the pairs for
        one logical axis the first whose mesh axes are still free in a spec is used; None replicates.
      mesh_slice: index along each sliced axis of the current MultiMesh, `{"stage": 0}`, instead of `mesh`.
        With neither, the task runs on the whole current MultiMesh, or on all devices if there is none.
      extra_axes: more pairs, used after those of `logical_axes`.
      split_backprop: two names. The backward is split into gradients of inputs, which other tasks wait for,
        and gradients of weights, which no task waits for; the names are those of the two parts.
      loop_dependent_mesh_slice: in a `mm.microbatch` loop the task runs on another slice for each microbatch.
        It is an axis of the current MultiMesh; or `{"stage": (0, 2)}` for some of its indices, in turn; or a
        function from the microbatch to a `mesh_slice`; or a list of meshes, in turn. They must be of one
        shape. The task's state is copied to each once a step, and its gradients are summed at its home. For
        `mm.task` only, not for a TaskSharding.
      remat: what the backward of the task computes again rather than keeps: None for what is cheap, True for
        everything, or a policy of `jax.checkpoint`. It overrides that of `mm.microbatch`.

    `split_backprop` and `remat` also hold for computation that follows state which a TaskSharding gives to
    the task, on a mesh where no other task has state.

    Raises:
      ValueError: more than one of `mesh`, `mesh_slice` and `loop_dependent_mesh_slice`, or malformed options.
      TypeError: a `remat` that is no policy.

    Example:
      >>> Task("stage0", mesh_slice={"stage": 0}, logical_axes=[("mlp", "model")]).name
      'stage0'
    """

    name: str | None = None
    mesh: Mesh | TaskMesh | None = None
    logical_axes: AxisRules | None = None
    mesh_slice: Mapping[str, int] | Iterable[tuple[str, int]] | None = None
    extra_axes: AxisRules | None = None
    split_backprop: Any = None
    loop_dependent_mesh_slice: Any = None
    remat: Any = None

    def __post_init__(self) -> None:
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"the name of a Task is a string, not {self.name!r}")
        if (
            self.name is not None and not self.name.isprintable()
        ):  # programs, tables, pictures and logs have it
            raise ValueError(f"the name of a Task is of printable characters, and {self.name!r} has others")
        where = ("mesh", "mesh_slice", "loop_dependent_mesh_slice")
        given = [name for name in where if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"{self} has both {given[0]}= and {given[1]}=: give its own mesh, or its slice of the "
                "MultiMesh"
            )
        mesh = self.mesh
        if isinstance(mesh, MultiMesh):
            mesh = mesh.mesh
        if not isinstance(mesh, Mesh | TaskMesh | None):
            raise TypeError(f"mesh= of {self} is a TaskMesh or a jax.sharding.Mesh, not {mesh!r}")
        object.__setattr__(self, "mesh", mesh)
        check_remat(self.remat, f"remat= of {self}")
        object.__setattr__(self, "mesh_slice", self._normal_slice())
        object.__setattr__(self, "split_backprop", self._normal_halves())
        object.__setattr__(self, "loop_dependent_mesh_slice", self._normal_moves())
        object.__setattr__(self, "logical_axes", self._normal_rules("logical_axes"))
        object.__setattr__(self, "extra_axes", self._normal_rules("extra_axes"))

    @property
    def axis_rules(self) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
        """The pairs of `logical_axes`, then those of `extra_axes`."""
        return (*_items(self.logical_axes or ()), *_items(self.extra_axes or ()))

    @property
    def is_name(self) -> bool:
        """Whether it has a name and nothing else."""
        others = (getattr(self, f.name) for f in fields(self) if f.name != "name")
        return self.name is not None and all(option in (None, ()) for option in others)

    def to_mesh(self, microbatch: int = 0) -> Mesh:
        """The `jax.sharding.Mesh` the task runs on; a slice of a MultiMesh has Auto axes.

        Args:
          microbatch: for which microbatch, if that makes a difference.

        Raises:
          ValueError: the task needs a current MultiMesh and there is none, or lacks the axis, index or
            device it names; or a slice for a microbatch is of another shape than that for the first.

        Example:
          >>> Task("t", mesh=TaskMesh(devices=[0], axis_names=("model",))).to_mesh().size
          1
        """
        try:
            if isinstance(self.mesh, TaskMesh):
                return self.mesh.to_mesh()
            if self.mesh is not None:
                return self.mesh
            if (meshes := self._loop_meshes) is not None:
                mesh = meshes[microbatch % len(meshes)]
                return mesh.to_mesh() if isinstance(mesh, TaskMesh) else mesh
            multimesh = current_multimesh()
            sliced = self.mesh_slice or self.loop_dependent_mesh_slice
            if multimesh is None and sliced:
                raise ValueError(
                    "it is a slice of the current MultiMesh, and none is current: "
                    "use it inside `with MultiMesh(...):`, or give it mesh="
                )
            if multimesh is None:
                return Mesh(np.array(jax.devices()), ("device",))
            if self.loop_dependent_mesh_slice is None:
                return multimesh.slice(**dict(self.mesh_slice)) if self.mesh_slice else multimesh.mesh
            first, mesh = (multimesh.slice(**self._slice_for(m, multimesh)) for m in (0, microbatch))
            if first.devices.shape != mesh.devices.shape:
                raise ValueError(
                    f"its slice for microbatch {microbatch} is {dict(mesh.shape)}, and that for microbatch 0 "
                    f"is {dict(first.shape)}: slices must be of one shape"
                )
            return mesh
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from None

    @property
    def _loop_meshes(self) -> tuple[Mesh | TaskMesh, ...] | None:
        """The meshes of the microbatches in turn, if it was given meshes rather than slices."""
        moves = self.loop_dependent_mesh_slice
        are_meshes = isinstance(moves, tuple) and all(isinstance(m, Mesh | TaskMesh) for m in moves)
        return moves if are_meshes else None

    def _slice_for(self, microbatch: int, multimesh: MultiMesh) -> dict[str, int]:
        moves = self.loop_dependent_mesh_slice
        if callable(moves):
            return dict(moves(microbatch))
        if isinstance(moves, str):
            if moves not in multimesh.shape:
                axes = ", ".join(map(repr, multimesh.shape))
                raise ValueError(f"cannot slice along {moves!r}: the MultiMesh has the axes {axes}")
            return {moves: microbatch % multimesh.shape[moves]}
        return {axis: indices[microbatch % len(indices)] for axis, indices in moves}

    @property
    def mesh_text(self) -> str:
        """Its submesh in words, which need not be there: "stage=0", or "TaskMesh(devices=[0])"."""
        if isinstance(self.mesh, TaskMesh):
            return repr(self.mesh)
        if self.mesh is not None:
            return ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        if self.loop_dependent_mesh_slice is not None:
            return "another for each microbatch"
        return ", ".join(f"{axis}={n}" for axis, n in _items(self.mesh_slice or ())) or "all"

    def __str__(self) -> str:
        return f"task {self.name!r}" if self.name is not None else "an unnamed task"

    def __repr__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"Task({', '.join(f'{name}={value!r}' for name, value in given if value not in (None, ()))})"

    def _normal_slice(self) -> tuple[tuple[str, int], ...] | None:
        if self.mesh_slice is None:
            return None
        try:
            pairs = [(axis, operator.index(index)) for axis, index in _items(self.mesh_slice)]
            if not all(isinstance(axis, str) for axis, _ in pairs):
                raise TypeError
            return tuple(sorted(pairs))
        except (TypeError, ValueError):
            raise ValueError(
                f'mesh_slice= of {self} is an index for each axis, like {{"stage": 0}}, '
                f"not {self.mesh_slice!r}"
            ) from None

    def _normal_halves(self) -> tuple[str, str] | None:
        halves = self.split_backprop
        if halves is None:
            return None
        names = () if isinstance(halves, (str, bool)) else tuple(halves)
        if len(names) != 2 or not all(isinstance(name, str) for name in names) or len(set(names)) < 2:
            raise ValueError(
                f"split_backprop= of {self} is two names, of the part of the backward that others wait for "
                f"and of the rest, not {halves!r}"
            )
        return names

    def _normal_moves(self) -> Any:
        moves = self.loop_dependent_mesh_slice
        if moves is None or isinstance(moves, str) or callable(moves):
            return moves
        if isinstance(moves, list | tuple) and moves and all(isinstance(m, Mesh | TaskMesh) for m in moves):
            if len({tuple(m.shape.items()) for m in moves}) > 1:
                shapes = ", ".join(str(dict(m.shape)) for m in moves)
                raise ValueError(
                    f"loop_dependent_mesh_slice= of {self} has meshes of several shapes: {shapes}"
                )
            return tuple(moves)
        try:
            normal = tuple(
                sorted((str(a), tuple(operator.index(i) for i in indices)) for a, indices in _items(moves))
            )
        except TypeError:
            normal = ()
        if not normal or not all(indices for _, indices in normal):
            raise ValueError(
                f"loop_dependent_mesh_slice= of {self} is an axis of the MultiMesh, indices along axes such "
                f'as {{"stage": (0, 1)}}, meshes, or a function from the microbatch to a mesh_slice, not '
                f"{moves!r}"
            )
        return normal

    def _normal_rules(self, field: str) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
        rules = getattr(self, field)
        normal = []
        try:
            for logical, axes in _items(rules or ()):
                axes = axes if axes is None or isinstance(axes, str) else tuple(axes)
                if not all(isinstance(name, str) for name in (logical, *(axes or ()))):
                    raise TypeError
                normal.append((logical, axes))
        except (TypeError, ValueError):
            raise ValueError(
                f"{field}= of {self} is a list of pairs (logical axis, mesh axis | tuple of them | None), "
                f"not {rules!r}"
            ) from None
        return tuple(normal)


def _items(pairs: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(pairs, Mapping):
        return pairs.items()
    if isinstance(pairs, str):
        raise TypeError
    pairs = tuple(pairs)
    if any(isinstance(pair, str) for pair in pairs):  # ("ab", "cd") would unpack into letters
        raise TypeError
    return pairs


def check_remat(remat: Any, what: str) -> None:
    """Raises TypeError unless `remat` is None, a bool, or a policy; `what` names it in the message."""
    if not (remat is None or isinstance(remat, bool) or callable(remat)):
        raise TypeError(
            f"{what} is True, or a policy such as jax.checkpoint_policies.dots_saveable itself, not {remat!r}"
        )
