"""Where a TaskSharding places state: parameters by its rules, optimizer state like its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.sharding.aligned_spec import aligned_spec
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.path_filter import Path, parts_of
from mmnnx.sharding.placement import Match, PlacementError, TaskSharding

Shape = tuple[int, ...]
Place = tuple[Sharding, Match | None]  # a sharding, and the rule that gives it


class StatePlacement:
    """Where state is going to live, as `mm.jit` would place it. It is given piece by piece, parameters first.

    Use it inside `with MultiMesh(...):`, if there is one.
    """

    def __init__(self, sharding: TaskSharding):
        if not isinstance(sharding, TaskSharding):
            raise TypeError(f"sharding= is a TaskSharding, which names tasks, not {sharding!r}")
        self.sharding = sharding
        self._used: set[int] = set()
        self._needed_rules = False  # whether some parameter had to be placed by a rule
        self._parameters: dict[Path, list[Any]] = {}  # as `lookup_optimizer_state` reads them
        self._places: dict[Path, dict[Shape, Place]] = {}  # of parameters; two models may have one path

    def find(self, paths: Sequence[Path], value: Any, shape: Shape) -> Place | None:
        """The place of an array in a Variable, or of one without; None where no rule says it.

        Args:
          paths: all paths that lead to it.
          value: the Variable, or the array.
          shape: of the array.

        Raises:
          PlacementError: the TaskSharding cannot place it. Scalars need no rule.
        """
        found = matches(self.sharding, paths, value, lambda: self._parameters)
        self._used.update(match.index for match in found)
        place = (found[0].sharding, found[0]) if found else None
        if not _compat.is_optimizer_state(value):
            if place is not None:
                self._needed_rules = True
                self.keep(paths, value, shape, place)
            return place
        return place if found and found[0].own else self._like_parameter(paths, shape) or place

    def keep(self, paths: Sequence[Path], value: Any, shape: Shape, place: Place) -> None:
        """Takes a parameter that has a place."""
        for path in paths:
            known = self._parameters.setdefault(path, [])
            if not any(one is value for one in known):
                known.append(value)
            self._places.setdefault(path, {}).setdefault(shape, place)

    def everywhere(self) -> NamedSharding:
        """Replicated over every mesh, as scalars without a rule are."""
        multimesh = current_multimesh()
        if multimesh is not None:
            return NamedSharding(multimesh.mesh, PartitionSpec())
        tasks = dict.fromkeys(task for task, _ in self.sharding.rules)
        devices = dict.fromkeys(device for task in tasks for device in task.to_mesh().devices.flat)
        return NamedSharding(Mesh(np.array(list(devices)), ("device",)), PartitionSpec())

    def check_used(self) -> None:
        """Raises PlacementError for rules that placed nothing, as `mm.jit` does."""
        if self._needed_rules:
            self.sharding.check_used(self._used)

    def _like_parameter(self, paths: Sequence[Path], shape: Shape) -> Place | None:
        """The place of optimizer state from that of its parameter, dimension by dimension."""
        ends = (path[n:] for path in paths for n in range(1, len(path)))
        parts = (part for path in paths for part in parts_of(path)) if shape else ends
        known = next((self._places[part] for part in parts if part in self._places), {})
        if shape in known:
            return known[shape]
        for its_shape, (own, match) in known.items():
            if isinstance(own, NamedSharding):
                like = NamedSharding(own.mesh, aligned_spec(own.spec, its_shape, shape))
                return like, match and dataclasses.replace(match, sharding=like)
        return None


def matches(
    sharding: TaskSharding,
    paths: Sequence[Path],
    value: Any,
    parameters: Callable[[], Mapping[Path, Sequence[Any]]],
) -> list[Match]:
    """The rules that match any of the paths to a piece of state, the first rule first.

    Args:
      parameters: returns the Variables and arrays that may be those of optimizer state, by path.

    Raises:
      PlacementError: no rule does, and it is no scalar; or a rule does not fit.
    """
    if _compat.is_optimizer_state(value):
        match = sharding.lookup_optimizer_state(paths, value, parameters())
        return [] if match is None else [match]
    found, errors = [], []
    for path in paths:
        try:
            found.append(sharding.lookup(path, value))
        except PlacementError as error:
            errors.append(error)
    arrays = jax.tree.leaves(value.get_raw_value() if isinstance(value, nnx.Variable) else value)
    if not found and any(np.shape(x) for x in arrays):
        raise errors[0]
    return sorted(found, key=lambda match: match.index)
