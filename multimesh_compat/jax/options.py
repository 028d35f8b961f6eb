"""From the documented arguments of a task to an `mmnnx.Task`."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import mmnnx as mm
from mmnnx.sharding.mesh import current_multimesh


def make_task(
    default_name: str, name: str | None, task: mm.Task | None, kwargs: Mapping[str, Any]
) -> mm.Task:
    """The Task that the arguments of `task` stand for.

    Args:
      default_name: its name where `name` is None.
      name, task, kwargs: as given to `task`.

    Raises:
      ValueError, TypeError: as `task` does.

    Example:
      >>> make_task("dense", None, None, {"devices": [0, 1], "device_axes": ("x",)}).mesh.axis_names
      ('x',)
    """
    if isinstance(name, mm.Task):
        raise TypeError("the second argument of task is a name: give a Task as task=")
    if task is not None:
        if not isinstance(task, mm.Task):
            raise TypeError(f"task= is a Task, not {task!r}")
        if kwargs:
            raise TypeError(f"give task= or the fields of one, not both: {', '.join(sorted(kwargs))}")
        return task if name is None else replace(task, name=name)
    name = default_name if name is None else name
    options = dict(kwargs)
    mesh, devices, axes = (options.pop(key, None) for key in ("mesh", "devices", "device_axes"))
    if unknown := options.keys() - {f.name for f in fields(mm.Task)}:
        raise TypeError(
            f"task {name!r} has no option {', '.join(sorted(unknown))}: there are devices, device_axes, "
            f"{', '.join(f.name for f in fields(mm.Task) if f.name != 'name')}"
        )
    sliced = [s for s in ("mesh_slice", "loop_dependent_mesh_slice") if options.get(s) is not None]
    given = [key for key, value in (("mesh", mesh), ("devices", devices)) if value is not None]
    if len(given + sliced) > 1:
        raise ValueError(f"task {name!r} has {'= and '.join(given + sliced)}=: one says where it runs")
    if axes is not None and sliced:
        raise ValueError(
            f"task {name!r} has device_axes= and {sliced[0]}=: a slice keeps the axis names of its MultiMesh"
        )
    if options.get("logical_axes") and mesh is None and axes is None and not sliced:
        raise ValueError(
            f"task {name!r} has logical_axes= but no mesh= or device_axes= whose axes they could stand for"
        )
    if devices is not None:
        mesh = submesh(devices, axes, f"task {name!r}")
    elif axes is not None:
        mesh = _renamed(mesh, axes, f"task {name!r}")
    return mm.Task(name, mesh=mesh, **options)


def submesh(devices: Any, axes: Any, what: str) -> Mesh | mm.TaskMesh:
    """A mesh of jax devices or of device numbers, of their shape."""
    (mesh,) = submeshes(devices, None, axes, None, what)
    return mesh


def submeshes(
    devices: Any, dims: Any, axes: Any, size: int | None, what: str
) -> tuple[Mesh | mm.TaskMesh, ...]:
    """Meshes of jax devices or of device numbers, which these fill one after the other.

    Args:
      devices: a list, or an array of the shape of the mesh.
      dims: the shape of each. Default: that of the devices, with the first dimension divided.
      axes: a name for each dimension.
      size: how many devices each has. Default: as many as `dims` says, else all.
      what: what messages call it.
    """
    array = np.asarray(devices, dtype=object)
    flat = list(array.flat)
    numbers = all(hasattr(d, "__index__") for d in flat)
    if array.ndim == 0 or not (numbers or all(isinstance(d, jax.Device) for d in flat)):
        raise TypeError(
            f"devices= of {what} is a list or array of jax devices, or of device numbers, not {devices!r}"
        )
    try:
        shape = array.shape if dims is None else tuple(map(operator.index, dims))
    except TypeError:
        raise TypeError(f"dims= of {what} is a size for each axis, like (2, 2), not {dims!r}") from None
    if size is not None and dims is None:
        shape = (size // math.prod(shape[1:]), *shape[1:])
    count = math.prod(shape)
    if not flat or count < 1 or len(flat) % count or count != (size or count):
        parts = "" if size is None else f", with loop_submesh_size={size}"
        raise ValueError(f"{what} has {len(flat)} devices for a mesh of shape {shape}{parts}")
    if repeated := sorted({str(d) for d in flat if flat.count(d) > 1}):
        raise ValueError(f"devices= of {what} repeats {', '.join(repeated)}")
    # Names that no constraint has, so that each means replication.
    names = tuple(f"__axis{n}__" for n in range(len(shape))) if axes is None else _axes(axes, shape, what)
    rows = (flat[n : n + count] for n in range(0, len(flat), count))
    if numbers:
        return tuple(mm.TaskMesh(devices=row, axis_sizes=shape, axis_names=names) for row in rows)
    return tuple(Mesh(np.array(row, dtype=object).reshape(shape), names) for row in rows)


def divided(mesh: Any, axes: Any, size: int | None, what: str) -> tuple[Mesh | mm.TaskMesh, ...]:
    """A mesh with other axis names, if there are any; divided into meshes of `size` devices each."""
    if not isinstance(mesh, Mesh | mm.TaskMesh | mm.MultiMesh):
        raise TypeError(f"mesh= of {what} is a jax.sharding.Mesh, a TaskMesh or a MultiMesh, not {mesh!r}")
    if axes is not None:
        mesh = _renamed(mesh, axes, what)
    if size is None:
        return (mesh.mesh if isinstance(mesh, mm.MultiMesh) else mesh,)
    devices = np.reshape(np.array(mesh.devices, dtype=object), tuple(mesh.shape.values()))
    return submeshes(devices, None, tuple(mesh.axis_names), size, what)


def _renamed(mesh: Any, axes: Any, what: str) -> Mesh | mm.TaskMesh:
    """`mesh`, else that of the program as it is now, with other axis names."""
    if mesh is None:
        mesh = current_multimesh() or Mesh(np.array(jax.devices()), ("device",))
    if isinstance(mesh, mm.TaskMesh):
        names = _axes(axes, mesh.axis_sizes, what)
        return mm.TaskMesh(devices=mesh.devices, axis_sizes=mesh.axis_sizes, axis_names=names)
    if not isinstance(mesh, Mesh | mm.MultiMesh):
        raise TypeError(f"mesh= of {what} is a jax.sharding.Mesh, a TaskMesh or a MultiMesh, not {mesh!r}")
    return Mesh(mesh.devices, _axes(axes, mesh.devices.shape, what))


def _axes(axes: Any, shape: Sequence[int], what: str) -> tuple[str, ...]:
    names = () if isinstance(axes, str) else tuple(axes)
    if isinstance(axes, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"device_axes= of {what} is a name for each axis, like ('x', 'y'), not {axes!r}")
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise ValueError(
            f"device_axes={names} of {what} do not fit a mesh of shape {tuple(shape)}: give {len(shape)} "
            "names that differ"
        )
    return names
