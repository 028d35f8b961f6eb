"""The shardings that a TaskSharding gives to abstract state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.sharding.aligned_spec import aligned_spec
from mmnnx.sharding.divided_array import named_sharding, sharding_of
from mmnnx.sharding.division import Division
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.placement import PlacementError, TaskSharding
from mmnnx.sharding.registered_tasks import explain_placement, place_task

Path = tuple[str, ...]
Shape = tuple[int, ...]


def shardings_of(nodes: Mapping[str, Any], sharding: TaskSharding) -> dict[Path, Sharding]:
    """The shardings of abstract state by a TaskSharding, as `mm.jit` would place it.

    Optimizer state follows its parameters; scalars without a rule are copied to every mesh. The tasks are
    registered, as in a call of `mm.jit`, so that what runs on this state later knows whose it is.

    Raises:
      PlacementError: for state that no rule places.
    """
    found: dict[Path, Sharding] = {}
    parameters: dict[Path, dict[Shape, Sharding]] = {}  # two models may have one path
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
            shape = tuple(np.shape(x))
            if not isinstance(x, jax.ShapeDtypeStruct):
                if isinstance(x, jax.Array):
                    parameters.setdefault(path, {}).setdefault(shape, named_sharding(x) or x.sharding)
                continue
            if _compat.is_optimizer_state(variable):
                own = _of_optimizer_state(sharding, path, variable, shape, parameters, of_path)
            else:
                own = _of_parameter(sharding, path, variable, shape)
                parameters.setdefault(path, {}).setdefault(shape, own)
            inner = jax.tree_util.keystr(keys, simple=True, separator="/")
            placed = sharding_of(own) if isinstance(own, NamedSharding) else own
            found[tuple("/".join((name, *path, *([inner] if inner else []))).split("/"))] = placed
    return found


def _of_parameter(sharding: TaskSharding, path: Path, variable: Any, shape: Shape) -> NamedSharding:
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
    explain_placement(path, match.sharding, sharding.rule_text(match.index))
    return match.sharding


def _of_optimizer_state(
    sharding: TaskSharding,
    path: Path,
    variable: nnx.Variable,
    shape: Shape,
    parameters: Mapping[Path, Mapping[Shape, Sharding]],
    of_path: Mapping[Path, list[Any]],
) -> Sharding:
    """By a rule of its own, else where its parameter lives, or would live by the rules if it is not among the
    nodes; sharded like it, dimension by dimension."""
    match = sharding.lookup_optimizer_state([path], variable, of_path)
    if match is not None and match.own:
        return match.sharding
    of_endings = [parameters[path[k:]] for k in range(len(path)) if path[k:] in parameters]
    for by_shape in of_endings:
        if shape in by_shape:
            return by_shape[shape]
    if shape:
        for by_shape in of_endings:
            for its_shape, own in by_shape.items():
                if isinstance(own, NamedSharding):
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
