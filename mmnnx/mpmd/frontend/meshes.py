"""The meshes of one program: one object for each group of devices, with a name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from mmnnx.mpmd.ir.shardings import DividedSharding, mesh_of, transferred
from mmnnx.sharding.division import has_layout, ways_to_divide
from mmnnx.sharding.mesh import MultiMesh, auto_mesh, devices_key
from mmnnx.sharding.registered_tasks import placed_tasks
from mmnnx.sharding.task import Task
from mmnnx.sharding.task_scope import scope_name


class Meshes:
    """Makes equal groups of devices one Mesh object, and names them for messages and pictures.

    Attributes:
      multimesh: the MultiMesh that is current.
      explicit: for each mesh that was given with Explicit axes, that one.
      moving: for the mesh of each task with `loop_dependent_mesh_slice` (a moving mesh), from the number of a
        microbatch to the mesh that it runs on.
    """

    def __init__(self, multimesh: MultiMesh | None):
        self.multimesh = multimesh
        # By shape and devices.
        self._known: dict[tuple[tuple[int, ...], tuple[tuple[str, int], ...]], Mesh] = {}
        self.explicit: dict[Mesh, Mesh] = {}
        self._names: dict[Mesh, str] = {}
        self._scoped: set[Mesh] = set()  # of tasks that have scopes
        self.moving: dict[Mesh, Callable[[int], Mesh]] = {}
        self._moving_names: dict[Mesh, str | None] = {}

    def canonical(self, mesh: Mesh, name: str | None = None) -> Mesh:
        """The one Mesh with the devices of `mesh`, with Auto axes; the first name given to it stays."""
        key = mesh.devices.shape, devices_key(mesh)
        given, mesh = mesh, self._known.setdefault(key, auto_mesh(mesh))
        if AxisType.Explicit in given.axis_types:
            self.explicit.setdefault(mesh, given)
        if name:
            self._names.setdefault(mesh, name)
        return mesh

    def of_task(self, task: Task) -> Mesh:
        """The mesh of a task; for one with `loop_dependent_mesh_slice` a moving mesh."""
        if task.loop_dependent_mesh_slice is None:
            mesh = self.canonical(task.to_mesh(), task.name)
            self._scoped.add(mesh)
            return mesh
        mesh = self.canonical(task.to_mesh())
        moving = Mesh(mesh.devices[..., None], (*mesh.axis_names, f"microbatch of {scope_name(task)}"))
        self.moving[moving] = functools.cache(lambda m: self.canonical(task.to_mesh(m)))
        self._moving_names[moving] = task.name
        return moving

    def sharding(self, sharding: NamedSharding, name: str | None = None) -> NamedSharding:
        """The same sharding on the canonical mesh, axis by axis; that of a `DividedArray` as it is."""
        if has_layout(sharding.mesh):
            return sharding
        return transferred(sharding, self.canonical(mesh_of(sharding), name))

    def as_given(self, sharding: NamedSharding) -> NamedSharding:
        """A sharding of what is handed to the caller: with Explicit axes, where they were given."""
        given = self.explicit.get(mesh_of(sharding))
        return sharding if given is None else transferred(sharding, given)

    def divided(self, sharding: NamedSharding) -> DividedSharding | None:
        """How an array is divided between tasks, if it is: along a dimension that is sharded over an axis
        whose slices are meshes of tasks. Call it once all other meshes are known.
        """
        if not has_layout(sharding.mesh) and self._is_task(mesh_of(sharding)):
            return None
        for way in ways_to_divide(sharding):
            if way.sizes is not None or any(map(self._is_used, way.meshes)):
                pieces = tuple(self.sharding(NamedSharding(mesh, way.spec)) for mesh in way.meshes)
                return DividedSharding(way.dim, way.axis, sharding, pieces, way.sizes)
        return None

    def _is_task(self, mesh: Mesh) -> bool:
        """Whether a task has state or a scope on a mesh."""
        return mesh in self._scoped or bool(placed_tasks(mesh, self.multimesh))

    def _is_used(self, mesh: Mesh) -> bool:
        """Whether something of this function names a mesh, or a task has state there."""
        known = (mesh.devices.shape, devices_key(mesh)) in self._known
        return known or bool(placed_tasks(mesh, self.multimesh))

    def spanning(self) -> set[Mesh]:
        """Meshes that consist of others, as the whole MultiMesh does: what is there is on all of those.

        A mesh with devices that no other has is none of them, nor is one where a task has state or a scope.
        """
        groups = [(frozenset(devices), mesh) for (_, devices), mesh in self._known.items()]
        whole = frozenset(devices_key(self.multimesh.mesh)) if self.multimesh else None
        found = set()
        for devices, mesh in groups:
            parts = [other for other, _ in groups if other < devices]
            if parts and not self._is_task(mesh) and devices in (whole, frozenset().union(*parts)):
                found.add(mesh)
        return found

    def tasks(self) -> list[Mesh]:
        """The meshes that a program is partitioned over; one at least."""
        spanning = self.spanning()
        return [m for m in self._known.values() if m not in spanning] or [
            self.canonical(Mesh(np.array(jax.devices()[:1]), ("device",)))
        ]

    def names(self) -> dict[Mesh, str]:
        """A name for every mesh: that of its task, else of its slice of the MultiMesh, else a number."""
        names: dict[Mesh, str] = {}
        for n, mesh in enumerate(self._known.values()):
            tasks = placed_tasks(mesh, self.multimesh)
            name = self._names.get(mesh) or (tasks[0].name if len(tasks) == 1 else None)
            name = name or self._slice(mesh) or f"mesh{n}"
            names[mesh] = name if name not in names.values() else f"{name}.{n}"
        return names | {m: self._moving_names[m] or names[where(0)] for m, where in self.moving.items()}

    def labels(self) -> dict[Mesh, str]:
        """The names with the numbers of the devices, for messages."""
        return {m: f"{name} (devices {[d.id for d in m.devices.flat]})" for m, name in self.names().items()}

    def _slice(self, mesh: Mesh) -> str | None:
        if self.multimesh is None:
            return None
        if self.multimesh.mesh.devices.tolist() == mesh.devices.tolist():
            return "all"
        for axis, size in self.multimesh.shape.items():
            for i in range(size if size > 1 else 0):
                if self.multimesh.slice(**{axis: i}).devices.tolist() == mesh.devices.tolist():
                    return f"{axis}{i}"
        return None
