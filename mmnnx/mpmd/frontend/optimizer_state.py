"""Whose slots an optimizer's are, where paths do not tell.

Slots are made of zeros, so nothing in a traced function leads from them to a parameter, and a path such as
`opt_state.0.mu.kernel` may end like those of several: of a network and its moving average, of two critics.
Flax gives a slot the metadata of its parameter. Where it matters, the function is traced once more, with
arguments that are marked there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from flax import nnx

Path = tuple[Any, ...]

_MARK = "mmnnx_origin"


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Where a Variable was when the function was called; equal to any other, as alike Variables must stay."""

    path: Path = dataclasses.field(compare=False)


def mark(trees: tuple) -> None:
    """Marks every Variable of (args, kwargs)."""
    for path, value in nnx.iter_graph(trees):
        if isinstance(value, nnx.Variable):
            value.set_metadata(_MARK, _Origin(path[1:]))


def unmark(trees: tuple) -> dict[int, Path]:
    """Takes the marks from every Variable of (args, kwargs, result); returns what they said, by id."""
    found: dict[int, Path] = {}
    for _, value in nnx.iter_graph(trees):
        if isinstance(value, nnx.Variable) and value.has_metadata(_MARK):
            found[id(value)] = value.get_metadata(_MARK).path
            value.del_metadata(_MARK)
    return found


def are_clear(parameters: Iterable[Path], slots: Iterable[Path]) -> bool:
    """Whether the longest end that a slot's path has in common with parameters is that of one alone."""
    ends: dict[Path, set[Path]] = {}
    for path in parameters:
        for k in range(len(path)):
            ends.setdefault(path[k:], set()).add(path)
    for slot in slots:
        known = (ends[slot[k:]] for k in range(len(slot)) if slot[k:] in ends)
        if len(next(known, ())) > 1:
            return False
    return True
