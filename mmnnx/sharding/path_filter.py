"""Paths of state: how they are written, and the NNX filters that match them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from flax import nnx

from mmnnx.printable import printable

Path = tuple[Any, ...]


def path_text(path: Iterable[object]) -> str:
    """A path of state as messages, tables and pictures write it: keys with dots between them.

    >>> path_text(("blocks", 3, "mlp", "kernel"))
    'blocks.3.mlp.kernel'
    """
    return printable(".".join(map(str, path)))


@dataclass(frozen=True, repr=False)
class PathPattern:
    """An NNX filter made by `path`."""

    keys: tuple[Any, ...]

    def __call__(self, path: Path, value: Any = None) -> bool:
        """Whether the pattern covers `path` from its start."""
        return _covers(self._names, tuple(map(str, path)))

    @functools.cached_property
    def _names(self) -> tuple[frozenset[str] | EllipsisType, ...]:
        return tuple(map(_names, self.keys))

    def __repr__(self) -> str:
        return f"path({', '.join('...' if key is ... else repr(key) for key in self.keys)})"


def path(*keys: Any) -> PathPattern:
    """An NNX filter for all state whose path begins as the pattern says.

    Args:
      *keys: each an attribute name or index, a range, set, tuple or list of them (any one of these), or
        `...` for any run of keys, also an empty one. 0 and "0" are the same key.

    Returns:
      A filter: it can be called with (path, value), compared and hashed. `path("embed")` is all that lies
      under `embed`; `path(...)` is everything.

    Raises:
      TypeError: a key that is none of these.
      ValueError: a negative index.

    Example:
      >>> kernels = path("blocks", range(0, 2), ..., "kernel")
      >>> kernels(("blocks", 1, "mlp", "kernel"), None), kernels(("blocks", 2, "kernel"), None)
      (True, False)
    """
    return PathPattern(tuple(map(_normal_key, keys)))


def is_catch_all(filter: Any) -> bool:
    """Whether an NNX filter is the one for all that is left: `...`, True or `path(...)`.

    Example:
      >>> is_catch_all(...), is_catch_all(path("embed"))
      (True, False)
    """
    if isinstance(filter, PathPattern):
        return all(key is ... for key in filter.keys)
    return filter is ... or filter is True or isinstance(filter, nnx.filterlib.Everything)


def _normal_key(key: Any) -> Any:
    if isinstance(key, int) and key < 0:
        raise ValueError(f"path() has no use for {key}: indices are counted from the front")
    if key is ... or isinstance(key, str | int | range):
        return key
    if isinstance(key, set | frozenset | tuple | list) and all(isinstance(k, str | int) for k in key):
        return frozenset(key) if isinstance(key, set | frozenset) else tuple(key)
    raise TypeError(
        f"path() takes attribute names, indices, ranges or sets of them, and `...`, not {key!r}"
        + (": write range(start, stop)" if isinstance(key, slice) else "")
    )


def _names(key: Any) -> frozenset[str] | EllipsisType:
    """The path keys that one key of a pattern stands for, as text: State has 0 where another tree has "0"."""
    if key is ...:
        return key
    return frozenset([str(key)] if isinstance(key, str | int) else map(str, key))


def _covers(pattern: tuple[Any, ...], path: tuple[str, ...]) -> bool:
    if not pattern:
        return True
    first, rest = pattern[0], pattern[1:]
    if first is ...:
        return any(_covers(rest, path[skipped:]) for skipped in range(len(path) + 1))
    return bool(path) and path[0] in first and _covers(rest, path[1:])


def parts_of(path: Path) -> list[Path]:
    """The parts of a path of optimizer state that may be the path of its parameter.

    The longest come first; of equally long ones, the last.

    Example:
      >>> parts_of(("mu", "w", 0))
      [('mu', 'w', 0), ('w', 0), ('mu', 'w'), (0,), ('w',), ('mu',)]
    """
    count = len(path)
    return [path[n : n + size] for size in range(count, 0, -1) for n in range(count - size, -1, -1)]
