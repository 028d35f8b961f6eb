"""Watches an NNX function while it is traced: what its arrays are, and which result updates what.

`nnx.jit` turns a function over NNX objects into one over flat arrays. `Observer` stands on both sides of that
step: around the user's function it sees paths and Variables, around the flat one the order of inputs and
results; tracers are the same objects on both sides.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx

from mmnnx import _compat
from mmnnx.mpmd.frontend.graph import Path, arrays_with_paths, is_node, kept_by_optimizers, nodes
from mmnnx.mpmd.frontend.optimizer_state import mark, unmark
from mmnnx.mpmd.frontend.own_arrays import copy_taken, give_own_arrays
from mmnnx.mpmd.frontend.record import Leaf, Record, Rule
from mmnnx.mpmd.frontend.sharding_rules import sharding_rules

_NONE: Mapping[int, Path] = MappingProxyType({})


class Observer:
    """Wraps a function to record what its arrays are while it is traced.

    Several threads may trace it at once, and it may call itself: only the outermost call is watched.

    Args:
      in_shardings, out_shardings: those of `mm.jit`.
      static: from the positional arguments of a call to the numbers of the static ones.
    """

    def __init__(self, in_shardings: Any, out_shardings: Any, static: Callable[[Sequence[Any]], set[int]]):
        self.in_shardings = in_shardings
        self.out_shardings = out_shardings
        self.static = static
        # .trace is the one under way, .record of the last one, .needs_origins whether the next finds origins.
        self._now = threading.local()

    def take_record(self) -> Record:
        """The record of the trace that this thread just made."""
        return self._now.__dict__.pop("record")

    def ask_for_origins(self) -> None:
        """Has the next trace of this thread find out which parameters new optimizer state belongs to."""
        self._now.needs_origins = True

    def around_user(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The user's function, watched."""

        @functools.wraps(fun)
        def watched(*args, **kwargs):
            trace = self._now.__dict__.pop("trace", None)
            if trace is None:  # called while it is traced, or inside another function
                return fun(*args, **kwargs)
            trace.see_arguments(args, kwargs, self._argument_rules(args, kwargs))
            if needs_origins := self._now.__dict__.pop("needs_origins", False):
                mark((args, kwargs))
            out = fun(*args, **kwargs)
            origins = unmark((args, kwargs, out)) if needs_origins else {}
            taken = give_own_arrays((args, kwargs, out), trace.paths(), _plain((args, kwargs)))
            if self.out_shardings is not None:
                out = copy_taken(out, taken)
            rules = sharding_rules(self.out_shardings, out, "out_shardings", (args, kwargs, out))
            trace.see_results(args, kwargs, out, rules, origins)
            return out

        return watched

    def around_flat(self, fun: Callable[..., Any], dynamic: Callable[..., list[Any]]) -> Callable[..., Any]:
        """The flat function, watched. `dynamic` gives the flat inputs of a call."""

        @functools.wraps(fun)
        def watched(*args, **kwargs):
            trace = self._now.trace = _Trace()
            inputs = dynamic(args, kwargs)  # before the function adds to what it is given
            try:
                out = fun(*args, **kwargs)
            finally:
                self._now.__dict__.pop("trace", None)
            self._now.record = trace.record(inputs, jax.tree.leaves(out))
            return out

        return watched

    def _argument_rules(self, args: tuple, kwargs: dict[str, Any]) -> dict[int, Rule]:
        shardings = self.in_shardings
        if isinstance(shardings, (tuple, list)):
            shardings = list(shardings)
            for n in sorted(self.static(args)):
                shardings.insert(n, None)
            shardings = tuple(shardings)
        return sharding_rules(shardings, args, "in_shardings", (args, kwargs))


