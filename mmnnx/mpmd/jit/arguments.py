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
    structure: list[Any] = []
    types: list[Any] = []
    variables: dict[int, nnx.Variable] = {}
    values: list[Any] = []
    met: dict[int, int] = {}  # modules and Variables are numbered, by id
    known = True

    def visit(x: Any, kind: str) -> None:
        nonlocal known
        if kind is _MODULE or kind is _VARIABLE:
            number = len(met)
            if (first := met.setdefault(id(x), number)) < number:
                structure.extend((_SEEN, first))
                return
        if kind is _MODULE:
            attributes, is_data = vars(x), _compat.data_attributes(x)
            names = _SORTED[tuple(attributes)]  # an update by `nnx.jit` changes their order
            structure.extend((_ATTRIBUTES, type(x), names))
            for name in names:
                value = attributes[name]
                if not is_data.get(name):
                    structure.append(value)
                elif (kind := _KINDS[type(value)]) is not _OTHER:
                    visit(value, kind)
                elif name != _compat.CONSTRUCTION:
                    visit_pytree(value)
            return
        structure.append(_VALUE)
        held: Any = type(x)
        if kind is _VARIABLE:
            variables[len(values)] = x
            held = (held, *x.get_metadata().items())
            x = x.get_raw_value()
            kind = _KINDS[type(x)]
        values.append(x)
        if kind is _ARRAY or kind is _REFERENCE:
            array = x if kind is _ARRAY else _compat.held(x)
            placed = array.committed or isinstance(array, DividedArray)
            aval, home = array.aval, array.sharding if placed else None
            types.append((held, aval.shape, aval.dtype, aval.weak_type, home))
        elif kind is _NUMBER:
            types.append((held, jax.typeof(x)))
        else:
            known = False

    def visit_pytree(x: Any) -> None:
        leaves, tree = jax.tree.flatten(x, is_leaf=_is_walked)
        structure.extend((_PYTREE, tree))
        for leaf in leaves:
            visit(leaf, _KINDS[type(leaf)])

    visit_pytree(dynamic)
    if not known:
        return None
    return Arguments((static, surroundings(), types, structure), variables, values)


def _is_walked(x: Any) -> bool:
    return _KINDS[type(x)] in (_MODULE, _VARIABLE)


def variables_in(*trees: Any) -> Collection[nnx.Variable]:
    """Every Variable in arguments or results."""
    arguments = flatten_arguments(trees, None)
    if arguments is not None:
        return arguments.variables.values()
    return [value for _, value in nnx.iter_graph(trees) if isinstance(value, nnx.Variable)]


_VARIABLE, _MODULE, _OTHER = "Variable", "module", "other"
_ARRAY, _REFERENCE, _NUMBER = "array", "reference", "number"


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
            kind = _ARRAY
        elif issubclass(cls, jax.Ref):
            kind = _REFERENCE
        else:
            number = issubclass(cls, (int, float, complex)) or hasattr(cls, "__array__")
            kind = _NUMBER if number else _OTHER
        self[cls] = kind
        return kind


_KINDS = _Kinds()
