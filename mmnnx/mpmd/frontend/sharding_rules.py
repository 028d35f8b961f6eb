"""in_shardings and out_shardings: the rule for each array that they are for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mmnnx import _compat
from mmnnx.mpmd.frontend.graph import Path, all_paths, arrays, has_paths, is_optax_state, kept_by_optimizers
from mmnnx.mpmd.frontend.prefix_tree import entries
from mmnnx.mpmd.frontend.record import Rule
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.placement import TaskSharding
from mmnnx.sharding.state_placement import matches


def sharding_rules(prefix: Any, tree: Any, name: str, around: Any) -> dict[int, Rule]:
    """The rule of each array in a tree, by id, as far as it has one.

    Args:
      prefix: a prefix tree of shardings.
      tree: the arguments or the results.
      name: what messages call `prefix`.
      around: arguments and results: the parameters there tell which rules are for optimizer state alone.

    Raises:
      PlacementError: for state that no rule of a TaskSharding matches, and a rule that matches nothing.
      ValueError: if `prefix` does not describe the tree, or asks for two shardings of one Variable.
    """
    if prefix is None:
        return {}
    parameters = functools.cache(lambda: _parameters(around))
    asked: dict[tuple[int, int], _Asked] = {}
    for where, entry, subtree in entries(prefix, tree, name):
        for value, paths in _state(subtree) if entry is not None else ():
            key = id(entry), id(value)
            asked.setdefault(key, _Asked(where, entry, value, [])).paths.extend(paths)
    rules: dict[int, tuple[Rule, _Asked]] = {}
    used: dict[int, tuple[TaskSharding, set[int]]] = {}  # the rules that match something
    for one in asked.values():
        if not (own := arrays(one.value)):
            continue
        if isinstance(one.entry, TaskSharding):
            matched = used.setdefault(id(one.entry), (one.entry, set()))[1]
            found = matches(one.entry, one.paths, one.value, parameters)
            matched.update(match.index for match in found)
            rule = None
            if found:
                match = found[0]
                text = one.entry.rule_text(match.index)
                rule = Rule(match.task, match.sharding, match.own, one.paths[0], text)
        else:
            rule = _rule(one)
        if rule is None:
            continue
        for a in own:
            known, by = rules.setdefault(id(a), (rule, one))
            if known.sharding != rule.sharding:
                raise _inconsistent(by, known, one, rule)
    for entry, matched in used.values():
        entry.check_used(matched)
    return {a: rule for a, (rule, _) in rules.items()}


class _Asked(NamedTuple):
    """What one entry of a prefix tree is for: where it is in there; the Variable or array, and its paths."""

    where: str
    entry: Any
    value: Any
    paths: list[Path]


def _inconsistent(one: _Asked, first: Rule, other: _Asked, second: Rule) -> ValueError:
    def text(rule: Rule) -> str:
        if rule.task is not None or not isinstance(rule.sharding, NamedSharding):
            return str(rule.task or rule.sharding)
        return f"{rule.sharding.spec} on devices {[d.id for d in rule.sharding.mesh.devices.flat]}"

    return ValueError(
        f"Inconsistent aliasing: one {type(one.value).__name__} is asked to be {text(first)} by {one.where} "
        f"and {text(second)} by {other.where}. Ask for one sharding, or make a copy with nnx.clone"
    )


def _state(tree: Any) -> Iterator[tuple[Any, list[Path]]]:
    """Every Variable and array in a tree, with all its paths from the NNX object that holds it.

    What optax keeps is as `nnx.Optimizer` would hold it, with its paths from the state of optax.
    """
    of_optimizers = kept_by_optimizers(tree)
    for node in jax.tree.leaves(tree, is_leaf=lambda x: has_paths(x) or is_optax_state(x)):
        for value, paths in all_paths(node):
            is_own = id(value) in of_optimizers and not _compat.is_optimizer_state(value)
            yield _compat.as_optimizer_state(value) if is_own else value, paths


def _parameters(tree: Any) -> dict[Path, list[Any]]:
    """All Variables and arrays in a tree that are no optimizer state, by path; of several models, several."""
    found: dict[Path, list[Any]] = {}
    for value, paths in _state(tree):
        for path in paths if not _compat.is_optimizer_state(value) else ():
            found.setdefault(path, []).append(value)
    return found


def _rule(asked: _Asked) -> Rule | None:
    """What an entry that is no TaskSharding asks for.

    Raises:
      ValueError: for a StateSharding that has several shardings for the paths of one Variable.
    """
    shardings = [asked.entry]
    if isinstance(asked.entry, nnx.StateSharding):
        shardings = [asked.entry.map_prefix(path, asked.value) for path in asked.paths]
    rules = [Rule(None, on) for sharding in shardings if (on := _on_mesh(sharding)) is not None]
    for other in rules[1:]:
        if other.sharding != rules[0].sharding:
            raise _inconsistent(asked, rules[0], asked, other)
    return rules[0] if rules else None


def _on_mesh(sharding: Any) -> Sharding | None:
    """A sharding; a PartitionSpec is one over the MultiMesh, else over the mesh of `jax.set_mesh`."""
    if isinstance(sharding, PartitionSpec):
        multimesh = current_multimesh()
        mesh = multimesh.mesh if multimesh is not None else _compat.context_mesh()
        if mesh is None:
            raise ValueError(
                f"{sharding} needs a mesh: use it inside `with MultiMesh(...):` or "
                "`with jax.set_mesh(...):`, or give a NamedSharding"
            )
        return NamedSharding(mesh, sharding)
    return sharding
