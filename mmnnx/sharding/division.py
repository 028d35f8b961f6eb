"""A dimension of state that is divided between tasks, as the layers of a stack that is scanned are."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.sharding.task import Task

TASKS = "tasks"
"""The axis along which meshes follow each other that are no slices of one MultiMesh."""


@dataclass(frozen=True)
class Division:
    """Tasks between which a dimension is divided: the first has the first piece, and so on.

    In a TaskSharding a sequence of tasks means `Division(tasks)`. The array stays one `jax.Array`: with equal
    pieces, each on a mesh of its own, one with a NamedSharding over all of them, else a `DividedArray`.
    `mm.jit` computes with each piece where it lives.

    Args:
      tasks: the tasks, in order. Their meshes have the same axes. Two may have the same mesh, in a pipeline
        that comes to it more than once; else they have no device in common.
      dim: the dimension.
      sizes: the sizes of the pieces. Default: equal, or as equal as can be, the first ones larger.

    Raises:
      TypeError: `tasks` that are no Tasks.
      ValueError: no tasks, a negative dimension, or sizes of another number or below one.

    Example:
      >>> stages = [Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(4)]
      >>> str(Division(stages)), Division(stages).sizes_of(10)
      ('tasks stage0, stage1, stage2, stage3', (3, 3, 2, 2))
    """

    tasks: Sequence[Task]
    dim: int = 0
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        tasks = tuple(self.tasks) if isinstance(self.tasks, Iterable) else (self.tasks,)
        if not all(isinstance(task, Task) for task in tasks):
            raise TypeError(f"a Division is between Tasks, not {self.tasks!r}")
        if not tasks:
            raise ValueError("a Division is between tasks, and has none")
        dim = operator.index(self.dim)
        if dim < 0:
            raise ValueError(f"dim= of a Division is counted from the front, from 0, not {dim}")
        object.__setattr__(self, "tasks", tasks)
        object.__setattr__(self, "dim", dim)
        if self.sizes is not None:
            sizes = tuple(map(operator.index, self.sizes))
            if len(sizes) != len(tasks) or min(sizes) < 1:
                raise ValueError(
                    f"sizes= of a Division is a size of at least 1 for each of its {len(tasks)} tasks, not "
                    f"{list(sizes)}"
                )
            object.__setattr__(self, "sizes", sizes)

    @property
    def name(self) -> str:
        """The names of the tasks."""
        return ", ".join(str(task.name) for task in self.tasks)

    def sizes_of(self, size: int) -> tuple[int, ...]:
        """The sizes of the pieces of a dimension of this size."""
        return tuple(self.sizes) if self.sizes is not None else even_sizes(size, len(self.tasks))

    def tasks_by_key(self, size: int) -> list[tuple[str, Task]]:
        """The tasks, each with what the state path of its piece ends with (`piece_keys`)."""
        return list(zip(piece_keys(self.sizes_of(size)), self.tasks))

    def to_mesh(self) -> Mesh:
        """The mesh of all tasks: theirs, one after the other along an axis, each once.

        Raises:
          ValueError: meshes with other axes, or with some devices in common.
        """
        return join(*self._meshes())[0]

    def sharding(self, spec: PartitionSpec, size: int) -> NamedSharding:
        """The sharding of the whole array, over the mesh of all tasks.

        Where pieces differ in size, or several are on one mesh, the name of the axis says so.

        Args:
          spec: that of a piece on the mesh of its task.
          size: of the dimension.

        Raises:
          ValueError: as `to_mesh` does.
        """
        meshes, axis = self._meshes()
        return joined_sharding(meshes, axis, self.dim, spec, self.sizes_of(size))

    def _meshes(self) -> tuple[list[Mesh], str]:
        """The meshes of the tasks, and the axis along which they follow each other."""
        meshes = [task.to_mesh() for task in self.tasks]
        first = meshes[0]
        owner: dict[Any, tuple[Task, Mesh]] = {}
        for task, mesh in zip(self.tasks, meshes):
            if mesh.shape != first.shape:
                raise ValueError(
                    f"{task} has a mesh of {dict(mesh.shape)}, and {self.tasks[0]} one of "
                    f"{dict(first.shape)}: what is divided between tasks is sharded alike in all of them"
                )
            for device in mesh.devices.flat:
                other, its = owner.setdefault(device, (task, mesh))
                if its != mesh:
                    raise ValueError(
                        f"{other} and {task} are both on device {device.id}, and their meshes differ: tasks "
                        "that state is divided between have the same mesh, or no device in common"
                    )
        return meshes, self._sliced_axis(first) or TASKS

    def _sliced_axis(self, mesh: Mesh) -> str | None:
        """The axis of the MultiMesh that the tasks are slices along, if it is one."""
        if any(not isinstance(task.mesh_slice, tuple) for task in self.tasks):
            return None
        slices = [dict(task.mesh_slice or ()) for task in self.tasks]
        axes = [axis for axis in slices[0] if len({s.get(axis) for s in slices}) > 1]
        alike = all(s.keys() == slices[0].keys() for s in slices)
        return axes[0] if len(axes) == 1 and alike and mesh.shape[axes[0]] == 1 else None

    def __repr__(self) -> str:
        sizes = f", sizes={list(self.sizes)}" if self.sizes is not None and len(self.sizes) <= 16 else ""
        first, last = self.tasks[0].name, self.tasks[-1].name
        return f"Division({len(self.tasks)} tasks, {first!r} to {last!r}, dim={self.dim}{sizes})"

    def __str__(self) -> str:
        along = f" along dimension {self.dim}" if self.dim else ""
        return f"tasks {self.name}{along}"


def even_sizes(size: int, count: int) -> tuple[int, ...]:
    """Sizes of so many pieces, as equal as can be, the first ones larger.

    Example:
      >>> even_sizes(10, 4)
      (3, 3, 2, 2)
    """
    return tuple(size // count + (n < size % count) for n in range(count))


def join(meshes: Sequence[Mesh], axis: str) -> tuple[Mesh, tuple[int, ...]]:
    """Meshes one after the other along an axis, each once; and for each its number there."""
    alone = list(dict.fromkeys(meshes))
    order, first = tuple(map(alone.index, meshes)), meshes[0]
    if axis == TASKS:
        return Mesh(np.stack([mesh.devices for mesh in alone]), (TASKS, *first.axis_names)), order
    along = first.axis_names.index(axis)
    return Mesh(np.concatenate([mesh.devices for mesh in alone], axis=along), first.axis_names), order


def joined_sharding(
    meshes: Sequence[Mesh], axis: str, dim: int, spec: PartitionSpec, sizes: Sequence[int]
) -> NamedSharding:
    """The sharding of an array in pieces.

    Args:
      meshes: of the pieces, with the same axes.
      axis: the axis along which they follow each other; TASKS for one that is added.
      dim: the dimension that is divided.
      spec: of each piece on its mesh.
      sizes: of the pieces along that dimension.
    """
    mesh, order = join(meshes, axis)
    name = _axis_with_layout(axis, sizes, order, mesh.shape[axis])
    mesh = Mesh(mesh.devices, [name if a == axis else a for a in mesh.axis_names])
    entries = [*spec, *[None] * (dim + 1 - len(spec))]
    inner = entries[dim]
    more = () if inner is None else (inner,) if isinstance(inner, str) else tuple(inner)
    entries[dim] = (name, *more) if more else name
    return NamedSharding(mesh, PartitionSpec(*entries))


def _axis_with_layout(axis: str, sizes: Sequence[int], order: tuple[int, ...], slices: int) -> str:
    """What an axis is called in the sharding of an array that is divided over it.

    Its own name, if its slices have one piece each, in order and of one size, as JAX divides an array. Else
    the name says how: `stage[3@0 3@1 2@2]` is pieces of 3, 3 and 2 on slices 0, 1 and 2.
    """
    if len(set(sizes)) == 1 and order == tuple(range(slices)):
        return axis
    return f"{axis}[{' '.join(f'{n}@{i}' for n, i in zip(sizes, order))}]"


class Way(NamedTuple):
    """A way in which an array may be divided between tasks.

    Attributes:
      dim: the dimension.
      axis: the axis that it is sharded over first of all, without what its name says of the layout.
      meshes: of the pieces.
      spec: that of each piece.
      sizes: of the pieces; None if they are equal.
    """

    dim: int
    axis: str
    meshes: tuple[Mesh, ...]
    spec: PartitionSpec
    sizes: tuple[int, ...] | None


_LAYOUT = re.compile(r"(.*)\[((?:\d+@\d+ ?)+)\]")


@functools.lru_cache(maxsize=4096)  # each step asks for each array
def ways_to_divide(sharding: NamedSharding) -> tuple[Way, ...]:
    """The ways in which an array may be divided between tasks: it is, if the slices are meshes of tasks.

    If the name of an axis has the layout of a `DividedArray`, that is the only way.
    """
    mesh, found = sharding.mesh, []
    if not isinstance(mesh, Mesh):  # an AbstractMesh has no devices
        return ()
    for dim, entry in enumerate(sharding.spec):
        name, *rest = entry if isinstance(entry, tuple) else (entry,)
        said = _LAYOUT.fullmatch(name) if isinstance(name, str) else None
        if name not in mesh.shape or (mesh.shape[name] == 1 and said is None):
            continue
        axis, pairs = (name, []) if said is None else (said[1], [p.split("@") for p in said[2].split()])
        sizes = tuple(int(n) for n, _ in pairs) or None
        order = [int(i) for _, i in pairs] or range(mesh.shape[name])
        spec = PartitionSpec(*sharding.spec[:dim], tuple(rest) or None, *sharding.spec[dim + 1 :])
        slices = [_slice(mesh, name, axis, i) for i in range(mesh.shape[name])]
        found.append(Way(dim, axis, tuple(slices[i] for i in order), spec, sizes))
    return tuple([way for way in found if way.sizes is not None] or found)


def has_layout(mesh: Any) -> bool:
    """Whether a mesh is that of a `DividedArray`: JAX does not know how arrays are divided over it."""
    return any(isinstance(a, str) and _LAYOUT.fullmatch(a) for a in mesh.axis_names)


def undivided(sharding: NamedSharding) -> NamedSharding:
    """The same on a mesh that JAX knows, for an array that has the mesh of a `DividedArray` and is none.

    Example:
      >>> with mesh:
      ...     of_layers = Division(stages).sharding(PartitionSpec(), 10)  # ten layers, on four stages
      >>> undivided(NamedSharding(of_layers.mesh, PartitionSpec())).mesh.axis_names
      ('stage', 'model')
    """
    if not has_layout(sharding.mesh) or any(way.sizes is not None for way in ways_to_divide(sharding)):
        return sharding
    mesh = sharding.mesh
    names = [said[1] if (said := _LAYOUT.fullmatch(str(a))) else a for a in mesh.axis_names]
    return NamedSharding(Mesh(mesh.devices, names), sharding.spec)


def _slice(mesh: Mesh, name: str, axis: str, i: int) -> Mesh:
    """One slice of a mesh along an axis, by its number. The axis that a Division made up is gone in it."""
    number = mesh.axis_names.index(name)
    if axis == TASKS:
        names = [other for n, other in enumerate(mesh.axis_names) if n != number]
        return Mesh(mesh.devices.take(i, axis=number), names)
    names = [axis if other == name else other for other in mesh.axis_names]
    return Mesh(mesh.devices.take([i], axis=number), names)


def piece_keys(sizes: Sequence[int]) -> list[str]:
    """What the state path of a piece ends with, for pieces of these sizes.

    Example:
      >>> piece_keys((2, 2, 1))
      ['[0:2]', '[2:4]', '[4:5]']
    """
    return [f"[{start}:{start + size}]" for start, size in zip(starts(sizes), sizes)]


def starts(sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes begin."""
    return list(accumulate(sizes, initial=0))[:-1]
