"""Equations traced for one mesh, rewritten for the TaskMesh of their fragment."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mmnnx import _compat


def localise(eqn: Any, mesh: Mesh) -> Any:
    """An equation for one TaskMesh: constraints and shard_maps over another mesh become ones over this one.

    A constraint keeps the axes that this mesh has. A shard_map is moved if each of its axes
    has the same size here, or size 1.
    """
    params = {key: _localise_param(key, value, mesh) for key, value in eqn.params.items()}
    return eqn.replace(params=params) if any(params[k] is not eqn.params[k] for k in params) else eqn


def _localise_param(key: str, value: Any, mesh: Mesh) -> Any:
    if isinstance(value, NamedSharding) and value.mesh not in (mesh, mesh.abstract_mesh):
        here = mesh.abstract_mesh if isinstance(value.mesh, AbstractMesh) else mesh
        return NamedSharding(here, _kept_axes(value.spec, mesh))
    if key in ("mesh", "context_mesh") and isinstance(value, (Mesh, AbstractMesh)):
        sizes = {**mesh.shape}
        if not value.empty and all(sizes.get(axis) in (n, 1) for axis, n in value.shape.items()):
            return mesh.abstract_mesh if isinstance(value, AbstractMesh) else mesh
        return value
    if isinstance(value, _compat.JAXPR_TYPES):
        return _compat.map_equations(value, lambda e: localise(e, mesh))
    if isinstance(value, tuple) and any(isinstance(v, _compat.JAXPR_TYPES) for v in value):
        return tuple(_localise_param(key, v, mesh) for v in value)
    return value


def _kept_axes(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """A spec without the axes that a mesh lacks."""

    def keep(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(axis for axis in entry if axis in mesh.axis_names) or None
        return entry if entry in (None, PartitionSpec.UNCONSTRAINED) or entry in mesh.axis_names else None

    return PartitionSpec(*map(keep, spec))
