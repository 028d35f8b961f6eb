"""Where state lives: the record in a checkpoint, and the shardings that a TaskSharding restores it with."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.metadata import version
from math import prod
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.inspect.locations import Homes
from mmnnx.inspect.model_state import list_state
from mmnnx.sharding.aligned_spec import aligned_spec
from mmnnx.sharding.divided_array import named_sharding, sharding_of
from mmnnx.sharding.division import Division
from mmnnx.sharding.mesh import current_multimesh, program_devices
from mmnnx.sharding.placement import PlacementError, TaskSharding
from mmnnx.sharding.registered_tasks import place_task
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
        "versions": {name: version(name) for name in ("mmnnx", "jax", "flax", "orbax-checkpoint")},
        "processes": jax.process_count(),
        "mesh": dict(multimesh.mesh.shape) if multimesh is not None else None,
        "homes": places,
        "state": state,
    }


def shardings_of(nodes: Mapping[str, Any], sharding: TaskSharding) -> dict[Path, Sharding]:
    """The shardings of abstract state by a TaskSharding, as `mm.jit` would place it.

    Optimizer state follows its parameters; scalars without a rule are copied to every mesh.

    Raises:
      PlacementError: for state that no rule places.
    """
    found: dict[Path, Sharding] = {}
    parameters: dict[tuple[Path, tuple[int, ...]], Sharding] = {}
    variables = [
        (name, tuple(map(str, path)), variable)
        for name, node in nodes.items()
        for path, variable in nnx.to_flat_state(nnx.state(node))
    ]
    of_path: dict[Path, list[Any]] = {}
    for _, path, variable in variables:
        if not _compat.is_optimizer_state(variable):
            of_path.setdefault(path, []).append(variable)
    for name, path, variable in sorted(variables, key=lambda v: _compat.is_optimizer_state(v[-1])):
        value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable
        for keys, x in jax.tree_util.tree_leaves_with_path(value):
            shape = type_of(x)[0]
            if not isinstance(x, jax.ShapeDtypeStruct):
                if isinstance(x, jax.Array):
                    parameters[path, shape] = named_sharding(x) or x.sharding
                continue
            if _compat.is_optimizer_state(variable):
                own = _of_optimizer_state(sharding, path, variable, shape, parameters, of_path)
            else:
                own = parameters[path, shape] = _of_parameter(sharding, path, variable, shape)
            inner = jax.tree_util.keystr(keys, simple=True, separator="/")
            placed = sharding_of(own) if isinstance(own, NamedSharding) else own
            found[tuple("/".join((name, *path, *([inner] if inner else []))).split("/"))] = placed
    return found


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


def _of_parameter(sharding: TaskSharding, path: Path, variable: Any, shape: tuple[int, ...]) -> NamedSharding:
    try:
        match = sharding.lookup(path, variable)
    except PlacementError:
        if shape:
            raise
        return _everywhere(sharding)
    if isinstance(match.task, Division):
        for key, task in match.task.tasks_by_key(shape[match.task.dim]):
            place_task(task, task.to_mesh(), [(*path, key)])
    else:
        place_task(match.task, match.task.to_mesh(), [path])
    return match.sharding


def _of_optimizer_state(
    sharding: TaskSharding,
    path: Path,
    variable: nnx.Variable,
    shape: tuple[int, ...],
    parameters: Mapping[tuple[Path, tuple[int, ...]], Sharding],
    of_path: Mapping[Path, list[Any]],
) -> Sharding:
    """By a rule of its own, else where its parameter lives, or would live by the rules if it is not among the
    nodes; sharded like it, dimension by dimension."""
    match = sharding.lookup_optimizer_state([path], variable, of_path)
    if match is not None and match.own:
        return match.sharding
    endings = [path[k:] for k in range(len(path))]
    for ending in endings:
        if (ending, shape) in parameters:
            return parameters[ending, shape]
    if shape:
        for ending in endings:
            for (parameter, its_shape), own in parameters.items():
                if parameter == ending and isinstance(own, NamedSharding):
                    return NamedSharding(own.mesh, aligned_spec(own.spec, its_shape, shape))
        if match is not None:
            return match.sharding
    return _everywhere(sharding)


def _everywhere(sharding: TaskSharding) -> NamedSharding:
    multimesh = current_multimesh()
    if multimesh is not None:
        return NamedSharding(multimesh.mesh, PartitionSpec())
    devices = dict.fromkeys(device for task, _ in sharding.rules for device in task.to_mesh().devices.flat)
    return NamedSharding(Mesh(np.array(list(devices)), ("device",)), PartitionSpec())