class _Trace:
    """What the user's function shows in one trace.

    Attributes:
      arguments, updated, results: what is known of arrays, by id of the tracer: of arguments before the call,
        of their state after it, and of results.
      returned: ids of the results that are arrays themselves.
      out_tree: as in `Record`.
    """

    def __init__(self) -> None:
        self.arguments: dict[int, Leaf] = {}
        self.updated: dict[int, Leaf] = {}
        self.results: dict[int, Leaf] = {}
        self.returned: set[int] = set()
        self.out_tree: Any = None
        self._graph: Any = None  # of the arguments before the call
        self._nodes: list[tuple[Path, Any]] = []  # in them
        self._alive: list[Any] = []  # the tracers, so that an id stays theirs

    def see_arguments(self, args: tuple, kwargs: dict[str, Any], rules: Mapping[int, Rule]) -> None:
        """Notes the arguments before the call."""
        self.arguments = self._leaves((args, kwargs), rules)
        self._graph, self._nodes = nnx.graphdef((args, kwargs), graph=True), nodes((args, kwargs))

    def paths(self) -> dict[int, Path]:
        """The paths of the arguments before the call, by id."""
        return {number: leaf.path for number, leaf in self.arguments.items()}

    def see_results(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        out: Any,
        rules: Mapping[int, Rule],
        origins: Mapping[int, Path],
    ) -> None:
        """Notes the results, and the arguments after the call.

        Args:
          rules: of the results, by id of the tracer.
          origins: by id, for Variables that were made for a parameter, the path of that.
        """
        plain, came = _plain((args, kwargs)), {id(value): path for path, value in self._nodes}
        after = self._leaves((args, kwargs), {}, came, origins)
        self.updated = {number: leaf for number, leaf in after.items() if number not in plain}
        self.results = self._leaves((out,), rules, origins=origins)
        leaves = jax.tree.leaves(out, is_leaf=is_node)
        self.returned = set(map(id, leaves))
        if self._are_new(filter(is_node, leaves)) and self._same_structure(args, kwargs):
            self.out_tree = jax.tree.structure(out)

    def record(self, inputs: Sequence[Any], results: Sequence[Any]) -> Record:
        """What is known of the flat inputs and results."""
        known = [self.arguments.get(id(a)) for a in inputs]
        number = {leaf.path: n for n, leaf in enumerate(known) if leaf is not None}
        times = Counter(map(id, results))
        found: list[Leaf | None] = []
        for a in results:
            leaf, made = self.updated.get(id(a)), self.results.get(id(a))
            if id(a) in self.returned and times[id(a)] == 1:
                leaf = None  # a value of state that is not written back
            if leaf is not None:  # state of an argument, which may be returned as well
                rule = made.rule if made is not None else None
                leaf = dataclasses.replace(leaf, updates=number.get(leaf.path), rule=rule)
            found.append(leaf or made)
        references = {}
        for n, (a, leaf) in enumerate(zip(inputs, known)):
            if isinstance(a, jax.Ref) and leaf is not None:
                made = self.results.get(id(a))
                rule = made.rule if made is not None else None
                references[n] = dataclasses.replace(leaf, updates=n, rule=rule)
        return Record(known, found, references, self.out_tree)

    def _are_new(self, found: Iterable[Any]) -> bool:
        """Whether nodes are Variables that the structure of a pytree makes anew: none of an argument, and
        none that is there twice."""
        seen = {id(value) for _, value in self._nodes}
        for x in found:
            if not isinstance(x, nnx.Variable) or id(x) in seen:
                return False
            seen.add(id(x))
        return True

    def _same_structure(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the arguments have the structure that they had before the call."""
        # Equal graphs are not enough: what two attributes hold may have been exchanged.
        before, after = ([id(value) for _, value in them] for them in (self._nodes, nodes((args, kwargs))))
        return before == after and _compat.same_graph(self._graph, nnx.graphdef((args, kwargs), graph=True))

    def _leaves(
        self,
        trees: tuple,
        rules: Mapping[int, Rule],
        came: Mapping[int, Path] = _NONE,
        origins: Mapping[int, Path] = _NONE,
    ) -> dict[int, Leaf]:
        """What is known of every array in (args, kwargs) or (result,), by id; they are kept alive.

        Args:
          came: by id, the paths of Variables that are known by another than they have now.
        """
        found: dict[int, Leaf] = {}
        of_optimizers = kept_by_optimizers(trees)
        for path, value in nnx.iter_graph(trees, graph=True):
            path = came.get(id(value), path) if isinstance(value, nnx.Variable) else path
            of_optimizer = id(value) in of_optimizers
            for keys, a in arrays_with_paths(value):
                self._alive.append(a)
                where, within = (*path[1:], *keys), (*path[len(trees) :], *keys)
                origin = origins.get(id(value))
                kept = isinstance(value, nnx.Variable)
                found[id(a)] = Leaf(where, within, kept, of_optimizer, rules.get(id(a)), origin=origin)
        return found


def _plain(trees: tuple) -> set[int]:
    """The ids of the arguments that are arrays, no state of an NNX object."""
    return {id(x) for x in jax.tree.leaves(trees, is_leaf=is_node)}
