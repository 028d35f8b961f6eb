"""in_shardings and out_shardings: the rule for each array under a prefix tree of shardings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.mpmd.frontend.graph import Path, all_paths, arrays, has_paths, is_node
from mmnnx.mpmd.frontend.record import Rule
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.placement import Match, PlacementError, TaskSharding

Parameters = Callable[[], Mapping[Path, list[Any]]]


def sharding_rules(prefix: Any, tree: Any, name: str, around: Any) -> dict[int, Rule]:
    """The rule of each array in a tree, by id, as far as it has one.

    Args:
      prefix: a prefix tree of shardings.
      tree: the arguments or the results.
      name: what messages call `prefix`.
      around: arguments and results: the parameters there tell which rules are for optimizer state alone.

    Raises:
      PlacementError: for state that no rule of a TaskSharding matches, and a rule that matches nothing.
      ValueError: if `prefix` does not describe the tree.
    """
    if prefix is None:
        return {}
    parameters = functools.cache(lambda: _parameters(around))
    rules: dict[int, Rule] = {}
    used: dict[int, tuple[TaskSharding, set[int]]] = {}  # the rules that match something
    for entry, subtree in _pairs(prefix, tree, name):
        for value, paths in _state(subtree) if entry is not None else ():
            if not (own := arrays(value)):
                continue
            if isinstance(entry, TaskSharding):
                matched = used.setdefault(id(entry), (entry, set()))[1]
                matches = _matches(entry, paths, value, parameters)
                matched.update(match.index for match in matches)
                match = matches[0] if matches else None
                rule = Rule(match.task, match.sharding, match.own, paths[0]) if match is not None else None
            else:
                rule = _rule(entry, paths[0], value)
            if rule is not None:
                rules.update((id(a), rule) for a in own)
    for entry, matched in used.values():
        entry.check_used(matched)
    return rules


def _pairs(prefix: Any, tree: Any, name: str) -> list[tuple[Any, Any]]:
    """Each entry of a prefix tree, with the subtree that it is for."""
    pairs: list[tuple[Any, Any]] = []
    try:
        jax.tree.map(
            lambda *pair: pairs.append(pair), prefix, tree, is_leaf=lambda x: x is None or is_node(x)
        )
    except ValueError as error:
        raise ValueError(f"{name} {_mismatch(prefix, tree) or f'is no prefix: {error}'}") from None
    return pairs


def _mismatch(prefix: Any, tree: Any) -> str | None:
    """Which entry of a tuple of shardings does not describe its argument, if that is what is wrong."""
    if not isinstance(prefix, (tuple, list)) or not isinstance(tree, (tuple, list)):
        return None
    if len(prefix) != len(tree):
        return f"has {len(prefix)} entries, and there are {len(tree)} positional arguments or results"
    for n, (entry, subtree) in enumerate(zip(prefix, tree)):
        try:
            jax.tree.map(lambda *_: None, entry, subtree, is_leaf=lambda x: x is None or is_node(x))
        except ValueError:
            shapes = jax.tree.map(lambda x: jax.typeof(x) if isinstance(x, jax.Array) else x, subtree)
            return f"describes argument or result {n} as {jax.tree.structure(entry)}, and it is {shapes}"
    return None


def _state(tree: Any) -> Iterator[tuple[Any, list[Path]]]:
    """Every Variable and array in a tree, with all its paths from the NNX object that holds it."""
    for node in jax.tree.leaves(tree, is_leaf=has_paths):
        yield from all_paths(node)


def _parameters(tree: Any) -> dict[Path, list[Any]]:
    """All Variables and arrays in a tree that are no optimizer state, by path; of several models, several."""
    found: dict[Path, list[Any]] = {}
    for value, paths in _state(tree):
        for path in paths if not _compat.is_optimizer_state(value) else ():
            found.setdefault(path, []).append(value)
    return found


def _rule(entry: Any, path: Path, value: Any) -> Rule | None:
    """What an entry that is no TaskSharding asks for."""
    sharding = entry.map_prefix(path, value) if isinstance(entry, nnx.StateSharding) else entry
    sharding = _on_mesh(sharding)
    return None if sharding is None else Rule(None, sharding)


def _matches(
    sharding: TaskSharding, paths: Sequence[Path], value: Any, parameters: Parameters
) -> list[Match]:
    """The rules that match any of the paths to a piece of state, the first rule first."""
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
    if all(not a.shape for a in arrays(value)):
        return []  # counters and keys need no place
    raise errors[0]


def _on_mesh(sharding: Any) -> Sharding | None:
    """A sharding; a PartitionSpec is one over the MultiMesh."""
    if isinstance(sharding, PartitionSpec):
        multimesh = current_multimesh()
        if multimesh is None:
            raise ValueError(
                f"{sharding} needs a mesh: use it inside `with MultiMesh(...):`, or give a NamedSharding"
            )
        return NamedSharding(multimesh.mesh, sharding)
    return sharding
