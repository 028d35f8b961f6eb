"""The shardings that a TaskSharding gives to abstract state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding

from mmnnx import _compat
from mmnnx.sharding.divided_array import named_sharding, sharding_of
from mmnnx.sharding.division import Division
from mmnnx.sharding.path_filter import Path
from mmnnx.sharding.placement import Match, TaskSharding
from mmnnx.sharding.registered_tasks import explain_placement, place_task
from mmnnx.sharding.state_placement import Shape, StatePlacement


def shardings_of(nodes: Mapping[str, Any], sharding: TaskSharding) -> dict[tuple[str, ...], Sharding]:
    """The shardings of abstract state by a TaskSharding, as `mm.jit` would place it.

    Optimizer state follows its parameters, also those that are on devices already; scalars without a rule are
    copied to every mesh. The tasks are registered, as in a call of `mm.jit`, so that what runs on this state
    later knows whose it is.

    Raises:
      PlacementError: for state that no rule places.
    """
    placement = StatePlacement(sharding)
    found: dict[tuple[str, ...], Sharding] = {}
    variables = [
        (name, tuple(map(str, path)), variable)
        for name, node in nodes.items()
        for path, variable in nnx.to_flat_state(nnx.state(node))
    ]
    for name, path, variable in sorted(variables, key=lambda v: _compat.is_optimizer_state(v[-1])):
        value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable
        for keys, x in jax.tree_util.tree_leaves_with_path(value):
            shape = tuple(np.shape(x))
            if not isinstance(x, jax.ShapeDtypeStruct):
                if isinstance(x, jax.Array) and not _compat.is_optimizer_state(variable):
                    placement.keep([path], variable, shape, (named_sharding(x) or x.sharding, None))
                continue
            own, match = placement.find([path], variable, shape) or (placement.everywhere(), None)
            if match is not None and not _compat.is_optimizer_state(variable):
                _register(match, path, shape, sharding)
            inner = jax.tree_util.keystr(keys, simple=True, separator="/")
            placed = sharding_of(own) if isinstance(own, NamedSharding) else own
            found[tuple("/".join((name, *path, *([inner] if inner else []))).split("/"))] = placed
    return found


def _register(match: Match, path: Path, shape: Shape, sharding: TaskSharding) -> None:
    if isinstance(match.task, Division):
        for key, task in match.task.tasks_by_key(shape[match.task.dim]):
            place_task(task, task.to_mesh(), [(*path, key)])
    else:
        place_task(match.task, match.task.to_mesh(), [path])
    explain_placement(path, match.sharding, sharding.rule_text(match.index))
