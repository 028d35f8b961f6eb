"""The owner of a result: the placed argument that it belongs to.

The result is the new value of its owner, its gradient, or its optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding

from mmnnx.mpmd.frontend.record import Leaf, Record
from mmnnx.sharding.aligned_spec import aligned_spec
from mmnnx.sharding.path_filter import parts_of


class Owners:
    """What is placed among the arguments and results of a function, to be found by state path.

    A suffix of a path is what is left of it without its first keys, such as `mlp.kernel` of
    `blocks.3.mlp.kernel`: optimizer state and gradients have a suffix in common with their parameter.

    Args:
      record: what the trace showed.
      placed, homes, shapes: for each argument, its sharding, None if it is unplaced or whole on several
        meshes; its mesh if it is placed state and no scalar; its shape.
      types, rules: for each result, its type and the sharding that out_shardings ask for.
    """

    def __init__(
        self,
        record: Record,
        placed: Sequence[NamedSharding | None],
        homes: Sequence[Mesh | None],
        shapes: Sequence[tuple[int, ...]],
        types: Sequence[Any],
        rules: Sequence[NamedSharding | None],
    ):
        self.placed, self.homes, self.shapes = placed, homes, shapes
        # Numbers of placed arguments: by path; by state path and shape, and by state path alone; and those of
        # parameters by the suffixes of their state path and shape.
        self.by_path: dict[Any, int] = {}
        self.by_state_path: dict[Any, list[int]] = {}
        self.by_suffix: dict[Any, list[int]] = {}
        self.module_homes: dict[Any, set[Mesh]] = {}  # by path of the module: the meshes of its state
        self.scalars: dict[Any, set[NamedSharding]] = {}  # by state path: the shardings of parameters
        for n, leaf in enumerate(record.inputs):
            if leaf is not None and (home := homes[n]) is not None:
                self._add_argument(n, leaf, home)
            elif leaf is not None and leaf.within and not leaf.is_optimizer_state and not shapes[n]:
                self.scalars.setdefault(leaf.within, set()).update({own} if (own := placed[n]) else ())
        # Parameters among the results, whose optimizer state may be made along with them: their shardings and
        # shapes, by the suffixes of their path and shape, and by these alone.
        self.made: dict[Any, list[tuple[NamedSharding, tuple[int, ...]]]] = {}
        for leaf, aval, rule in zip(record.results, types, rules):
            if leaf is not None and rule is not None and not leaf.is_optimizer_state:
                for k in range(len(leaf.within)):
                    self.made.setdefault((leaf.within[k:], aval.shape), []).append((rule, aval.shape))
                    self.made.setdefault(leaf.within[k:], []).append((rule, aval.shape))
        self.optimizers: dict[Any, list[Any]] = {}  # by such a suffix: those that have state for it so far

    def owner(self, leaf: Leaf, aval: Any) -> tuple[int | None, NamedSharding | None]:
        """(the argument that a result is like or is optimizer state of, the sharding that it has from there).

        Optimizer state of a parameter that is a result itself has a sharding alone.
        """
        suffixes = [(leaf.path[k:], aval.shape) for k in range(len(leaf.path))]
        if leaf.origin is not None:
            follow = self.by_path.get(leaf.origin)
        elif (follow := self._first(self.by_state_path, suffixes)) is None and leaf.is_optimizer_state:
            if (made := self._made(suffixes, leaf)) is not None:
                return None, made[0]
            # Statistics of rows, a history. A scalar may be of a parameter, or a count of all the optimizer.
            ends = [leaf.path[k:] for k in range(1, len(leaf.path))]
            of_scalar = next((self.scalars[end] for end in ends if end in self.scalars), set())
            if len(of_scalar) == 1:
                return None, _aligned(next(iter(of_scalar)), (), aval.shape)
            parts = parts_of(leaf.path) if aval.shape else ends
            if (made := self._made(parts, leaf)) is not None:
                return None, _aligned(*made, aval.shape)
            follow = self._first(self.by_state_path, parts)
            if follow is None:  # of a module within an argument
                follow = self._first(self.by_suffix, suffixes)
        return follow, self._sharding_of(follow, aval.shape)

    def of_parameter(self, leaf: Leaf, shape: tuple[int, ...]) -> NamedSharding | None:
        """The sharding of an argument that is optimizer state of a placed one."""
        keys = [(leaf.path[k:], shape) for k in range(len(leaf.path))]
        return self._sharding_of(self._first(self.by_state_path, [*keys, *parts_of(leaf.path)]), shape)

    def module_mesh(self, leaf: Leaf) -> Mesh | None:
        """The mesh of the innermost module around a piece of state that has other state, if it is one."""
        path, within = leaf.path, leaf.within
        above = [path[:k] for k in range(len(path) - 1, 0, -1)]
        above += [within[:k] for k in range(len(within) - 1, -1, -1)]  # of a copy, or another module
        homes = next((self.module_homes[module] for module in above if module in self.module_homes), set())
        return next(iter(homes)) if len(homes) == 1 else None

    def _add_argument(self, n: int, leaf: Leaf, home: Mesh) -> None:
        self.by_path[leaf.path] = n
        if not leaf.within:
            return
        self.by_state_path.setdefault((leaf.within, self.shapes[n]), []).append(n)
        self.by_state_path.setdefault(leaf.within, []).append(n)
        for path in (leaf.path, leaf.within):
            for k in range(len(path)):
                self.module_homes.setdefault(path[:k], set()).add(home)
        for k in range(1, 0 if leaf.is_optimizer_state else len(leaf.within)):
            self.by_suffix.setdefault((leaf.within[k:], self.shapes[n]), []).append(n)

    def _sharding_of(self, follow: int | None, shape: tuple[int, ...]) -> NamedSharding | None:
        """The sharding of an argument, for what belongs to it and has this shape."""
        own = self.placed[follow] if follow is not None else None
        return _aligned(own, self.shapes[follow], shape) if follow is not None and own is not None else None

    def _first(self, known: dict[Any, list[int]], keys: Iterable[Any]) -> int | None:
        """The argument that is known by the first of these keys. Two models may have the same paths."""
        found = next((known[key] for key in keys if key in known), [])
        # Where it is not clear, what a result is made of, such as a gradient, says where it is.
        return found[0] if len({self.homes[n] for n in found}) == 1 else None

    def _made(self, keys: Iterable[Any], leaf: Leaf) -> tuple[NamedSharding, tuple[int, ...]] | None:
        """The sharding and shape of the parameter among the results that is known by the first of these keys.

        Of several the first is for the first optimizer: optimizers are made in the order of models.
        """
        key = next((key for key in keys if key in self.made), None)
        if key is None:
            return None
        optimizers = self.optimizers.setdefault(key, [])
        if leaf.path[:1] not in optimizers:
            optimizers.append(leaf.path[:1])
        return self.made[key][min(optimizers.index(leaf.path[:1]), len(self.made[key]) - 1)]


def _aligned(parameter: NamedSharding, its_shape: tuple[int, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of optimizer state, from that of its parameter."""
    return NamedSharding(parameter.mesh, aligned_spec(parameter.spec, its_shape, shape))
