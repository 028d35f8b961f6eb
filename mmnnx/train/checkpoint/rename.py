"""Other names for what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from mmnnx.train.checkpoint.errors import CheckpointError, Path

Rename = Mapping[str, str] | Callable[[str], str]


def renamed(stored: Iterable[Path], rename: Rename) -> dict[Path, Path]:
    """The stored path for each name that `rename` gives.

    Args:
      stored: the paths of what is stored.
      rename: a function of the whole name, or {"old/prefix": "new/prefix"}, of which the longest counts.

    Raises:
      TypeError: for what is neither, or a function whose result is no name.
      CheckpointError: for a prefix that nothing has, or two pieces of state with one name.
    """
    names = (*rename, *rename.values()) if isinstance(rename, Mapping) else ()
    known = callable(rename) or isinstance(rename, Mapping)
    if not known or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f'rename= is {{"old/prefix": "new/prefix"}}, or a function from name to name, not {rename!r}'
        )
    used: set[str] = set()

    def of_prefix(name: str) -> str:
        assert isinstance(rename, Mapping)
        fitting = [old for old in rename if name == old or name.startswith(f"{old}/")]
        if not fitting:
            return name
        old = max(fitting, key=len)
        used.add(old)
        return rename[old] + name[len(old) :]

    new: dict[Path, Path] = {}
    for path in stored:
        given = (rename if callable(rename) else of_prefix)("/".join(path))
        if not isinstance(given, str):
            raise TypeError(f"rename= gives {'/'.join(path)} the name {given!r}: what stays keeps its own")
        name = tuple(given.split("/"))
        if name in new:
            raise CheckpointError(
                f"rename= gives both {'/'.join(new[name])} and {'/'.join(path)} the name {'/'.join(name)}"
            )
        new[name] = path
    if not callable(rename) and (unused := sorted(set(rename) - used)):
        raise CheckpointError(f"rename= names what the checkpoint does not hold: {', '.join(unused)}")
    return new
