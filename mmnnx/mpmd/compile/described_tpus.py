"""Where fragments for described TPUs are compiled.

For a described v5e or v6e machine libtpu refuses programs that run on its first chip and on some of the
others, but not on all. It compiles the same programs for the chips beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mmnnx.mpmd.distributed.processes import is_described
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar
from mmnnx.mpmd.partition.change_mesh import fragment_on


def compiling_mesh(mesh: Mesh) -> Mesh:
    """The mesh to compile for in the place of `mesh`: itself, or one of the same form beside it.

    What is compiled for described devices is looked at, and never runs there.
    """
    first, *others = devices = list(mesh.devices.flat)
    if first.platform != "tpu" or not is_described(first) or not others or all(d.id for d in devices):
        return mesh
    chips = {_place(d): d for d in first.client.devices()}
    places = np.array([_place(d) for d in devices])
    extents = np.ptp(places, axis=0) + 1
    for steps in itertools.product((0, 1), repeat=len(extents)):
        beside = [tuple(map(int, place)) for place in places + extents * steps]
        if any(steps) and all(place in chips for place in beside):
            moved = np.array([chips[place] for place in beside]).reshape(mesh.devices.shape)
            return Mesh(moved, mesh.axis_names, axis_types=mesh.axis_types)
    return mesh  # it is more than half of the machine


def moved(
    f: Fragment, shardings: Sequence[NamedSharding], fixed: Mapping[PlacedVar, NamedSharding], mesh: Mesh
) -> tuple[Fragment, Sequence[NamedSharding], Mapping[PlacedVar, NamedSharding]]:
    """A fragment, the shardings of its inputs and those that are decided, on a mesh of the same form."""
    if mesh == f.mesh:
        return f, shardings, fixed
    there = {(v, mesh): NamedSharding(mesh, fixed[v, f.mesh].spec) for v in f.outvars if (v, f.mesh) in fixed}
    return fragment_on(f, mesh), [NamedSharding(mesh, s.spec) for s in shardings], there


def _place(device: jax.Device) -> tuple[int, ...]:
    return (*device.coords, device.core_on_chip)
