"""Where state lives: the record in a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.metadata import version
from math import prod
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmnnx import __version__
from mmnnx.inspect.locations import Homes
from mmnnx.inspect.model_state import list_state
from mmnnx.sharding.divided_array import named_sharding
from mmnnx.sharding.mesh import current_multimesh, program_devices
from mmnnx.sharding.placement import PlacementError, TaskSharding
from mmnnx.train.checkpoint.errors import Path
from mmnnx.train.checkpoint.keys import stored_as
from mmnnx.train.checkpoint.match import type_of


def describe_placement(arrays: Mapping[Path, Any]) -> dict[str, Any]:
    """Types and homes of arrays, as JSON.

    Returns:
      "versions" of the packages, the number of "processes", the "mesh" of all devices (None outside
      `with MultiMesh(...)`), the "homes" (submeshes where state lives), and in "state" for each path its
      "shape", "dtype", "bytes", "spec", the number of its "home" (None without one), and "weak_type" if it is
      weak. Devices are numbered as in `TaskMesh`.
    """
    homes, multimesh = Homes(), current_multimesh()
    numbers = {device: n for n, device in enumerate(program_devices())}
    places: list[dict[str, Any]] = []
    state = {}
    for path, x in arrays.items():
        shape, dtype = type_of(x)
        spec = home = None
        if isinstance(x, jax.Array):
            named = named_sharding(x)
            mesh = named.mesh if named is not None else None
            devices = x.sharding.device_set if mesh is None else mesh.devices.flat
            (placed,) = homes.find([path], x, [x])
            place = {
                "task": placed.home.task if placed is not None else "",
                "axes": dict(mesh.shape) if mesh is not None else {},
                "devices": [numbers.get(d, d.id) for d in devices],
            }
            spec = list(named.spec) if named is not None else None
            if place not in places:
                places.append(place)
            home = places.index(place)
        stored_shape, stored_dtype = stored_as(x)
        state["/".join(path)] = {
            "shape": list(shape),
            "dtype": dtype,
            "bytes": prod(stored_shape) * stored_dtype.itemsize,
            "spec": spec,
            "home": home,
        }
        if getattr(x, "weak_type", False):
            state["/".join(path)]["weak_type"] = True
    return {
        "versions": {name: version(name) for name in ("jax", "flax", "orbax-checkpoint")}
        | {"mmnnx": __version__},
        "processes": jax.process_count(),
        "mesh": dict(multimesh.mesh.shape) if multimesh is not None else None,
        "homes": places,
        "state": state,
    }


def check_rules(sharding: TaskSharding, nodes: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raises PlacementError for rules that place nothing, as `mm.jit` does, if parameters are abstract.

    A rule may be for nodes that are not restored now: if it places anything in the checkpoint, it is used.

    Args:
      sharding: the rules.
      nodes: what is restored.
      stored: the "state" of `describe_placement`.
    """
    homes = Homes(sharding)
    abstract = [node for node in nodes.values() if _is_abstract(node)]
    if all(isinstance(node, nnx.Optimizer) for node in abstract):
        return
    for node in sorted(abstract, key=lambda node: isinstance(node, nnx.Optimizer)):
        list_state(node, homes)
    for name, about in stored.items():
        like = jax.ShapeDtypeStruct(about["shape"], np.uint8)  # rules do not depend on the dtype
        with contextlib.suppress(PlacementError):
            homes.find([tuple(name.split("/")[1:])], like, [like])
    homes.check_used()


def _is_abstract(node: Any) -> bool:
    return all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(node)))
