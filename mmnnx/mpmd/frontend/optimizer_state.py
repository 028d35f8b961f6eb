"""Which parameter a piece of optimizer state belongs to, where paths do not tell.

Optimizer state is made of zeros, so nothing in a traced function leads from it to a parameter. And a path
such as `opt_state.0.mu.kernel` may end like those of several parameters: of a network and its moving average,
of two critics. Flax gives optimizer state the metadata of its parameter. Where it matters, the function is
traced once more, with arguments that are marked there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from flax import nnx

from mmnnx.mpmd.frontend.graph import Path

_MARK = "mmnnx_origin"


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Where a Variable was when the function was called.

    Equal to any other: Variables that have equal metadata without marks must have it with them.
    """

    path: Path = dataclasses.field(compare=False)


def mark(trees: tuple) -> None:
    """Marks every Variable of (args, kwargs)."""
    for path, value in nnx.iter_graph(trees, graph=True):
        if isinstance(value, nnx.Variable):
            value.set_metadata(_MARK, _Origin(path[1:]))


def unmark(trees: tuple) -> dict[int, Path]:
    """Takes the marks from every Variable of (args, kwargs, result); returns what they said, by id."""
    found: dict[int, Path] = {}
    for _, value in nnx.iter_graph(trees, graph=True):
        if isinstance(value, nnx.Variable) and value.has_metadata(_MARK):
            found[id(value)] = value.get_metadata(_MARK).path
            value.del_metadata(_MARK)
    return found


def are_clear(parameters: Iterable[Path], optimizer_state: Iterable[Path]) -> bool:
    """Whether the longest suffix that each path of optimizer state shares with parameters is of one alone."""
    suffixes: dict[Path, set[Path]] = {}
    for path in parameters:
        for k in range(len(path)):
            suffixes.setdefault(path[k:], set()).add(path)
    for path in optimizer_state:
        known = (suffixes[path[k:]] for k in range(len(path)) if path[k:] in suffixes)
        if len(next(known, ())) > 1:
            return False
    return True
