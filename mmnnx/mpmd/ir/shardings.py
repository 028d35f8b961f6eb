"""Shardings over the meshes of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import equations_in
from mmnnx.sharding.divided_array import DividedArray


@dataclasses.dataclass(frozen=True)
class DividedSharding:
    """The sharding of an array in pieces, each on a mesh.

    Attributes:
      dim: the dimension that is divided.
      axis: the mesh axis that it is divided over.
      whole: the sharding, over all of these meshes. If the name of that axis has a layout, the array is a
        `DividedArray`.
      pieces: that of each piece, over one of them.
      lengths: the sizes of the pieces; None if they are equal.
    """

    dim: int
    axis: Any
    whole: NamedSharding
    pieces: tuple[NamedSharding, ...]
    lengths: tuple[int, ...] | None = None

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sizes of the pieces of an array."""
        return self.lengths or (shape[self.dim] // len(self.pieces),) * len(self.pieces)


def mesh_of(sharding: NamedSharding) -> Mesh:
    """The mesh of devices that a sharding of arrays is over.

    Raises:
      ValueError: for a sharding over an AbstractMesh.
    """
    if isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    raise ValueError(f"{sharding} is over an AbstractMesh, which has no devices: give mm.jit one over a Mesh")


def explicit_mesh(aval: Any) -> AbstractMesh | None:
    """The mesh with Explicit axes that a type has a sharding over, if any."""
    sharding = getattr(aval, "sharding", None)
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return sharding.mesh.abstract_mesh
    return None


def same_shape(a: Mesh, b: Mesh) -> bool:
    """Whether each shard on one mesh has a place of its own on the other."""
    return a.devices.shape == b.devices.shape


def transferred(sharding: NamedSharding, mesh: Mesh) -> NamedSharding:
    """The sharding of a copy on another mesh of the same shape: the same spec, axis by axis."""
    renamed = dict(zip(sharding.mesh.axis_names, mesh.axis_names))

    def rename(entry: Any) -> Any:
        return tuple(renamed[a] for a in entry) if isinstance(entry, tuple) else renamed.get(entry, entry)

    return NamedSharding(mesh, PartitionSpec(*map(rename, sharding.spec)))


def spec_of(sharding: Sharding, mesh: Mesh, shape: tuple[int, ...]) -> PartitionSpec:
    """The spec of a sharding over a mesh: JAX does not always say how XLA sharded a result in names of axes.

    Raises:
      ValueError: if no spec says it: an axis would have to be divided between two dimensions.
    """
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding.spec
    indices = sharding.devices_indices_map(shape)
    starts = np.array([[i.start or 0 for i in indices[d]] for d in mesh.devices.flat])
    starts = starts.reshape(*mesh.devices.shape, len(shape))
    # Per dimension: how far one step along an axis is.
    steps: list[list[tuple[int, Any]]] = [[] for _ in shape]
    for number, axis in enumerate(mesh.axis_names):
        second = [int(n == number) for n in range(len(mesh.axis_names))]
        if mesh.shape[axis] > 1:
            for dimension, step in enumerate(starts[tuple(second)] - starts[(0,) * len(second)]):
                steps[dimension] += [(int(step), axis)] if step else []
    spec = PartitionSpec(*(tuple(axis for _, axis in sorted(s, reverse=True)) or None for s in steps))
    if not NamedSharding(mesh, spec).is_equivalent_to(sharding, len(shape)):
        raise ValueError(
            f"XLA shards a result of shape {shape} as {sharding}, which no PartitionSpec over a mesh of "
            f"{dict(mesh.shape)} says: give it one with mm.with_sharding_constraint"
        )
    return spec


def without(spec: PartitionSpec, axes: Collection[Any]) -> PartitionSpec:
    """A spec without some mesh axes."""

    def keep(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(axis for axis in entry if axis not in axes) or None
        return None if entry in axes else entry

    return PartitionSpec(*map(keep, spec))


def entering(aval: Any, mesh: Mesh, given: NamedSharding | None) -> NamedSharding:
    """The sharding on `mesh` of an input that is not at home there: its own spec, as far as that fits."""
    spec = given.spec if given is not None else PartitionSpec()

    def keep(entry: Any, size: int) -> Any:
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        axes = tuple(a for a in axes if a in mesh.axis_names)
        parts = 1
        for a in axes:
            parts *= mesh.shape[a]
        return axes if axes and size % parts == 0 else None

    return NamedSharding(mesh, PartitionSpec(*(keep(e, n) for e, n in zip(spec, aval.shape))))


def is_committed(x: Any) -> bool:
    """Whether an argument is an array that somebody has put where it is, or stands for one."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding is not None
    if isinstance(x, DividedArray):
        return True
    return isinstance(x, jax.Array) and x.committed


def constrains(jaxpr: Any, beyond: Mesh | None = None) -> bool:
    """Whether something in a jaxpr says how values are sharded; if `beyond` is given, over other devices.

    A logical constraint says so of a mesh that is not known yet.
    """

    def does(e: Any) -> bool:
        if e.primitive.name == "logical_constraint":
            return True
        if e.primitive.name == "logical_shard_map":  # of whatever mesh it is on
            return beyond is not None and beyond.size > 1
        if e.primitive.name not in ("sharding_constraint", "shard_map"):
            return any(constrains(inner, beyond) for inner in _compat.subjaxprs(e))
        over = e.params["mesh"] if "mesh" in e.params else getattr(e.params["sharding"], "mesh", None)
        return beyond is None or (isinstance(over, Mesh) and over.devices.tolist() != beyond.devices.tolist())

    return any(map(does, _compat.open_jaxpr(jaxpr)[2]))


def shard_map_mesh(jaxpr: Any) -> Mesh | None:
    """The mesh of the first shard_map in a jaxpr that has devices."""
    meshes = (e.params["mesh"] for e in equations_in(jaxpr) if e.primitive.name == "shard_map")
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)
