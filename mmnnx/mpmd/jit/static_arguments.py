"""Static arguments: those that a function is compiled for, instead of arrays that it is given."""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class StaticArguments:
    """Which arguments are static, by position and by name."""

    numbers: frozenset[int]
    names: frozenset[str]

    def positions(self, args: Sequence[Any]) -> set[int]:
        """The numbers of those among the positional arguments of a call."""
        return {n for n in range(len(args)) if n in self.numbers or n - len(args) in self.numbers}

    def separate(self, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """(dynamic arguments, static arguments) of a call.

        Raises:
          ValueError: for a static argument that cannot be hashed.
        """
        positions = self.positions(args)
        dynamic = (
            tuple(a for n, a in enumerate(args) if n not in positions),
            {k: v for k, v in kwargs.items() if k not in self.names},
        )
        numbered = tuple((n, a) for n, a in enumerate(args) if n in positions)
        named = tuple(sorted((k, v) for k, v in kwargs.items() if k in self.names))
        for name, value in (*numbered, *named):
            _check_hashable(name, value)
        # 1, 1.0 and True are equal, and not the same.
        return dynamic, (numbered, named, tuple(type(value) for _, value in (*numbered, *named)))


def _check_hashable(name: int | str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"static argument {name} cannot be hashed: {reprlib.repr(value)}. The function is compiled anew "
            "for each of its values, which must be known again: give a tuple for a list, a frozen dataclass "
            "for a dict, and let no NNX object be static"
        ) from None


def restore(dynamic: Any, static: Any) -> tuple[list[Any], dict[str, Any]]:
    """Puts dynamic and static arguments together again: (args, kwargs) of the call."""
    args = list(dynamic[0])
    for n, a in static[0]:
        args.insert(n, a)
    return args, {**dynamic[1], **dict(static[1])}


def static_arguments(fun: Callable, numbers: Any, names: Any) -> StaticArguments:
    """Those that static_argnums and static_argnames mean, as in `jax.jit`.

    With one of the two given, the other follows from the signature.
    """
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers or ())
    names = (names,) if isinstance(names, str) else tuple(names or ())
    if bool(numbers) != bool(names):
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        both = {p.name: n for n, p in enumerate(parameters) if p.kind == p.POSITIONAL_OR_KEYWORD}
        if numbers:
            positional = len(both) + sum(p.kind == p.POSITIONAL_ONLY for p in parameters)
            wanted = {n + positional if n < 0 else n for n in numbers}
            names = tuple(name for name, n in both.items() if n in wanted)
        else:
            numbers = tuple(n for name, n in both.items() if name in names)
    return StaticArguments(frozenset(numbers), frozenset(names))
