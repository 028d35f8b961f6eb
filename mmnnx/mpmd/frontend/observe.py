"""What the arrays of a traced NNX function are: state paths, placement rules, and which result updates what.

`nnx.jit` turns a function over graph nodes into one over flat arrays. `Observer` stands on both sides of
that step while the function is traced: around the user's function it sees paths and Variables, around the
flat one the order of inputs and results; tracers are the same objects on both sides.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.mpmd.frontend.optimizer_state import are_clear, mark, unmark
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.placement import Match, PlacementError, TaskSharding
from mmnnx.sharding.task import Task

Path = tuple[Any, ...]


class Rule(NamedTuple):
    """What in_shardings or out_shardings ask for.

    Attributes:
      task: the task, if one was named.
      sharding: the sharding.
      own: whether they ask it for this state; else for its parameter, if it is a slot of an optimizer.
    """

    task: Task | None
    sharding: Sharding
    own: bool = True


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array among the arguments or results of a function.

    Attributes:
      path: from the argument (its number or name) or the result to the array.
      within: the same from the graph node that is the argument or result itself.
      is_optimizer_state: whether an optimizer keeps it (mu, nu, ...).
      rule: what in_shardings or out_shardings ask for it.
      updates: for the new value of an argument's state, the number of the input.
      origin: for a slot that was made for an argument's state, the path of that, if the function was asked.
    """

    path: Path
    within: Path
    is_optimizer_state: bool = False
    rule: Rule | None = None
    updates: int | None = None
    origin: Path | None = None

    def __str__(self) -> str:
        return ".".join(map(str, self.path)) or "the value"


@dataclasses.dataclass
class Record:
    """What one trace showed.

    Attributes:
      inputs, results: every input and every result, in flat order.
      out_tree: structure of what the function returned, if that is arrays alone and its arguments are of the
        same Variables and modules as before; else None.
    """

    inputs: list[Leaf | None] = dataclasses.field(default_factory=list)
    results: list[Leaf | None] = dataclasses.field(default_factory=list)
    out_tree: Any = None

    def needs_origins(self) -> bool:
        """Whether paths do not tell whose slots those of an optimizer are that was made."""
        new = [
            leaf.path
            for leaf in self.results
            if leaf is not None and leaf.is_optimizer_state and leaf.updates is None
        ]
        known = (leaf.path for leaf in self.inputs if leaf is not None and not leaf.is_optimizer_state)
        return bool(new) and not are_clear(known, new)

    def names(self) -> list[str]:
        """What messages call the inputs: "0.blocks.3.mlp.kernel", "argument 2"."""
        return [
            str(leaf) if leaf is not None and leaf.within else f"argument {n if leaf is None else leaf}"
            for n, leaf in enumerate(self.inputs)
        ]


@dataclasses.dataclass
class _Seen:
    """What the user's function shows in one trace.

    Attributes:
      arrived, updated, made: by id of the tracer: arguments before and after the call, and results.
      returned: ids of the results that are arrays themselves.
      out_tree: as in `Record`.
      alive: the tracers, so that an id stays theirs.
    """

    arrived: dict[int, Leaf] = dataclasses.field(default_factory=dict)
    updated: dict[int, Leaf] = dataclasses.field(default_factory=dict)
    made: dict[int, Leaf] = dataclasses.field(default_factory=dict)
    returned: set[int] = dataclasses.field(default_factory=set)
    out_tree: Any = None
    alive: list[Any] = dataclasses.field(default_factory=list)


