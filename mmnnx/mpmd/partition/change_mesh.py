"""Equations traced for one mesh, rewritten for the TaskMesh of their fragment."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.shardings import same_shape, transferred


def fragment_on(f: Fragment, mesh: Mesh) -> Fragment:
    """A fragment for another TaskMesh; raises ValueError as `change_mesh` does."""
    jaxpr = _compat.map_equations(f.jaxpr, lambda e: change_mesh(e, mesh))
    return dataclasses.replace(f, mesh=mesh, jaxpr=jaxpr)


def change_mesh(eqn: Any, mesh: Mesh) -> Any:
    """An equation for one TaskMesh: constraints and shard_maps over another mesh become ones over this one.

    Where the other mesh has as many devices as this one, those of this one take their places, in its axes.
    Else a constraint keeps the axes that this mesh has, and a shard_map can be moved if this mesh has those
    that it maps over, in the same sizes.

    Raises:
      ValueError: for a shard_map over an axis which is not here, or of another size.
    """
    if eqn.primitive.name == "shard_map":
        if _same_devices(eqn.params["mesh"], mesh):
            return eqn  # by other axes perhaps, which is all the same to JAX
        mesh = _in_axes_of(eqn.params["mesh"], mesh) or mesh
    eqn = _compat.map_inner_equations(eqn, lambda e: change_mesh(e, mesh))
    params = {key: _moved(value, mesh) for key, value in eqn.params.items()}
    for key in ("mesh", "context_mesh"):
        over = params.get(key)
        if (
            isinstance(over, (Mesh, AbstractMesh))
            and not over.empty
            and over not in (mesh, mesh.abstract_mesh)
        ):
            if eqn.primitive.name == "shard_map":
                _check_axes(eqn, over, mesh)
            params[key] = _alike(over, mesh)
    return eqn.replace(params=params) if any(params[k] is not eqn.params[k] for k in params) else eqn


def _same_devices(over: Mesh | AbstractMesh, mesh: Mesh) -> bool:
    return isinstance(over, Mesh) and list(over.devices.flat) == list(mesh.devices.flat)


def _in_axes_of(over: Mesh | AbstractMesh, mesh: Mesh) -> Mesh | None:
    """The devices of `mesh` in the axes of another one, such as one that has two of its axes as one; None if
    that has another number of devices, or none, or the same axes."""
    if not isinstance(over, Mesh) or over.size != mesh.size or over.shape == mesh.shape:
        return None
    return Mesh(mesh.devices.reshape(over.devices.shape), over.axis_names, over.axis_types)


def _moved(value: Any, mesh: Mesh) -> Any:
    if type(value) is tuple and any(isinstance(v, NamedSharding) for v in value):
        new = tuple(_moved(v, mesh) for v in value)
        return value if all(a is b for a, b in zip(new, value)) else new
    if isinstance(value, NamedSharding) and value.mesh not in (mesh, mesh.abstract_mesh):
        if (own := _in_axes_of(value.mesh, mesh)) is not None:
            moved = NamedSharding(own, value.spec)
            return transferred(moved, mesh) if same_shape(own, mesh) else moved
        return NamedSharding(_alike(value.mesh, mesh), _kept_axes(value.spec, mesh))
    return value


def _alike(over: Mesh | AbstractMesh, mesh: Mesh) -> Mesh | AbstractMesh:
    """`mesh`, abstract if `over` is; inside a shard_map the axes that it maps over are Manual in both."""
    if isinstance(over, Mesh):
        return mesh
    kinds = dict(zip(over.axis_names, over.axis_types))
    return mesh.abstract_mesh.update_axis_types({a: kinds[a] for a in mesh.axis_names if a in kinds})


def _check_axes(eqn: Any, over: Mesh | AbstractMesh, mesh: Mesh) -> None:
    """Axes that differ must appear neither in the specs of a shard_map nor in a collective inside it."""
    # Every way to use an axis prints its name between quotes, in 'axis' or ('axis',).
    inner = [e.params for jaxpr in _compat.subjaxprs(eqn) for e in _compat.open_jaxpr(jaxpr)[2]]
    own = [v for k, v in eqn.params.items() if k not in ("mesh", "context_mesh", "jaxpr")]
    text = f"{own} {inner}"
    for axis, size in over.shape.items():
        here = mesh.shape.get(axis)
        if here != size and f"'{axis}'" in text:
            raise ValueError(
                f"a shard_map over a mesh of {dict(over.shape)} uses axis {axis!r}, which is "
                f"{'not there' if here is None else f'of size {here}'} on its TaskMesh ({dict(mesh.shape)}): "
                "give it the mesh of the task (mm.shard_map in a task does), or place it on the whole mesh"
            )


def _kept_axes(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """A spec without the axes that a mesh lacks."""

    def keep(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(axis for axis in entry if axis in mesh.axis_names) or None
        return entry if entry in (None, PartitionSpec.UNCONSTRAINED) or entry in mesh.axis_names else None

    return PartitionSpec(*map(keep, spec))
