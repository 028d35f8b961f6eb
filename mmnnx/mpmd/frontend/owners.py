"""Whose a result is: the placed state that it is like, is a slot of, or is beside in its module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.mpmd.frontend.observe import Leaf, Record
from mmnnx.sharding.path_filter import parts_of


class Owners:
    """What is placed among the arguments and results of a function, by its paths.

    Args:
      record: what the trace showed.
      given, homes, shapes: of each argument, its sharding, the mesh of placed state, and its shape.
      types, rules: of each result, its type and the sharding that a rule asks for.
    """

    def __init__(
        self,
        record: Record,
        given: Sequence[NamedSharding | None],
        homes: Sequence[Mesh | None],
        shapes: Sequence[tuple[int, ...]],
        types: Sequence[Any],
        rules: Sequence[NamedSharding | None],
    ):
        self.given, self.homes, self.shapes = given, homes, shapes
        self.number: dict[Any, int] = {}  # of placed arguments, by path
        self.by_end: dict[Any, list[int]] = {}  # by path from the node and shape, and by path alone
        self.by_part: dict[Any, list[int]] = {}  # parameters by the end of their path, and shape
        self.inside: dict[Any, set[Mesh]] = {}  # where the state of a module is, by the path of the module
        for n, leaf in enumerate(record.inputs):
            if leaf is None or (home := homes[n]) is None:
                continue
            self.number[leaf.path] = n
            if leaf.within:
                self.by_end.setdefault((leaf.within, shapes[n]), []).append(n)
                self.by_end.setdefault(leaf.within, []).append(n)
                for path in (leaf.path, leaf.within):
                    for k in range(len(path)):
                        self.inside.setdefault(path[:k], set()).add(home)
                for k in range(1, 0 if leaf.is_optimizer_state else len(leaf.within)):
                    self.by_part.setdefault((leaf.within[k:], shapes[n]), []).append(n)
        # Parameters among the results, for the slots of an optimizer that is made together with its model: by
        # the end of their path and shape, and by path alone.
        self.made: dict[Any, list[NamedSharding]] = {}
        for leaf, aval, rule in zip(record.results, types, rules):
            if leaf is not None and rule is not None and not leaf.is_optimizer_state:
                for k in range(len(leaf.within)):
                    self.made.setdefault((leaf.within[k:], aval.shape), []).append(rule)
                    self.made.setdefault(leaf.within[k:], []).append(rule)
        self.optimizers: dict[Any, list[Any]] = {}  # that have slots of such parameters, as they are met

    def of(self, leaf: Leaf, aval: Any) -> tuple[int | None, NamedSharding | None]:
        """(the argument that a result is like, or is a slot of; the sharding to have for that).

        A slot of a parameter that is a result itself has a sharding alone.
        """
        endings = [(leaf.path[k:], aval.shape) for k in range(len(leaf.path))]
        if leaf.origin is not None:
            follow = self.number.get(leaf.origin)
        elif (follow := self._first(self.by_end, endings)) is None and leaf.is_optimizer_state:
            if (own := self._made(endings, leaf)) is not None:
                return None, own
            if aval.shape:  # statistics of rows, a history
                parts = parts_of(leaf.path)
                if (own := self._made(parts, leaf)) is not None:
                    return None, NamedSharding(own.mesh, PartitionSpec())
                follow = self._first(self.by_end, parts)
            if follow is None:  # of a module within an argument
                follow = self._first(self.by_part, endings)
        own = self.given[follow] if follow is not None else None
        if follow is not None and own is not None and self.shapes[follow] != aval.shape:
            own = NamedSharding(own.mesh, PartitionSpec())
        return follow, own

    def beside(self, leaf: Leaf) -> Mesh | None:
        """The mesh of the innermost module around a piece of state that has other state, if it is one."""
        path, within = leaf.path, leaf.within
        above = [path[:k] for k in range(len(path) - 1, 0, -1)]
        above += [within[:k] for k in range(len(within) - 1, -1, -1)]  # of a copy, or another module
        homes = next((self.inside[module] for module in above if module in self.inside), set())
        return next(iter(homes)) if len(homes) == 1 else None

    def _first(self, known: dict[Any, list[int]], ends: Iterable[Any]) -> int | None:
        """The argument that is known by the first of these ends. Two models may have the same paths."""
        found = next((known[e] for e in ends if e in known), [])
        # Where it is not clear, what a result is made of, such as a gradient, says where it is.
        return found[0] if len({self.homes[n] for n in found}) == 1 else None

    def _made(self, ends: Iterable[Any], leaf: Leaf) -> NamedSharding | None:
        """Of several that are alike, the first for the first: optimizers are made in the order of models."""
        end = next((e for e in ends if e in self.made), None)
        if end is None:
            return None
        alike = self.optimizers.setdefault(end, [])
        if leaf.path[:1] not in alike:
            alike.append(leaf.path[:1])
        return self.made[end][min(alike.index(leaf.path[:1]), len(self.made[end]) - 1)]