class Observer:
    """Wraps a function to record what its arrays are while it is traced.

    Several threads may trace it at once, and it may call itself: only the outermost call is watched.
    """

    def __init__(self, in_shardings: Any, out_shardings: Any, static: Callable[[Sequence[Any]], set[int]]):
        self.in_shardings = in_shardings
        self.out_shardings = out_shardings
        self.static = static
        # .seen is of the trace under way, .record of the last one, .asks whether the next is for origins.
        self._now = threading.local()

    def take_record(self) -> Record:
        """The record of the trace that this thread just made."""
        return self._now.__dict__.pop("record")

    def ask_for_origins(self) -> None:
        """Has the next trace of this thread find out whose the slots are that it makes."""
        self._now.asks = True

    def around_user(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The user's function, watched."""

        @functools.wraps(fun)
        def watched(*args, **kwargs):
            seen = self._now.__dict__.pop("seen", None)
            if seen is None:  # called while it is traced, or inside another function
                return fun(*args, **kwargs)
            rules = self._argument_rules(args, kwargs)
            seen.arrived = dict(_leaves((args, kwargs), rules, seen.alive))
            before, there = nnx.graphdef((args, kwargs)), _nodes((args, kwargs))
            came = {id(value): path for path, value in there}
            if asks := self._now.__dict__.pop("asks", False):
                mark((args, kwargs))
            out = fun(*args, **kwargs)
            origins = unmark((args, kwargs, out)) if asks else {}
            plain = {id(x) for x in jax.tree.leaves((args, kwargs), is_leaf=_is_node)}  # no state of a node
            taken = _set_apart((args, kwargs, out), seen.arrived, plain)
            if self.out_shardings is not None:
                out = _distinct(out, taken)
            nodes = any(_is_node(x) for x in jax.tree.leaves(out, is_leaf=_is_node))
            # Equal graphs are not enough: what two attributes hold may have been exchanged.
            kept = [id(value) for _, value in _nodes((args, kwargs))] == [id(value) for _, value in there]
            same = not nodes and kept and _compat.same_graph(before, nnx.graphdef((args, kwargs)))
            seen.out_tree = jax.tree.structure(out) if same else None
            after = _leaves((args, kwargs), {}, seen.alive, came, origins)
            seen.updated = {number: leaf for number, leaf in after if number not in plain}
            rules = _rules(self.out_shardings, out, "out_shardings", (args, kwargs, out))
            seen.made = dict(_leaves((out,), rules, seen.alive, {}, origins))
            seen.returned = set(map(id, jax.tree.leaves(out, is_leaf=_is_node)))
            return out

        return watched

    def around_flat(self, fun: Callable[..., Any], dynamic: Callable[..., list[Any]]) -> Callable[..., Any]:
        """The flat function, watched. `dynamic` gives the flat inputs of a call."""

        @functools.wraps(fun)
        def watched(*args, **kwargs):
            seen = self._now.seen = _Seen()
            given = dynamic(args, kwargs)  # before the function adds to what it is given
            try:
                out = fun(*args, **kwargs)
            finally:
                self._now.__dict__.pop("seen", None)
            inputs = [seen.arrived.get(id(a)) for a in given]
            number = {leaf.path: n for n, leaf in enumerate(inputs) if leaf is not None}
            results, flat = [], jax.tree.leaves(out)
            times = Counter(map(id, flat))
            for a in flat:
                leaf, made = seen.updated.get(id(a)), seen.made.get(id(a))
                if id(a) in seen.returned and times[id(a)] == 1:
                    leaf = None  # a value of state that is not written back
                if leaf is not None:  # state of an argument, which may be returned as well
                    rule = made.rule if made is not None else None
                    leaf = dataclasses.replace(leaf, updates=number.get(leaf.path), rule=rule)
                results.append(leaf or made)
            self._now.record = Record(inputs, results, seen.out_tree)
            return out

        return watched

    def _argument_rules(self, args: tuple, kwargs: dict[str, Any]) -> dict[int, Any]:
        shardings = self.in_shardings
        if isinstance(shardings, (tuple, list)):
            shardings = list(shardings)
            for n in sorted(self.static(args)):
                shardings.insert(n, None)
            shardings = tuple(shardings)
        return _rules(shardings, args, "in_shardings", (args, kwargs))


_NONE: Mapping[int, Path] = MappingProxyType({})


def _leaves(
    trees: tuple,
    rules: dict[int, Any],
    alive: list[Any],
    came: Mapping[int, Path] = _NONE,
    origins: Mapping[int, Path] = _NONE,
) -> Iterator[tuple[int, Leaf]]:
    """Every array in (args, kwargs) or (result,), by id, with what is known about it; adds it to `alive`.

    `came` has the paths, by id, of Variables that are known by another than they have now; `origins` those of
    the Variables that they were made for.
    """
    for path, value in nnx.iter_graph(trees):
        path = came.get(id(value), path) if isinstance(value, nnx.Variable) else path
        of_optimizer = _compat.is_optimizer_state(value)
        for keys, a in _paths_inside(value):
            alive.append(a)
            where, within = (*path[1:], *keys), (*path[len(trees) :], *keys)
            yield id(a), Leaf(where, within, of_optimizer, rules.get(id(a)), origin=origins.get(id(value)))


def _set_apart(trees: tuple[Any, Any, Any], arrived: dict[int, Leaf], plain: set[int]) -> set[int]:
    """Gives each Variable of (args, kwargs, result) arrays that are no other's, nor an argument themselves.

    What an array is to the function is known by the tracer: one of two Variables that hold the same would
    lose its home and its updates. Those that hold what they came with keep it.

    Returns:
      The ids of the arguments that are arrays, and of all that Variables hold.

    Raises:
      ValueError: for a Variable that holds a reference.
    """
    taken = set(plain)
    changed = []
    for path, value in nnx.iter_graph(trees):
        if isinstance(value, nnx.Variable):
            if value.ref:
                raise ValueError(
                    f"{'.'.join(map(str, path[1:])) or 'the result'} is a Variable with ref=True: mm.jit "
                    "takes state that is returned, not references; leave ref out"
                )
            held = {(*path[1:], *keys): id(a) for keys, a in _paths_inside(value)}
            kept = all(a in arrived and arrived[a].path == where for where, a in held.items())
            if path[0] < 2 and held and kept:
                taken.update(held.values())
            else:
                changed.append(value)
    for value in changed:
        held, own = value.get_raw_value(), set(map(id, _arrays(value)))
        if len(own) == len(jax.tree.leaves(held)) and taken.isdisjoint(own):
            taken |= own
        else:
            _compat.set_values([(value, _distinct(held, taken))])
    return taken


def _distinct(tree: Any, taken: set[int]) -> Any:
    """The same tree, with a copy of each array that is in `taken` or was met before; adds all to `taken`.

    NumPy's arrays become JAX's, as they are after a call.
    """

    def once(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = jnp.copy(jnp.asarray(leaf))  # traced: it can be placed
        if isinstance(leaf, jax.Array):
            leaf = jnp.copy(leaf) if id(leaf) in taken else leaf
            taken.add(id(leaf))
        return leaf

    return jax.tree.map(once, tree, is_leaf=_is_node)


def _paths_inside(value: Any) -> list[tuple[Path, Any]]:
    """The arrays of a Variable, with their paths where it holds a pytree; or the array itself."""
    held = value.get_raw_value() if isinstance(value, nnx.Variable) else value
    leaves, _ = jax.tree_util.tree_flatten_with_path(held) if held is not value else ([((), value)], None)
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in keys), a)
        for keys, a in leaves
        if isinstance(a, jax.Array)
    ]


