"""The arguments of a call, taken apart: what is looked at before every call, so it is quick.

A walk through the arguments of a first call finds their layout. Later ones are taken apart as that says, with
a few operations for each module and none of Python's for each Variable: to walk through a large model and its
optimizer takes as long as dozens of calls of XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.jit.cache_key import surroundings
from mmnnx.mpmd.runtime.pick import picker
from mmnnx.sharding.divided_array import DividedArray

Pick = Callable[[Any], Sequence[Any]]


class Arguments(NamedTuple):
    """The arguments of one call, taken apart. With one layout and equal types one program runs on `values`.

    Attributes:
      layout: what they consist of besides.
      variables: the Variables in them, each once.
      values: arrays and numbers: those of the Variables, in their order, and then all others.
      types: of the values, and where they are.
    """

    layout: Layout
    variables: Sequence[nnx.Variable]
    values: list[Any]
    types: list[Any]


class ModulePart(NamedTuple):
    """How a module is taken apart.

    Attributes:
      place: where it is.
      cls: its class.
      size: how many attributes it has.
      static, constants: what picks the static ones, and those.
      data: what picks the others.
    """

    place: int
    cls: type
    size: int
    static: Pick
    constants: Sequence[Any]
    data: Pick


class TreePart(NamedTuple):
    """How a pytree that is an attribute is taken apart: where it is, and its structure."""

    place: int
    tree: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """What arguments consist of: all but values and their types.

    Everything in them has a place in one list: first the modules, Variables and values that the arguments
    are, then what each module and pytree holds, in the order of `parts`.

    Attributes:
      static: the static arguments.
      around: what a call depends on beside its arguments.
      tree: structure of the arguments, down to modules, Variables and values.
      parts: how modules and pytrees are taken apart, in the order of their places.
      classes: of what is at each place.
      objects: picks modules and Variables from the places.
      shared: for each of them that has an earlier place as well, (its place, the first one).
      same: likewise for other values.
      static_leaves, constants: what picks the leaves of pytrees that Flax compiles in, and those.
      variables, others: pick the Variables, each once, and all other values from the places.
      metadata: of the Variables.
      held: classes of their values.
      arrays, references, numbers: pick these from the values.
    """

    static: Any
    around: Any
    tree: Any
    parts: Sequence[ModulePart | TreePart]
    classes: list[type]
    objects: Pick
    shared: Sequence[tuple[int, int]]
    same: Sequence[tuple[int, int]]
    static_leaves: Pick
    constants: Sequence[Any]
    variables: Pick
    others: Pick
    metadata: list[Mapping[str, Any]]
    held: list[type]
    arrays: Pick
    references: Pick
    numbers: Pick

    def take_apart(self, dynamic: Any, static: Any, around: Any) -> Arguments | None:
        """The arguments of another call; None if their layout is another."""
        if static != self.static or around != self.around:
            return None
        places, tree = jax.tree.flatten(dynamic, is_leaf=_is_walked)
        try:
            if tree != self.tree:
                return None
            for part in self.parts:
                x = places[part.place]
                if isinstance(part, ModulePart):
                    _, cls, size, pick, constants, data = part
                    if type(x) is not cls:
                        return None
                    attributes = vars(x)
                    if len(attributes) != size or pick(attributes) != constants:
                        return None
                    places += data(attributes)
                else:
                    leaves, tree = jax.tree.flatten(x, is_leaf=_is_walked)
                    if tree != part.tree:
                        return None
                    places += leaves
            objects, variables = self.objects(places), self.variables(places)
            if (
                [*map(type, places)] != self.classes
                or len({*map(id, objects)}) != len(objects) - len(self.shared)
                or any(places[n] is not places[first] for n, first in (*self.shared, *self.same))
                or self.static_leaves(places) != self.constants
                or [*map(_compat.metadata, variables)] != self.metadata
            ):
                return None
        except Exception:  # an attribute is gone, or a user's `==` raised, which JAX explains better
            return None
        values = [v.get_raw_value() for v in variables]
        if [*map(type, values)] != self.held:
            return None
        values += self.others(places)
        return Arguments(self, variables, values, self.types(values))

    def types(self, values: Sequence[Any]) -> list[Any]:
        """Those of values, and where they are."""
        arrays = [*self.arrays(values), *map(_compat.held, self.references(values))]
        found: list[Any] = [x.aval for x in arrays]
        found += [x.sharding if x.committed or type(x) is DividedArray else None for x in arrays]
        found += map(jax.typeof, self.numbers(values))
        return found


def describe(dynamic: Any, static: Any, graph: bool) -> Arguments | None:
    """The arguments of a call, with a layout of their own; None where only `nnx.jit` itself will do.

    Args:
      dynamic: positional and keyword arguments, without the static ones.
      static: the static ones.
      graph: whether modules are graphs. In those, a number in a list or a dict is static.
    """
    places, tree = jax.tree.flatten(dynamic, is_leaf=_is_walked)
    first: dict[int, int] = {}  # the place of each module, Variable and value, by id
    parts: list[ModulePart | TreePart] = []
    objects, shared, same, variables, others, static_leaves = [], [], [], [], [], []
    in_trees: set[int] = set()  # places of the leaves of pytrees that are attributes
    for place, x in enumerate(places):  # which grows
        kind = _KINDS[type(x)]
        if kind is _VARIABLE or kind is _MODULE:
            objects.append(place)
            if (before := first.setdefault(id(x), place)) != place:
                shared.append((place, before))
            elif kind is _VARIABLE:
                variables.append(place)
            else:
                parts.append(module := _module(x, place))
                places += module.data(vars(x))
        elif graph and place in in_trees and not isinstance(x, (jax.Array, jax.Ref, np.ndarray)):
            if nnx.graph.is_node(x):
                return None
            static_leaves.append(place)
        elif kind is not _OTHER:
            others.append(place)
            if (before := first.setdefault(id(x), place)) != place:
                same.append((place, before))
        elif x is not None:
            leaves, inner = jax.tree.flatten(x, is_leaf=_is_walked)
            if any(leaf is x for leaf in leaves):  # it is no pytree
                return None
            parts.append(TreePart(place, inner))
            in_trees.update(range(len(places), len(places) + len(leaves)))
            places += leaves
    values = [places[n].get_raw_value() for n in variables] + [places[n] for n in others]
    kinds = [_KINDS[type(x)] for x in values]
    if {_OTHER, _MODULE, _VARIABLE} & {*kinds}:
        return None
    of_kind = lambda *wanted: picker([n for n, kind in enumerate(kinds) if kind in wanted])
    layout = Layout(
        static,
        surroundings(),
        tree,
        parts,
        [*map(type, places)],
        picker(objects),
        shared,
        same,
        picker(static_leaves),
        picker(static_leaves)(places),
        picker(variables),
        picker(others),
        [dict(_compat.metadata(places[n])) for n in variables],
        [*map(type, values[: len(variables)])],
        of_kind(_ARRAY),
        of_kind(_REFERENCE),
        of_kind(_NUMBER),
    )
    return Arguments(layout, [places[n] for n in variables], values, layout.types(values))


def _module(module: Any, place: int) -> ModulePart:
    attributes, data = vars(module), _compat.data_attributes(module)
    not_static = {*data, _compat.CONSTRUCTION}
    static = [name for name in attributes if name not in not_static]
    pick = picker(static)
    return ModulePart(place, type(module), len(attributes), pick, pick(attributes), picker(data))


def _is_walked(x: Any) -> bool:
    return _KINDS[type(x)] in (_MODULE, _VARIABLE)


def variables_in(*trees: Any) -> Sequence[nnx.Variable]:
    """Every Variable in arguments or results."""
    if (arguments := describe(trees, None, graph=True)) is not None:
        return arguments.variables
    return [value for _, value in nnx.iter_graph(trees) if isinstance(value, nnx.Variable)]


def variables_among(tree: Any) -> list[nnx.Variable]:
    """Every Variable in a pytree that has no modules in it."""
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_walked) if _is_walked(x)]


_VARIABLE, _MODULE, _OTHER = "Variable", "module", "other"
_ARRAY, _REFERENCE, _NUMBER = "array", "reference", "number"


class _Kinds(dict[type, str]):
    """What instances of a class are here. (To ask `isinstance` of each costs more than all the rest.)"""

    def __missing__(self, cls: type) -> str:
        if issubclass(cls, nnx.Variable):
            kind = _VARIABLE
        elif issubclass(cls, nnx.Pytree):
            kind = _MODULE
        elif issubclass(cls, jax.core.Tracer):
            kind = _OTHER
        elif issubclass(cls, jax.Array):
            kind = _ARRAY
        elif issubclass(cls, jax.Ref):
            kind = _REFERENCE
        else:
            number = issubclass(cls, (int, float, complex)) or hasattr(cls, "__array__")
            kind = _NUMBER if number else _OTHER
        self[cls] = kind
        return kind


_KINDS = _Kinds()
