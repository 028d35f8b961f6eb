"""Paths in a checkpoint mapped to the paths of the state to restore."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from mmnnx.sharding.path_filter import path_text
from mmnnx.train.checkpoint.errors import CheckpointError, Path

Rename = Mapping[str, str] | Callable[[str], str]


def renamed(stored: Iterable[Path], rename: Rename) -> dict[Path, Path]:
    """The stored path for each path that `rename` gives.

    Args:
      stored: the paths of what is stored.
      rename: {"old.prefix": "new.prefix"}, of which the longest that matches counts; or a function from whole
        paths, their keys joined by slashes, to whole paths. Paths may be written with dots or with slashes.

    Raises:
      TypeError: for anything else, or a function whose result is not a string.
      CheckpointError: for a prefix that no stored path has, or two arrays with one path.

    Example:
      >>> renamed([("model", "blocks", "0", "bias")], {"model.blocks": "model.layers"})
      {('model', 'layers', '0', 'bias'): ('model', 'blocks', '0', 'bias')}
    """
    names = (*rename, *rename.values()) if isinstance(rename, Mapping) else ()
    known = callable(rename) or isinstance(rename, Mapping)
    if not known or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f'rename= is {{"old.prefix": "new.prefix"}}, or a function from path to path, not {rename!r}'
        )
    used: set[str] = set()

    def by_prefix(path: Path) -> Path:
        assert isinstance(rename, Mapping)
        matching = [old for old in rename if path[: len(_keys(old))] == _keys(old)]
        if not matching:
            return path
        old = max(matching, key=lambda old: len(_keys(old)))
        used.add(old)
        return _keys(rename[old]) + path[len(_keys(old)) :]

    def by_function(path: Path) -> Path:
        assert callable(rename)
        given = rename("/".join(path))
        if not isinstance(given, str):
            raise TypeError(
                f"rename= gives {path_text(path)} the name {given!r}: return a path, the same one to keep it"
            )
        return _keys(given)

    new: dict[Path, Path] = {}
    for path in stored:
        name = by_function(path) if callable(rename) else by_prefix(path)
        if name in new:
            raise CheckpointError(
                f"rename= gives both {path_text(new[name])} and {path_text(path)} the name {path_text(name)}"
            )
        new[name] = path
    if not callable(rename) and (unused := sorted(path_text(_keys(old)) for old in set(rename) - used)):
        raise CheckpointError(f"rename= names what the checkpoint does not hold: {', '.join(unused)}")
    return new


def _keys(name: str) -> Path:
    return tuple(name.split("/") if "/" in name else name.split("."))