def _arrays(value: Any) -> list[Any]:
    return [a for _, a in _paths_inside(value)]


def _rules(prefix: Any, tree: Any, name: str, around: Any) -> dict[int, Rule]:
    """For each array (by id) under a prefix tree of shardings, the one it is given. The parameters that
    `around` has tell which rules are for the slots of an optimizer alone."""
    if prefix is None:
        return {}
    parameters = functools.cache(lambda: _parameter_paths(around))
    rules: dict[int, Rule] = {}
    used: dict[int, tuple[TaskSharding, set[int]]] = {}

    def give(entry: Any, subtree: Any) -> None:
        for node in jax.tree.leaves(subtree, is_leaf=_has_paths) if entry is not None else ():
            for value, paths in _paths(node):
                arrays = _arrays(value)
                if not arrays:
                    continue
                task: Task | None = None
                sharding: Sharding | None
                own = True
                if isinstance(entry, TaskSharding):
                    matched = used.setdefault(id(entry), (entry, set()))[1]
                    matches = _lookup(entry, paths, value, parameters)
                    if not matches:
                        continue
                    matched.update(match.index for match in matches)
                    task, sharding, own = matches[0].task, matches[0].sharding, matches[0].own
                elif isinstance(entry, nnx.StateSharding):
                    sharding = _on_mesh(entry.map_prefix(paths[0], value))
                else:
                    sharding = _on_mesh(entry)
                if sharding is not None:
                    rules.update({id(a): Rule(task, sharding, own) for a in arrays})

    pairs: list[tuple[Any, Any]] = []
    try:
        jax.tree.map(
            lambda *pair: pairs.append(pair), prefix, tree, is_leaf=lambda x: x is None or _is_node(x)
        )
    except ValueError as error:
        raise ValueError(f"{name} {_mismatch(prefix, tree) or f'is no prefix: {error}'}") from None
    for entry, subtree in pairs:
        give(entry, subtree)
    for entry, matched in used.values():
        entry.check_used(matched)
    return rules


