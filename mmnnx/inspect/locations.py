"""Where each array lives, by its own sharding or by a TaskSharding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.inspect.units import ranges_text
from mmnnx.printable import printable
from mmnnx.sharding.divided_array import DividedArray, named_sharding
from mmnnx.sharding.division import Division, Way, ways_to_divide
from mmnnx.sharding.mesh import current_multimesh, program_devices
from mmnnx.sharding.path_filter import Path, path_text
from mmnnx.sharding.placement import TaskSharding
from mmnnx.sharding.registered_tasks import placed_tasks, rule_of_state
from mmnnx.sharding.state_placement import StatePlacement
from mmnnx.sharding.task import Task

SCALAR = "a scalar without a rule: on every mesh"
OWN = "its own sharding"


@dataclass(frozen=True)
class Home:
    """A submesh where state lives between calls; each of its devices holds a shard.

    Attributes:
      task: the names of the tasks whose state is there. Without tasks, the submesh: its slice of the
        MultiMesh ("stage=0"), "all", or its devices.
      axes: the axes of the submesh that are longer than one, with their sizes.
      devices: numbers as `TaskMesh` counts them.
    """

    task: str
    axes: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """Where one array lives.

    Attributes:
      home: its home; of one that is divided between tasks, that of all of them.
      spec: its spec as text, "" if it has none.
      shard_bytes: the bytes on each device; of one that is divided, the most.
      pieces: where its pieces live, if it is divided between tasks, with the size of each.
      why: the rule of a TaskSharding that says so, or that it is the array's own sharding.
    """

    home: Home
    spec: str
    shard_bytes: int
    pieces: tuple[tuple[Placed, int], ...] = ()
    why: str = dataclasses.field(default="", compare=False)


def sort_homes(homes: Iterable[Home]) -> tuple[list[Home], list[Home]]:
    """Homes sorted by their devices, and apart from them those that contain others (scalars live on all)."""
    found = sorted(set(homes), key=lambda home: (home.devices, home.task))
    sets = [frozenset(home.devices) for home in found]
    wide = [home for home, own in zip(found, sets) if any(other < own for other in sets)]
    return [home for home in found if home not in wide], wide


class Homes:
    """Finds the homes of arrays. Make it inside `with MultiMesh(...):`, if there is one.

    Args:
      sharding: says where state is going to live; None for the arrays' own shardings.
    """

    def __init__(self, sharding: TaskSharding | None = None):
        self._placement = None if sharding is None else StatePlacement(sharding)
        self._multimesh = current_multimesh()
        self._numbers = {device: n for n, device in enumerate(program_devices())}
        self._homes: dict[Any, Home] = {}

    def find(self, paths: Sequence[Path], value: Any, arrays: Sequence[Any]) -> list[Placed | None]:
        """Where the arrays of `value`, a Variable or an array itself, live; None where unknown.

        Args:
          paths: all paths that lead to it.

        Raises:
          PlacementError: the TaskSharding cannot place it.
        """
        if self._placement is None:
            return [self._of_array(paths, value, x) for x in arrays]
        return [self._by_rule(self._placement, paths, value, x) for x in arrays]

    def check_used(self) -> None:
        """Raises PlacementError for rules that placed nothing, as `mm.jit` does."""
        if self._placement is not None:
            self._placement.check_used()

    def _by_rule(self, placement: StatePlacement, paths: Sequence[Path], value: Any, x: Any) -> Placed | None:
        _, match = placement.find(paths, value, tuple(x.shape)) or (None, None)
        if match is None:
            return self._placed(x, placement.everywhere(), ["all"], SCALAR) if x.shape == () else None
        names = [task.name or "" for task in _tasks(match.task)]
        of_parameter = "its parameter's " if _compat.is_optimizer_state(value) and not match.own else ""
        return self._placed(
            x, match.sharding, names, of_parameter + placement.sharding.rule_text(match.index)
        )

    def _of_array(self, paths: Sequence[Path], value: Any, x: Any) -> Placed | None:
        sharding = named_sharding(x) or getattr(x, "sharding", None)
        if not isinstance(sharding, Sharding):
            return None
        if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
            return None  # an AbstractMesh has axes and no devices
        return self._placed(x, sharding, [], self._why(paths, value, x, sharding))

    def _why(self, paths: Sequence[Path], value: Any, x: Any, sharding: Sharding) -> str:
        """Why an array has its sharding, as far as that is known."""
        for path in paths:
            found = rule_of_state(path, sharding, self._multimesh)
            if found is not None:
                placed, rule = found
                if placed == tuple(map(str, path)):
                    return rule
                of_parameter = _compat.is_optimizer_state(value)
                return f"its parameter's {rule}" if of_parameter else f"{rule}, as {path_text(placed)}"
        everywhere = self._multimesh is not None and self._multimesh.mesh.size == len(sharding.device_set)
        if everywhere and x.shape == ():
            return SCALAR
        chosen = getattr(x, "committed", True) or isinstance(x, DividedArray)
        return OWN if chosen else "nobody placed it: JAX's default device"

    def _placed(self, x: Any, sharding: Sharding, tasks: Sequence[str], why: str) -> Placed:
        """Where an array lives.

        Args:
          tasks: the names of its task, or of those of its pieces; none if they are not known.
          why: as of `Placed`.
        """
        spec = type(sharding).__name__ if len(sharding.device_set) > 1 else ""
        if isinstance(sharding, NamedSharding):
            spec = spec_text(sharding.spec)
            mesh = sharding.mesh
            is_task = isinstance(mesh, Mesh) and bool(placed_tasks(mesh, self._multimesh))
            for way in ways_to_divide(sharding):
                of_tasks = len(tasks) > 1 or way.sizes is not None
                if is_task and not of_tasks:
                    break
                if of_tasks or any(placed_tasks(mesh, self._multimesh) for mesh in way.meshes):
                    return self._in_pieces(x, sharding, way, tasks, why)
        home = self._home_of(sharding, ", ".join(tasks))
        shard = math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
        return Placed(home, spec, shard, why=why)

    def _in_pieces(self, x: Any, sharding: NamedSharding, way: Way, tasks: Sequence[str], why: str) -> Placed:
        """Where an array lives that is divided between tasks."""
        count = len(way.meshes)
        sizes = way.sizes or (x.shape[way.dim] // count,) * count
        pieces: list[tuple[Placed, int]] = []
        for n, (mesh, size) in enumerate(zip(way.meshes, sizes)):
            shape = (*x.shape[: way.dim], size, *x.shape[way.dim + 1 :])
            own = NamedSharding(mesh, way.spec)
            home = self._home_of(own, tasks[n] if tasks else "")
            shard = math.prod(own.shard_shape(shape)) * x.dtype.itemsize
            pieces.append((Placed(home, spec_text(way.spec), shard), math.prod(shape)))
        most = max(placed.shard_bytes for placed, _ in pieces)
        home = self._home_of(sharding, ", ".join(tasks))
        return Placed(home, spec_text(sharding.spec), most, tuple(pieces), why)

    def _home_of(self, sharding: Sharding, task: str) -> Home:
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        key = (mesh if mesh is not None else frozenset(sharding.device_set), task)
        if key not in self._homes:
            self._homes[key] = self._home(sharding, mesh, task)
        return self._homes[key]

    def _home(self, sharding: Sharding, mesh: Any, task: str) -> Home:
        devices = tuple(sorted(map(self._number, sharding.device_set)))
        if mesh is None:
            return Home(task or _device_label(devices), "", devices)
        return Home(task or self._label(mesh, devices), _axes(mesh.shape), devices)

    def _number(self, device: Any) -> int:
        return self._numbers.get(device, device.id)

    def _label(self, mesh: Mesh, devices: tuple[int, ...]) -> str:
        names = [task.name for task in placed_tasks(mesh, self._multimesh) if task.name is not None]
        if names:
            return ", ".join(names)
        if self._multimesh is None:
            return _device_label(devices)
        whole = self._multimesh.mesh
        if mesh.devices.size == whole.devices.size:
            return "all"
        at = np.argwhere(whole.devices == mesh.devices.flat[0])
        if mesh.axis_names == whole.axis_names and len(at):
            index = {
                axis: int(n)
                for axis, n in zip(whole.axis_names, at[0])
                if mesh.shape[axis] == 1 < whole.shape[axis]
            }
            if self._multimesh.slice(**index) == mesh:
                return printable(", ".join(f"{axis}={n}" for axis, n in index.items()))
        return _device_label(devices)


def _tasks(task: Task | Division) -> Sequence[Task]:
    return task.tasks if isinstance(task, Division) else [task]


def spec_text(spec: PartitionSpec) -> str:
    """A PartitionSpec without quotation marks.

    >>> spec_text(PartitionSpec("x", None, ("y", "z")))
    'P(x, None, (y, z))'
    """
    entries = ("(" + ", ".join(map(str, e)) + ")" if isinstance(e, tuple) else str(e) for e in spec)
    return printable(f"P({', '.join(entries)})")


def _axes(shape: Mapping[str, int]) -> str:
    return printable(", ".join(f"{axis}={size}" for axis, size in shape.items() if size > 1))


def _device_label(devices: Sequence[int]) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {ranges_text(devices)}"
