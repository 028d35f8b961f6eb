"""Matches the state in a checkpoint with the state to restore: by path, and layer by layer if one of the two
is stacked for `jax.lax.scan`.

Layers in a list have paths like blocks.3.kernel. Stacked, they are rows of blocks.segments.0.layers.kernel
(a `mmnnx.modules.Stack`, with one or more segments) or of blocks.kernel (the user's own `nnx.vmap`). Paths of
optimizer state end with those of its parameters, and match in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mmnnx.train.checkpoint.errors import Differences, Path
from mmnnx.train.checkpoint.read import Source

Type = tuple[tuple[int, ...], str]
"""Shape and dtype of an array; typed PRNG keys count as keys, not as key data."""
Row = tuple[Path, int | None]
"""Where one layer's value is stored: a row of an array, or None for all of it."""


def type_of(x: Any) -> Type:
    """Shape and dtype of an array, abstract array or number."""
    return tuple(np.shape(x)), str(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)


def match(stored: Mapping[Path, Type], wanted: Mapping[Path, Type]) -> tuple[dict[Path, Source], Differences]:
    """Finds where the values of each array that is wanted are stored.

    Args:
      stored, wanted: by path, shape and dtype.

    Returns:
      The sources of those that match, and how the two differ otherwise.
    """
    rows = _Rows(stored)
    starts = _segments(wanted)
    sources: dict[Path, Source] = {}
    missing: dict[Path, str] = {}
    shapes: dict[Path, tuple[str, str]] = {}
    dtypes: dict[Path, tuple[str, str]] = {}
    used = []
    for path, (shape, dtype) in wanted.items():
        source = _source(stored, rows, path, shape, starts.get(path))
        used += [source] if source is not None else []
        if source is None and path in stored:
            shapes[path] = (type_text((shape, dtype)), type_text(stored[path]))
        elif source is None:
            missing[path] = type_text((shape, dtype))
        elif other := next((stored[p][1] for p, _, _ in source.pieces if stored[p][1] != dtype), None):
            dtypes[path] = (dtype, other)
        else:
            sources[path] = source
    return sources, Differences(missing, _extra(stored, used, shapes), shapes, dtypes)


def type_text(type: Type) -> str:
    """
    >>> type_text(((2, 3), "float32"))
    'float32[2,3]'
    """
    return f"{type[1]}[{','.join(map(str, type[0]))}]"


def _source(
    stored: Mapping[Path, Type], rows: _Rows, path: Path, shape: tuple[int, ...], start: int | None
) -> Source | None:
    if path in stored and stored[path][0] == shape and rows.starts.get(path) == start:
        return Source(((path, None, 1),))
    if start is not None:
        before, after = _split(path)  # type: ignore[misc]  # what has a start can be split
        return _stack(rows.find(before, after, start + i, shape[1:]) for i in range(shape[0]))
    for before, number, after in _numbered(path):
        row = rows.find(before, after, number, shape)
        if row is not None:
            return Source(((*row, 1),))
    if shape and path not in stored:
        for at in range(len(path) + 1):
            source = _stack(rows.find(path[:at], path[at:], i, shape[1:]) for i in range(shape[0]))
            if source is not None:
                return source
    return None


def _stack(found: Iterable[Row | None]) -> Source | None:
    """A source of stacked rows; consecutive rows of one array are one piece."""
    pieces: list[tuple[Path, int | None, int]] = []
    for place in found:
        if place is None:
            return None
        path, row = place
        if pieces and row is not None and pieces[-1][0] == path:
            _, first, count = pieces[-1]
            if first is not None and first + count == row:
                pieces[-1] = (path, first, count + 1)
                continue
        pieces.append((path, row, 1))
    return Source(tuple(pieces), stacked=True) if pieces else None


class _Rows:
    """The layers that stored arrays hold."""

    def __init__(self, stored: Mapping[Path, Type]):
        self._stored = stored
        self.starts = _segments(stored)
        self._stacked: dict[tuple[Path, Path], list[Row]] = defaultdict(list)
        for path in sorted(self.starts, key=self.starts.__getitem__):
            self._stacked[_split(path)] += [(path, row) for row in range(stored[path][0][0])]  # type: ignore

    def find(self, before: Path, after: Path, number: int, shape: tuple[int, ...]) -> Row | None:
        """Where the value of this shape is that layer `number` has at before.NUMBER.after."""
        path = (*before, str(number), *after)
        if path in self._stored and self._stored[path][0] == shape:
            return path, None
        stacked = self._stacked.get((before, after), [])
        if number < len(stacked) and self._stored[stacked[number][0]][0][1:] == shape:
            return stacked[number]
        path = (*before, *after)
        if path in self._stored and self._stored[path][0][1:] == shape != self._stored[path][0]:
            return (path, number) if number < self._stored[path][0][0] else None
        return None


def _split(path: Path) -> tuple[Path, Path] | None:
    """The keys before and after those of a segment in a path of a `Stack`; None for other paths."""
    for at in range(len(path) - 2):
        if path[at] == "segments" and path[at + 1].isdigit() and path[at + 2] == "layers":
            return path[:at], path[at + 3 :]
    return None


def _segments(types: Mapping[Path, Type]) -> dict[Path, int]:
    """The number of the first layer in each array of a segment."""
    found: dict[tuple[Path, Path], list[tuple[int, Path]]] = defaultdict(list)
    for path, (shape, _) in types.items():
        if shape and (ends := _split(path)):
            found[ends].append((int(path[len(ends[0]) + 1]), path))
    starts = {}
    for segments in found.values():
        start = 0
        for _, path in sorted(segments):
            starts[path] = start
            start += types[path][0][0]
    return starts


def _numbered(path: Path) -> Iterator[tuple[Path, int, Path]]:
    """For each key of a path that is a number: the keys before it, the number, the keys after it."""
    for at, key in enumerate(path):
        if key.isdigit():
            yield path[:at], int(key), path[at + 1 :]


def _extra(stored: Mapping[Path, Type], used: Iterable[Source], shapes: Container[Path]) -> dict[Path, str]:
    """What is stored and was not used; of stacked arrays, the rows that were not used."""
    whole: set[Path] = set()
    rows: dict[Path, set[int]] = defaultdict(set)
    for source in used:
        for path, row, count in source.pieces:
            if row is None:
                whole.add(path)
            else:
                rows[path].update(range(row, row + count))
    extra = {}
    for path, type in stored.items():
        if path not in whole and path not in shapes:
            left = set(range(type[0][0])) - rows[path] if path in rows else None
            if left is None:
                extra[path] = type_text(type)
            elif left:
                extra[path] = f"{type_text(type)}, layers {', '.join(map(str, sorted(left)))} of it"
    return extra
