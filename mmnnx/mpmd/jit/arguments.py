"""The arguments of a call, flattened: what is looked at before every call, so it is quick."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.jit.cache_key import surroundings
from mmnnx.sharding.divided_array import DividedArray


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one call, flattened: with equal keys the same program runs on `values`.

    To compare keys is cheap, for most of what is in them are the same objects from call to call; to hash them
    is not.

    Attributes:
      key: all but the values.
      variables: by number of the value, the Variable that holds it, if one does.
      values: arrays and numbers; one that is shared is there once.
    """

    key: Any
    variables: dict[int, nnx.Variable]
    values: list[Any]


def flatten_arguments(dynamic: Any, static: Any) -> Arguments | None:
    """Flattens the arguments of a call; None where only `nnx.jit` itself will do.

    Modules are walked through here, and not by `jax.tree.flatten`: Flax sorts their attributes every time,
    which takes four times as long as all the rest.

    Args:
      dynamic: positional and keyword arguments, without the static ones.
      static: the static ones.
    """
    walk = _Walk()
    walk.pytree(dynamic)
    variables: dict[int, nnx.Variable] = {}
    values: list[Any] = []
    types: list[tuple[Any, ...]] = []
    for x in walk.found:
        held: Any = type(x)
        if (kind := _KINDS[held]) is _VARIABLE:
            variables[len(values)] = x
            metadata, x = _compat.metadata(x), x.get_raw_value()
            held, kind = (held, *metadata, *metadata.values()), _KINDS[type(x)]
        values.append(x)
        array = x if kind is not _REFERENCE else _compat.held(x)
        if kind is _ARRAY or kind is _DIVIDED or kind is _REFERENCE:
            aval, placed = array.aval, array.committed or kind is _DIVIDED
            types.append((held, aval.shape, aval.dtype, aval.weak_type, array.sharding if placed else None))
        elif kind is _NUMBER:
            types.append((held, jax.typeof(x)))
        else:
            return None
    return Arguments((static, surroundings(), types, walk.structure), variables, values)


class _Walk:
    """Goes through arguments.

    It is a class because nested functions that call each other are a reference cycle, which would keep the
    arrays alive until Python's garbage collector runs.

    Attributes:
      structure: what they consist of: types and attributes of modules, static values, numbers of what was met
        before, each after one of the marks below.
      found: the Variables and values in them.
    """

    def __init__(self) -> None:
        self.structure: list[Any] = []
        self.found: list[Any] = []
        self._numbers: dict[int, int] = {}  # of modules and Variables, by id

    def pytree(self, x: Any) -> None:
        leaves, tree = jax.tree.flatten(x, is_leaf=_is_walked)
        self.structure.append(tree)
        for leaf in leaves:
            self._leaf(leaf, _KINDS[type(leaf)])

    def _leaf(self, x: Any, kind: str) -> None:
        if kind is _VARIABLE or kind is _MODULE:
            number = len(self._numbers)
            if (first := self._numbers.setdefault(id(x), number)) < number:
                self.structure += (_SEEN, first)
                return
        if kind is _MODULE:
            self._module(x)
        else:
            self.structure.append(_VALUE)
            self.found.append(x)

    def _module(self, module: Any) -> None:
        append, leaf = self.structure.append, self._leaf
        attributes, is_data = vars(module), _compat.data_attributes(module).get
        names = _SORTED[tuple(attributes)]  # an update by `nnx.jit` changes their order
        self.structure += (_ATTRIBUTES, type(module), names)
        for name in names:
            value = attributes[name]
            if value is None or not is_data(name):
                append(value)
            elif (kind := _KINDS[type(value)]) is not _OTHER:
                leaf(value, kind)
            elif name != _compat.CONSTRUCTION:
                append(_PYTREE)
                self.pytree(value)


def _is_walked(x: Any) -> bool:
    return _KINDS[type(x)] in (_MODULE, _VARIABLE)


def variables_in(*trees: Any) -> Collection[nnx.Variable]:
    """Every Variable in arguments or results."""
    arguments = flatten_arguments(trees, None)
    if arguments is not None:
        return arguments.variables.values()
    return [value for _, value in nnx.iter_graph(trees) if isinstance(value, nnx.Variable)]


_VARIABLE, _MODULE, _OTHER = "Variable", "module", "other"
_ARRAY, _DIVIDED, _REFERENCE, _NUMBER = "array", "divided array", "reference", "number"


class _Mark:
    """An entry of a structure that no argument can be equal to."""


_SEEN, _ATTRIBUTES, _PYTREE, _VALUE = _Mark(), _Mark(), _Mark(), _Mark()


class _Sorted(dict[tuple[str, ...], tuple[str, ...]]):
    """Names of attributes in an order that is always the same."""

    def __missing__(self, names: tuple[str, ...]) -> tuple[str, ...]:
        self[names] = found = tuple(sorted(names))
        return found


_SORTED = _Sorted()


class _Kinds(dict[type, str]):
    """What instances of a class are here. (To ask `isinstance` of each costs more than all the rest.)"""

    def __missing__(self, cls: type) -> str:
        if issubclass(cls, nnx.Variable):
            kind = _VARIABLE
        elif issubclass(cls, nnx.Pytree):
            kind = _MODULE if _compat.module_is_pytree(cls) else _OTHER
        elif issubclass(cls, jax.core.Tracer):
            kind = _OTHER
        elif issubclass(cls, jax.Array):
            kind = _DIVIDED if issubclass(cls, DividedArray) else _ARRAY
        elif issubclass(cls, jax.Ref):
            kind = _REFERENCE
        else:
            number = issubclass(cls, (int, float, complex)) or hasattr(cls, "__array__")
            kind = _NUMBER if number else _OTHER
        self[cls] = kind
        return kind


_KINDS = _Kinds()
