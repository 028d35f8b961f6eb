"""What a checkpoint holds, by its metadata."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils.epath import Path as FilePath
from jax.sharding import PartitionSpec

from mmnnx.inspect.locations import spec_text
from mmnnx.train.checkpoint.errors import CheckpointError
from mmnnx.train.checkpoint.match import type_text
from mmnnx.train.checkpoint.paths import folder_at
from mmnnx.train.checkpoint.step_folders import JSON, STATE, is_ours, listed, read_json, saved_at, steps_in

TREE = "_METADATA"  # orbax's own file about a tree of arrays


@dataclass(frozen=True)
class Piece:
    """One array: its path as stored, its type, its bytes, the number of its home, its PartitionSpec."""

    path: str
    type: str
    bytes: int
    home: int | None = None
    spec: str = ""


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds; of one that only orbax wrote, the state alone.

    Attributes:
      path: the folder of the checkpoint.
      step, steps: its step, and all steps in the same folder.
      state: its arrays.
      saved: when it was complete, in seconds since 1970.
      versions, processes, mesh, homes: see `mmnnx.train.checkpoint.placement.describe_placement`.
      metrics, data, config: what was given to `Checkpoints.save`.
    """

    path: FilePath
    step: int | None
    steps: list[int]
    state: list[Piece]
    saved: float | None = None
    versions: dict[str, str] | None = None
    processes: int = 1
    mesh: dict[str, int] | None = None
    homes: list[dict[str, Any]] = ()  # type: ignore[assignment]
    metrics: dict[str, float] | None = None
    data: Any = None
    config: Any = None


def contents_of(place: str | os.PathLike[str]) -> Contents:
    """What a checkpoint holds: the one at a path or URL, the latest in a folder, or the latest of a run.

    Raises:
      CheckpointError: for a path without checkpoints, or damaged metadata.

    Example:
      >>> from mmnnx.train.checkpoint import Checkpoints
      >>> with Checkpoints("runs/lm/checkpoints") as checkpoints:
      ...     checkpoints.save(200, {"model": model})
      >>> contents_of("runs/lm").step
      200
    """
    path = folder_at(place)
    names = [found.name for found in listed(path)]
    if not names and not path.is_dir():
        found = "is a file: a checkpoint is a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {found}")
    folder = path / "checkpoints" if "checkpoints" in names else path
    if steps := steps_in(folder):
        return _step(folder / str(steps[-1]))
    if folder != path or not (is_ours(path) or _trees(path)):
        raise CheckpointError(
            f"there is no checkpoint in {folder}: neither folders named by their steps, nor orbax's {TREE}"
        )
    return _step(path)


def _step(step: FilePath) -> Contents:
    number = int(step.name) if step.name.isdecimal() else None
    steps = steps_in(step.parent) if number is not None else []
    if not is_ours(step):
        return Contents(step, number, steps, _foreign(step))
    found = {name: read_json(step, name) for name in JSON}
    placement = found.pop("placement")
    state = [
        Piece(
            name,
            type_text((tuple(about["shape"]), about["dtype"])),
            about["bytes"],
            about["home"],
            "" if about["spec"] is None else spec_text(_spec(about["spec"])),
        )
        for name, about in placement.pop("state").items()
    ]
    return Contents(step, number, steps, state, saved_at(step), **placement, **found)


def _spec(entries: list[Any]) -> PartitionSpec:
    return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in entries))


def _trees(step: FilePath) -> list[FilePath]:
    return [folder for folder in (step, *sorted(step.iterdir())) if (folder / TREE).is_file()]


def _foreign(step: FilePath) -> list[Piece]:
    """The state in a checkpoint that mmnnx did not write; orbax opens every array to tell its shape."""
    trees = _trees(step)
    if not trees:
        raise CheckpointError(f"{step} is empty or incomplete: there is no {TREE} in it")
    pieces = []
    for tree in trees:
        try:
            found = ocp.PyTreeCheckpointHandler().metadata(tree).tree
        except Exception as error:  # of many types
            raise CheckpointError(f"{tree} cannot be read: {error}") from error
        start = () if tree == step or tree.name in ("default", STATE) else (tree.name,)
        for path, about in jax.tree_util.tree_leaves_with_path(found):
            keys = (*start, *(jax.tree_util.keystr((key,), simple=True) for key in path))
            pieces.append(_piece("/".join(keys), about))
    return pieces


def _piece(name: str, about: Any) -> Piece:
    shape, dtype = getattr(about, "shape", None), getattr(about, "dtype", None)
    if dtype is None:
        return Piece(name, type(about).__name__, 0)
    kind = np.dtype(dtype)
    return Piece(name, type_text((tuple(shape or ()), kind.name)), prod(shape or ()) * kind.itemsize)
