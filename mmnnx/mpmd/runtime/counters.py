"""Unplaced scalars, such as step counters: where a call leaves them, and takes them from."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import NamedSharding, PartitionSpec

from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.ir.equations import is_var
from mmnnx.mpmd.ir.shardings import entering, is_committed
from mmnnx.mpmd.partition.partition import Partition


def out_shardings(function: Function, partition: Partition) -> list[NamedSharding | None]:
    """The sharding that each result must have; for a scalar constant, that of where steps keep a counter."""
    flat, mesh = partition.flat, function.multimesh
    everywhere = NamedSharding(mesh.mesh, PartitionSpec()) if mesh is not None else None
    inputs = set(flat.invars)

    def is_constant(v, values) -> bool:
        return not values and not (is_var(v) and v in inputs) and not v.aval.shape

    found: list[NamedSharding | None] = []
    by_type = function.traced.result_shardings
    for v, values, sharding, typed in zip(
        flat.outvars, partition.results, function.shardings.out_shardings, by_type
    ):
        if sharding is None and is_constant(v, values):
            sharding = everywhere
        elif sharding is None and typed is not None and len(values) == 1:
            sharding = entering(v.aval, values[0][1], typed)
        found.append(None if sharding is None else function.meshes.as_given(sharding))
    return found


def next_shardings(
    function: Function, partition: Partition, requested: Sequence[NamedSharding | None]
) -> dict[int, NamedSharding]:
    """For unplaced scalars that are state, by number of the argument: where a call leaves their new value.

    A program takes such a scalar unplaced, as `nnx.Optimizer` or `nnx.metrics.Average` make it outside of
    `mm.jit`, and from where an earlier call left it. If the mesh of a task is the whole MultiMesh, there is
    none: a scalar that is kept on every mesh would count as placed in that task.

    Args:
      function: the function.
      partition: its fragments.
      requested: the sharding that each result must have.
    """
    multimesh, meshes, jaxpr = function.multimesh, function.task_meshes, function.jaxpr
    if multimesh is not None and any(m.devices.size == multimesh.mesh.devices.size for m in meshes):
        return {}
    found: dict[int, NamedSharding] = {}
    results = zip(function.record.results, partition.results, requested, jaxpr.out_avals)
    for leaf, values, sharding, aval in results:
        number = leaf.updates if leaf is not None else None
        if number is None or aval.shape or aval != jaxpr.in_avals[number]:
            continue
        if function.shardings.in_shardings[number] is not None or is_committed(function.leaves[number]):
            continue
        if len(values) > 1 and multimesh is not None:
            found[number] = NamedSharding(multimesh.mesh, PartitionSpec())
        elif sharding is not None or (values and values[0][1] in meshes):
            found[number] = sharding or function.meshes.as_given(NamedSharding(values[0][1], PartitionSpec()))
    return found
