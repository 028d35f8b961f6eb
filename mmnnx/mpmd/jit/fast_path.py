"""The fast path: calls like an earlier one do not go through `nnx.jit` again.

`nnx.jit` in graph mode spends about 20 ms on the graph of a 32-layer model and its optimizer before anything
is dispatched, at every call. Where a call changed no structure and returned plain arrays, the next one needs
only to know that its arguments have equal keys: modules are pytrees, so that is one flattening and a look-up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.jit.cache_key import surroundings
from mmnnx.mpmd.jit.homes import is_homeless
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


@dataclasses.dataclass(frozen=True)
class FastPath:
    """How to repeat a call.

    Attributes:
      run: from flat inputs to flat results.
      inputs: for each input, the number of its value.
      updates: (number of a result, number of the value whose Variable gets it).
      out_tree: structure of what the call returns.
      out: which results those are.
      homeless: the Variables, by number of their values, whose arrays are unplaced.
    """

    run: Callable[[Sequence[Any]], list[Any]]
    inputs: tuple[int, ...]
    updates: tuple[tuple[int, int], ...]
    out_tree: Any
    out: slice
    homeless: tuple[int, ...]

    def __call__(self, arguments: Arguments) -> Any:
        results = self.run([arguments.values[n] for n in self.inputs])
        written = [(n, results[r]) for r, n in self.updates if results[r] is not arguments.values[n]]
        _compat.set_values([(arguments.variables[n], value) for n, value in written])
        return jax.tree.unflatten(self.out_tree, results[self.out])


def flatten_arguments(dynamic: Any, static: Any) -> Arguments | None:
    """Flattens the arguments of a call; None where only `nnx.jit` itself will do.

    Args:
      dynamic: positional and keyword arguments, without the static ones.
      static: the static ones.
    """
    modules: list[int] = []  # by id, as often as they are met
    times: dict[int, int] = {}
    endless: list[Any] = []

    def is_variable(x: Any) -> bool:
        kind = _KINDS[type(x)]
        if kind is _MODULE:
            modules.append(id(x))
            times[id(x)] = times.get(id(x), 0) + 1
            if times[id(x)] > _MANY:  # to raise an error here would cost JAX some of Python's stack for good
                endless.append(x)
        return kind is _VARIABLE or bool(endless)

    leaves, tree = jax.tree.flatten(dynamic, is_leaf=is_variable)
    if endless:
        return None
    numbers = {m: n for n, m in enumerate(times)}
    same = [numbers[m] for m in modules] if len(numbers) < len(modules) else None
    seen: dict[int, int] = {}
    shared: list[int] = []
    types: list[Any] = []
    values: list[Any] = []
    variables: dict[int, nnx.Variable] = {}
    for leaf in leaves:
        value, kind, metadata = leaf, _KINDS[type(leaf)], None
        first = seen.setdefault(id(leaf), len(values)) if kind is _VARIABLE else len(values)
        shared.append(first)
        if first < len(values):
            continue  # a Variable met before
        if kind is _VARIABLE:
            variables[first] = leaf
            value, metadata = leaf.get_raw_value(), tuple(leaf.get_metadata().items())
            kind = _KINDS[type(value)]
        if kind is _ARRAY or kind is _REFERENCE:
            array = value if kind is _ARRAY else _compat.held(value)
            placed = array.committed or isinstance(array, DividedArray)
            aval, home = array.aval, array.sharding if placed else None
            types.append((type(leaf), metadata, aval.shape, aval.dtype, aval.weak_type, home))
        elif kind is _NUMBER:
            types.append((type(leaf), metadata, jax.typeof(value)))
        else:
            return None
        values.append(value)
    return Arguments((static, surroundings(), shared, same, types, tree), variables, values)


def variables_in(*trees: Any) -> Collection[nnx.Variable]:
    """Every Variable in arguments or results."""
    arguments = flatten_arguments(trees, None)
    if arguments is not None:
        return arguments.variables.values()
    return [value for _, value in nnx.iter_graph(trees) if isinstance(value, nnx.Variable)]


_VARIABLE, _MODULE, _OTHER = "Variable", "module", "other"
_ARRAY, _REFERENCE, _NUMBER = "array", "reference", "number"

_MANY = 64  # a module that is met more often refers to itself, as a child does that knows its parent.
# Its flattening would go on until Python's stack is full.


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


class FastPaths:
    """The fast paths of one function, the last used first."""

    def __init__(self) -> None:
        self.known: list[tuple[Any, FastPath]] = []  # with the key of each

    def find(self, arguments: Arguments) -> FastPath | None:
        """How to repeat the call that had arguments like these. It is found at once the next time."""
        try:
            for n, (key, path) in enumerate(self.known):
                if key == arguments.key:
                    if n:  # a new list: other threads may be looking through this one
                        rest = [known for known in self.known if known[1] is not path]
                        self.known = [(key, path), *rest]
                    return path
        except ValueError:  # a module with an attribute that is not just equal or not
            pass
        return None

    def add(self, arguments: Arguments, path: FastPath) -> None:
        """Notes how to repeat a call."""
        static, around, _, _, types, tree = arguments.key
        try:
            hash((static, around, tuple(types), tree))
        except TypeError:  # what cannot be hashed may be changed, and still be equal to itself
            return
        self.known.insert(0, (arguments.key, path))


def fast_path(
    arguments: Arguments,
    leaves: Sequence[Any],
    updates: Sequence[int | None],
    run: Callable[[Sequence[Any]], list[Any]],
    out_tree: Any,
    out_first: bool,
) -> FastPath | None:
    """From a call that was just made, how to repeat it; None if it is not known where each value goes.

    Args:
      arguments: what the call was given.
      leaves: its flat inputs.
      updates: for each flat result, the input that it is the new value of.
      run: from flat inputs to flat results.
      out_tree: structure of what the call returned.
      out_first: whether that comes before the updates in the flat results, as without updates of graphs, or
        after them.
    """
    number = {id(v): n for n, v in enumerate(arguments.values)}
    if len(number) != len(arguments.values) or any(id(x) not in number for x in leaves):
        return None
    inputs = tuple(number[id(x)] for x in leaves)
    # What is returned is the caller's.
    first = 0 if out_first else len(updates) - out_tree.num_leaves
    out = slice(first, first + out_tree.num_leaves)
    state = range(out.stop, len(updates)) if out_first else range(first)
    written = [(result, inputs[n]) for result in state if (n := updates[result]) is not None]
    if len(written) < len(state) or any(n not in arguments.variables for _, n in written):
        return None
    homeless = tuple(n for n in arguments.variables if is_homeless(arguments.values[n]))
    return FastPath(run, inputs, tuple(written), out_tree, out, homeless)
