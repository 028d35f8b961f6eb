"""Which arguments and results of a function were divided between meshes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from mmnnx.mpmd.ir.shardings import DividedSharding

T = TypeVar("T")


@dataclass(frozen=True)
class PieceMap:
    """Which arguments and results of a function over pieces make up those of the one over whole arrays.

    Attributes:
      arguments: for each argument how it is divided; None if it is not.
      results: for each result the dimension that is divided, and the sizes of the pieces; None if it is not.
      result_shardings: for each divided result how it has to be; None where that is as it comes.
    """

    arguments: Sequence[DividedSharding | None]
    results: Sequence[tuple[int, tuple[int, ...]] | None]
    result_shardings: Sequence[DividedSharding | None]

    def of_arguments(
        self, values: Sequence[Any], join: Callable[[Sequence[Any], DividedSharding], Any]
    ) -> list[Any]:
        """For each argument the value that there is for it, or what `join` makes of those of its pieces."""
        left = iter(values)
        return [next(left) if d is None else join([next(left) for _ in d.pieces], d) for d in self.arguments]

    def of_results(self, values: Sequence[Any]) -> list[list[Any]]:
        """For each result the values that there are for its pieces."""
        left = iter(values)
        return [[next(left) for _ in (range(1) if r is None else r[1])] for r in self.results]

    def by_argument(self, values: Mapping[int, T]) -> dict[int, T]:
        """What is known of arguments of the function over pieces, by number, for those that are whole."""
        first = list(accumulate((1 if d is None else len(d.pieces) for d in self.arguments), initial=0))
        whole = (n for n, d in enumerate(self.arguments) if d is None)
        return {n: values[first[n]] for n in whole if first[n] in values}
