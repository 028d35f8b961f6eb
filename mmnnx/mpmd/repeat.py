"""Calls like an earlier one, without walking the graph again.

`nnx.jit` in graph mode spends about 20 ms on the graph of a 32-layer model and its optimizer before anything
is dispatched, at every call. Where a call changed no structure and returned plain arrays, the next one needs
only to know that its arguments are alike: modules are pytrees, so that is one flattening and a look-up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.place import fusing, recomputing
from mmnnx.sharding.logical import autosharding
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.task import ignoring, registrations


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one call, taken apart: equal keys run the same program on `values`."""

    key: Any
    variables: dict[int, nnx.Variable]  # by number of the value: the Variable that holds it, if one does
    values: list[Any]


@dataclasses.dataclass(frozen=True)
class Shortcut:
    """How to repeat a call: which value is which input, and which result goes where."""

    run: Callable[[Sequence[Any]], list[Any]]
    inputs: tuple[int, ...]
    updates: tuple[tuple[int, int], ...]  # (number of the result, number of the value whose Variable gets it)
    out_tree: Any

    def __call__(self, arguments: Arguments) -> Any:
        results = self.run([arguments.values[n] for n in self.inputs])
        for result, n in self.updates:
            arguments.variables[n].set_raw_value(results[result])
        return jax.tree.unflatten(self.out_tree, results[len(results) - self.out_tree.num_leaves :])


def take_apart(moving: Any, held: Any) -> Arguments | None:
    """Takes the arguments of a call apart; None where only `nnx.jit` itself will do.

    Args:
      moving: positional and keyword arguments, without the static ones.
      held: the static ones.
    """
    leaves, tree = jax.tree.flatten(moving, is_leaf=lambda x: isinstance(x, nnx.Variable))
    seen: dict[int, int] = {}
    shared: list[int] = []
    types: list[Any] = []
    values: list[Any] = []
    variables: dict[int, nnx.Variable] = {}
    for leaf in leaves:
        variable = leaf if isinstance(leaf, nnx.Variable) else None
        first = seen.setdefault(id(leaf), len(values)) if variable is not None else len(values)
        shared.append(first)
        if first < len(values):
            continue  # a Variable met before
        value = variable.get_raw_value() if variable is not None else leaf
        if isinstance(value, jax.core.Tracer) or (variable is not None and not isinstance(value, jax.Array)):
            return None
        if isinstance(value, jax.Array):
            metadata = () if variable is None else tuple(variable.get_metadata().items())
            types.append((type(leaf), metadata, value.aval, value.sharding if value.committed else None))
        else:
            types.append(jax.typeof(value) if _is_number(value) else None)
            if types[-1] is None:
                return None
        if variable is not None:
            variables[len(values)] = variable
        values.append(value)
    key = (tree, tuple(shared), tuple(types), held, surroundings())
    try:
        hash(key)
    except TypeError:  # a module with an attribute that cannot be hashed
        return None
    return Arguments(key, variables, values)


def surroundings() -> Any:
    """What a trace depends on beside its arguments: the mesh, registered tasks, contexts, configuration."""
    contexts = ignoring.get(), recomputing.get(), fusing.get(), autosharding.get()
    return current_multimesh(), registrations(), contexts, _compat.trace_context()


def learn(
    arguments: Arguments,
    leaves: Sequence[Any],
    updates: Sequence[int | None],
    run: Callable[[Sequence[Any]], list[Any]],
    out_tree: Any,
) -> Shortcut | None:
    """From a call that was just made, how to repeat it; None if values cannot be told apart.

    Args:
      arguments: what the call was given.
      leaves: its flat inputs.
      updates: for each flat result, the input that it is the new value of.
      run: from flat inputs to flat results.
      out_tree: structure of what the call returned.
    """
    number = {id(v): n for n, v in enumerate(arguments.values)}
    if len(number) != len(arguments.values) or any(id(x) not in number for x in leaves):
        return None
    inputs = tuple(number[id(x)] for x in leaves)
    written = [(result, inputs[n]) for result, n in enumerate(updates) if n is not None]
    if any(n not in arguments.variables for _, n in written):
        return None
    return Shortcut(run, inputs, tuple(written), out_tree)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex, bool)) or hasattr(value, "__array__")
