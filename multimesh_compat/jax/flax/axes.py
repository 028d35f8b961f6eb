"""Logical axis names of linen parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec

from multimesh_compat.jax.constraints import logical_names, with_sharding_constraint

_lecun_normal = nn.initializers.lecun_normal()


class ShardedAxes(nn.Partitioned):
    """A parameter with its logical axis names; read inside a task, it is constrained as they say there."""

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The array, constrained by `with_sharding_constraint`; outside tasks over the current MultiMesh."""
        if not apply_constraint:
            return self.value
        with logical_names():
            return with_sharding_constraint(self.value, PartitionSpec(*self.names))


def shard_axes(
    *axes: str | tuple[str, ...] | None, init: Callable[..., jax.Array] = _lecun_normal
) -> Callable[..., ShardedAxes]:
    """An initialiser that names the axes of the parameter it makes (`multimesh.jax.flax.shard_axes`).

    The names are translated by the task that reads the parameter, as those of `with_sharding_constraint` are;
    where none does, by the axes of the current MultiMesh.

    Args:
      *axes: for each dimension a logical name, a tuple of them, or None for one that is not sharded.
      init: makes the values: `init(key, shape, dtype)`. Default: as linen's own layers do.

    Returns:
      `(key, shape, dtype) -> ShardedAxes`, a `nn.Partitioned` box around an array of that shape and dtype, to
      be used as `kernel_init` and the like.

    Raises:
      TypeError: a name that is neither a string, nor a tuple of strings, nor None.
      ValueError: when it makes a parameter, if that has not as many dimensions as there are names.

    Example:
      >>> layer = nn.Dense(features=16, kernel_init=shard_axes("x", None))
      >>> layer.init(jax.random.key(0), jax.numpy.ones((2, 9)))["params"]["kernel"].names
      ('x', None)
    """
    for axis in axes:
        names = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"shard_axes takes a name, a tuple of names or None for each axis, not {axis!r}")

    def initialise(key: Any, shape: Any, *args: Any, **kwargs: Any) -> ShardedAxes:
        if len(axes) != len(shape):
            raise ValueError(
                f"shard_axes{axes} names {len(axes)} axes, and the parameter has {len(shape)} dimensions, "
                f"{tuple(shape)}: give one name or None for each"
            )
        return ShardedAxes(init(key, shape, *args, **kwargs), names=axes)  # type: ignore[arg-type]

    return initialise
