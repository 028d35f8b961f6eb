"""The fast path: calls like an earlier one do not go through `nnx.jit` again.

`nnx.jit` in graph mode spends about 20 ms on the graph of a 32-layer model and its optimizer before anything
is dispatched, at every call. Where a call changed no structure and returned arrays and new Variables alone,
the next one needs only to know that its arguments have equal keys: a walk through them, and a comparison with
each layout that is known, the last used first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from mmnnx import _compat
from mmnnx.mpmd.jit.arguments import Arguments, Layout, describe, variables_among
from mmnnx.mpmd.jit.cache_key import surroundings
from mmnnx.mpmd.jit.homes import is_homeless, note_homes
from mmnnx.mpmd.runtime.pick import picker


@dataclasses.dataclass(frozen=True)
class FastPath:
    """How to repeat a call.

    Attributes:
      run: from flat inputs to flat results.
      pick_inputs: picks the inputs from the values of the arguments.
      updates: (number of a result, number of the value whose Variable gets it).
      out_tree: structure of what the call returns.
      out: which results those are.
      homeless: whether arrays of Variables are unplaced.
    """

    run: Callable[[Sequence[Any]], list[Any]]
    pick_inputs: Callable[[Sequence[Any]], Sequence[Any]]
    updates: tuple[tuple[int, int], ...]
    out_tree: Any
    out: slice
    homeless: bool

    def __call__(self, arguments: Arguments) -> Any:
        variables, values = arguments.variables, arguments.values
        results = self.run(self.pick_inputs(values))
        _compat.set_values(
            [(variables[n], new) for r, n in self.updates if (new := results[r]) is not values[n]]
        )
        out = jax.tree.unflatten(self.out_tree, results[self.out])
        note_homes(variables_among(out))
        return out


class Known(NamedTuple):
    """The arguments of an earlier call, and how to repeat it."""

    layout: Layout
    types: list[Any]
    path: FastPath


class FastPaths:
    """The fast paths of one function, the last used first; `graph` is as given to `mm.jit`."""

    def __init__(self, graph: bool) -> None:
        self.graph = graph
        self.known: list[Known] = []

    def find(self, dynamic: Any, static: Any) -> tuple[Arguments | None, FastPath | None]:
        """The arguments of a call, taken apart, and how to repeat one that had arguments like these, which is
        found at once the next time. No arguments where only `nnx.jit` itself will do."""
        around = surroundings()
        found: dict[Layout, Arguments | None] = {}
        for n, known in enumerate(self.known):
            layout, types, path = known
            if layout not in found:
                found[layout] = layout.take_apart(dynamic, static, around)
            arguments = found[layout]
            if arguments is not None and arguments.types == types:
                if n:  # a new list: other threads may be looking through this one
                    self.known = [known, *(other for other in self.known if other is not known)]
                return arguments, path
        apart = (arguments for arguments in found.values() if arguments is not None)
        return next(apart, None) or describe(dynamic, static, self.graph), None

    def add(self, arguments: Arguments, path: FastPath) -> None:
        """Notes how to repeat a call."""
        self.known = [Known(arguments.layout, arguments.types, path), *self.known]


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
    values, variables = arguments.values, arguments.variables
    number = {id(v): n for n, v in enumerate(values)}
    once = len(values) - len(arguments.layout.same)  # the same value twice is so in each call like this one
    if len(number) != once or any(id(x) not in number for x in leaves):
        return None
    inputs = tuple(number[id(x)] for x in leaves)
    # What is returned is the caller's.
    first = 0 if out_first else len(updates) - out_tree.num_leaves
    out = slice(first, first + out_tree.num_leaves)
    state = range(out.stop, len(updates)) if out_first else range(first)
    written = [(result, inputs[n]) for result in state if (n := updates[result]) is not None]
    if len(written) < len(state) or any(n >= len(variables) for _, n in written):
        return None
    homeless = any(map(is_homeless, values[: len(variables)]))
    return FastPath(run, picker(inputs), tuple(written), out_tree, out, homeless)
