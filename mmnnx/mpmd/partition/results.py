"""Which values hold the results of a function."""

from __future__ import annotations

import jax

from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.ir.equations import Flat, is_var
from mmnnx.mpmd.ir.fragments import PlacedVar
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.ir.shardings import mesh_of


def held_results(function: Function, flat: Flat, placement: Placement) -> list[list[PlacedVar]]:
    """The values that hold each result; none for one that is an input as it came, or a constant."""
    meshes, multimesh, shardings = function.meshes.tasks(), function.multimesh, function.shardings
    covered = {d for m in meshes for d in m.devices.flat}
    devices = set(multimesh.mesh.devices.flat) if multimesh is not None else set()
    whole = covered == devices or (covered < devices and len(meshes) > 1 and jax.process_count() == 1)
    # Unplaced counters are computed on every mesh, so that none is ever sent.
    everywhere = meshes if whole else meshes[:1]
    inputs = {*flat.invars, *(v for v, _ in flat.constants)}
    results: list[list[PlacedVar]] = []
    for v, sharding, beside, scalar in zip(
        flat.outvars, shardings.out_shardings, shardings.module_meshes, shardings.on_every_mesh
    ):
        if not is_var(v) or (v in inputs and sharding is None) or v.aval.dtype == jax.dtypes.float0:
            results.append([])
        elif sharding is not None:
            results.append([(v, mesh_of(sharding))])
        elif (home := placement.where[v].home) is not None:
            results.append([(v, m) for m in everywhere] if scalar and whole else [(v, home)])
        else:
            results.append([(v, m) for m in ([beside or meshes[0]] if v.aval.shape else everywhere)])
    return results