def _mismatch(prefix: Any, tree: Any) -> str | None:
    """Which entry of a tuple of shardings does not describe its argument, if that is what is wrong."""
    if not isinstance(prefix, (tuple, list)) or not isinstance(tree, (tuple, list)):
        return None
    if len(prefix) != len(tree):
        return f"has {len(prefix)} entries, and there are {len(tree)} positional arguments or results"
    for n, (entry, subtree) in enumerate(zip(prefix, tree)):
        try:
            jax.tree.map(lambda *_: None, entry, subtree, is_leaf=lambda x: x is None or _is_node(x))
        except ValueError:
            shapes = jax.tree.map(lambda x: jax.typeof(x) if isinstance(x, jax.Array) else x, subtree)
            return f"describes argument or result {n} as {jax.tree.structure(entry)}, and it is {shapes}"
    return None


def _paths(node: Any) -> list[tuple[Any, list[Path]]]:
    """Every Variable and array under a node, with all paths that lead to it (several if it is shared)."""
    found: dict[int, tuple[Any, list[Path]]] = {}

    def visit(value: Any, path: Path, above: tuple[int, ...]) -> None:
        if isinstance(value, (nnx.Variable, jax.Array)):
            found.setdefault(id(value), (value, []))[1].append(path)
        elif id(value) not in above:
            for key, child in _compat.children(value):
                visit(child, (*path, key), (*above, id(value)))

    visit(node, (), ())
    return list(found.values())


def _parameter_paths(tree: Any) -> set[Path]:
    """The paths of all Variables under the nodes of a tree that are no slots of an optimizer."""
    found = (pair for node in jax.tree.leaves(tree, is_leaf=_has_paths) for pair in _paths(node))
    return {path for value, paths in found if not _compat.is_optimizer_state(value) for path in paths}


def _lookup(
    sharding: TaskSharding, paths: Sequence[Path], value: Any, parameters: Callable[[], set[Path]]
) -> list[Match]:
    """Where state goes that several paths may lead to: the rules that match any of them, the first first."""
    if _compat.is_optimizer_state(value):
        match = sharding.lookup_optimizer_state(paths, value, parameters())
        return [] if match is None else [match]
    matches, errors = [], []
    for path in paths:
        try:
            matches.append(sharding.lookup(path, value))
        except PlacementError as error:
            errors.append(error)
    if matches:
        return sorted(matches, key=lambda match: match.index)
    if all(not a.shape for a in _arrays(value)):
        return []  # counters and keys need no place
    raise errors[0]


def _on_mesh(sharding: Any) -> Sharding | None:
    if isinstance(sharding, PartitionSpec):
        multimesh = current_multimesh()
        if multimesh is None:
            raise ValueError(
                f"{sharding} needs a mesh: use it inside `with MultiMesh(...):`, or give a NamedSharding"
            )
        return NamedSharding(multimesh.mesh, sharding)
    return sharding


def _has_paths(x: Any) -> bool:
    return _is_node(x) or isinstance(x, nnx.State)


def _nodes(trees: tuple) -> list[tuple[Path, Any]]:
    """Every Variable and graph node in (args, kwargs), in order, with its path."""
    return [(path, value) for path, value in nnx.iter_graph(trees) if _is_node(value)]


def _is_node(x: Any) -> bool:
    return nnx.graph.is_graph_node(x) or isinstance(x, nnx.Variable)
