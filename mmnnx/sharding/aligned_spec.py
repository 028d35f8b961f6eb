"""The spec of an array that an optimizer made of a parameter, such as row statistics or a history."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from jax.sharding import PartitionSpec


def aligned_spec(spec: PartitionSpec, parameter: Sequence[int], shape: Sequence[int]) -> PartitionSpec:
    """The spec by which optimizer state is sharded like its parameter, dimension by dimension.

    The state has the dimensions of its parameter: all of them (moments), behind others (a history), some with
    size 1 (SM3's accumulators), or only some of them (the row and column statistics of Adafactor). What may
    be one of several dimensions, by its size, which are sharded differently, is not sharded.

    Args:
      spec: of the parameter.
      parameter: its shape.
      shape: of the state.

    Example:
      >>> spec = PartitionSpec("data", "model")
      >>> [aligned_spec(spec, (4, 6), shape) for shape in [(4, 6), (3, 4, 6), (1, 6), (4,), (6,), (5,)]]
      [P('data', 'model'), P(None, 'data', 'model'), P(None, 'model'), P('data',), P('model',), P()]
    """
    parameter, shape = tuple(parameter), tuple(shape)
    if shape == parameter:
        return spec
    entries = [*spec, *(None for _ in parameter[len(spec) :])]
    more = len(shape) - len(parameter)
    if more > 0 and shape[more:] == parameter:
        return _trimmed([*(None for _ in range(more)), *entries])
    if more == 0 and all(n in (1, size) for n, size in zip(shape, parameter)):
        return _trimmed([entry if n == size else None for n, size, entry in zip(shape, parameter, entries)])
    ways = [
        [entries[dim] for dim in dims]
        for dims in combinations(range(len(parameter)), len(shape))
        if more < 0 and all(parameter[dim] == n for dim, n in zip(dims, shape))
    ]
    return _trimmed([column[0] if len(set(column)) == 1 else None for column in zip(*ways)])


def _trimmed(entries: list[Any]) -> PartitionSpec:
    """A spec without entries of None at its end."""
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
