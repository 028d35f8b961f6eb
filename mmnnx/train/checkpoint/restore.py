"""From the folder of a step to arrays on their devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from etils.epath import Path as FilePath
from jax.sharding import SingleDeviceSharding

from mmnnx.sharding.path_filter import path_text
from mmnnx.sharding.placement import TaskSharding
from mmnnx.sharding.state_shardings import shardings_of
from mmnnx.train.checkpoint.errors import DamagedError, Differences, Path, StructureError
from mmnnx.train.checkpoint.explain import explain
from mmnnx.train.checkpoint.keys import stored_as
from mmnnx.train.checkpoint.match import Type, match, type_of, type_text
from mmnnx.train.checkpoint.nnx_state import arrays_of
from mmnnx.train.checkpoint.read import Target, open_arrays, read_arrays
from mmnnx.train.checkpoint.rename import Rename, renamed
from mmnnx.train.checkpoint.step_folders import STATE


def targets_of(nodes: Mapping[str, Any], sharding: TaskSharding | None) -> dict[Path, Target]:
    """The arrays to restore: each goes where it lives now, an abstract one where a TaskSharding places it.

    Raises:
      PlacementError: for abstract arrays that the TaskSharding does not place.
    """
    wanted = arrays_of(nodes)
    abstract = {path for path, x in wanted.items() if isinstance(x, jax.ShapeDtypeStruct)}
    placed = shardings_of(nodes, sharding) if sharding is not None and abstract else {}
    default = SingleDeviceSharding(jax.local_devices()[0])
    targets = {}
    for path, x in wanted.items():
        if path in abstract:
            targets[path] = Target(x, placed.get(path) or x.sharding or default)
        else:
            targets[path] = Target(x, x.sharding if isinstance(x, jax.Array) else None)
    return targets


def restore_arrays(
    step: FilePath,
    placement: Mapping[str, Any],
    wanted: Mapping[Path, Target],
    *,
    partial: bool,
    rename: Rename | None,
) -> tuple[dict[Path, Any], Differences]:
    """Restores arrays.

    Args:
      step: the checkpoint's folder.
      placement: the record of `mmnnx.train.checkpoint.placement.describe_placement` in it.
      wanted: the arrays to restore, by path.
      partial: whether to restore what fits, or all or nothing.
      rename: see `Checkpoints.restore`.

    Returns:
      The arrays, and how the checkpoint differs from what is wanted.

    Raises:
      StructureError: if it differs, before anything is read, unless `partial`.
      DamagedError: for arrays that cannot be read.
    """
    types: dict[Path, Type] = {
        tuple(name.split("/")): (tuple(about["shape"]), about["dtype"])
        for name, about in placement["state"].items()
    }
    names = {path: path for path in types} if rename is None else renamed(types, rename)
    stored = {new: types[old] for new, old in names.items()}
    names_wanted = {path[0] for path in wanted}
    sources, differences = match(
        {path: type for path, type in stored.items() if path[0] in names_wanted},
        {path: type_of(target.like) for path, target in wanted.items()},
    )
    if differences and not partial:
        raise StructureError(explain(step, differences, stored, wanted), differences)
    used = {path for source in sources.values() for path, _, _ in source.pieces}
    opened = open_arrays(step / STATE, [names[path] for path in used])
    stores = {path: opened[names[path]] for path in used}
    weak = {new for new, old in names.items() if placement["state"]["/".join(old)].get("weak_type")}
    reads = {
        path: (replace(wanted[path], weak_type=weak.issuperset(p for p, _, _ in source.pieces)), source)
        for path, source in sources.items()
    }
    for target, source in reads.values():
        for path, _, _ in source.pieces:
            _check_type(step, path, stores[path], stored[path], target)
    return read_arrays(step / STATE, stores, reads), differences


def _check_type(step: FilePath, path: Path, store: Any, type: Type, target: Target) -> None:
    """Raises DamagedError if a stored array has another type than the record in the checkpoint says."""
    like = jax.ShapeDtypeStruct(type[0], getattr(target.like, "dtype", type[1]))
    if (store.shape, store.dtype.numpy_dtype) != stored_as(like):
        raise DamagedError(
            f"{path_text(path)} in {step / STATE} is {store.dtype.name}{list(store.shape)} and not "
            f"{type_text(type)}, as {step / 'placement'} has it"
        )
