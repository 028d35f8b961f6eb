"""The two ends of a function: where its arguments live, and where its results must."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.mpmd.bind import entering
from mmnnx.mpmd.lift import Leaf, Record
from mmnnx.mpmd.meshes import Meshes, mesh_of
from mmnnx.sharding.placement import parts_of


@dataclasses.dataclass(frozen=True)
class Ends:
    """What is known of the arguments and results of a function, in flat order.

    Attributes:
      given: the sharding that each argument has or is given; None for one that lives nowhere in particular.
      homes: the mesh of each piece of placed state; None for other arguments, and for scalars, which are
        copied to every mesh that reads them.
      follows: for each result, the placed argument that it is the new value, the gradient or a slot of.
      asked: the sharding that each result must have; None for one that stays where it is computed.
      beside: for each result that is state, the mesh of all other state of its module, or of the module that
        it is in: where it goes if it depends on nothing, as an empty cache does.
      everywhere: for each result, whether it is the new value of a scalar that nobody placed, or that lives
        on the whole MultiMesh already.
    """

    given: list[NamedSharding | None]
    homes: list[Mesh | None]
    follows: list[int | None]
    asked: list[NamedSharding | None]
    beside: list[Mesh | None]
    everywhere: list[bool]


def find_ends(record: Record, leaves: Sequence[Any], types: Sequence[Any], meshes: Meshes) -> Ends:
    """Works out both ends from what was traced, the arguments of a call, and the types of the results."""
    given = [_given(x, leaf, meshes) for x, leaf in zip(leaves, record.inputs)]
    rules = [_rule(leaf, meshes) for leaf in record.results]
    spanning = meshes.spanning()
    placed = [None if g is None or g.mesh in spanning else g for g in given]
    homes = [None if g is None or not jnp.ndim(x) else mesh_of(g) for g, x in zip(placed, leaves)]
    shapes = [jnp.shape(x) for x in leaves]
    by_end: dict[Any, list[int]] = {}  # by path and shape, and by path alone
    by_part: dict[Any, list[int]] = {}  # parameters by the end of their path, and shape
    inside: dict[Any, set[Mesh]] = {}  # where the state of a module is, by the path of the module
    for n, leaf in enumerate(record.inputs):
        if leaf is not None and leaf.within and (home := homes[n]) is not None:
            by_end.setdefault((leaf.within, shapes[n]), []).append(n)
            by_end.setdefault(leaf.within, []).append(n)
            for path in (leaf.path, leaf.within):
                for k in range(len(path)):
                    inside.setdefault(path[:k], set()).add(home)
            for k in range(1, 0 if leaf.slot else len(leaf.within)):
                by_part.setdefault((leaf.within[k:], shapes[n]), []).append(n)
    number = {
        leaf.path: n for n, leaf in enumerate(record.inputs) if leaf is not None and homes[n] is not None
    }

    def first(known: dict[Any, list[int]], ends: Iterable[Any]) -> int | None:
        """The argument that is known by the first of these ends. Two models may have the same paths."""
        found = next((known[e] for e in ends if e in known), [])
        # Where it is not clear, what a result is made of, such as a gradient, says where it is.
        return found[0] if len({homes[n] for n in found}) == 1 else None

    # Parameters among the results, for the slots of an optimizer that is made together with its model.
    made: dict[Any, list[NamedSharding]] = {}
    for leaf, aval, rule in zip(record.results, types, rules):
        if leaf is not None and rule is not None and not leaf.slot:
            for k in range(len(leaf.within)):  # by the end of its path, and shape, and by path alone
                made.setdefault((leaf.within[k:], aval.shape), []).append(rule)
                made.setdefault(leaf.within[k:], []).append(rule)
    owners: dict[Any, list[Any]] = {}  # the optimizers that have such slots, as they are met

    def made_together(ends: Iterable[Any], leaf: Leaf) -> NamedSharding | None:
        """Of several that are alike, the first for the first: optimizers are made in the order of models."""
        end = next((e for e in ends if e in made), None)
        if end is None:
            return None
        alike = owners.setdefault(end, [])
        if leaf.path[:1] not in alike:
            alike.append(leaf.path[:1])
        return made[end][min(alike.index(leaf.path[:1]), len(made[end]) - 1)]

    def parameter(leaf: Leaf, aval: Any) -> tuple[int | None, NamedSharding | None]:
        """The argument that a result is like, or is a slot of; and its sharding, or that of what was made."""
        endings = [(leaf.path[k:], aval.shape) for k in range(len(leaf.path))]
        follow = number.get(leaf.origin) if leaf.origin is not None else first(by_end, endings)
        if follow is None and leaf.slot and leaf.origin is None:
            if (own := made_together(endings, leaf)) is not None:
                return None, own
            if aval.shape:  # statistics of rows, a history
                parts = parts_of(leaf.path)
                if (own := made_together(parts, leaf)) is not None:
                    return None, NamedSharding(own.mesh, PartitionSpec())
                follow = first(by_end, parts)
            if follow is None:  # of a module within an argument
                follow = first(by_part, endings)
        own = given[follow] if follow is not None else None
        if follow is not None and own is not None and shapes[follow] != aval.shape:
            own = NamedSharding(own.mesh, PartitionSpec())
        return follow, own

    follows: list[int | None] = []
    asked: list[NamedSharding | None] = []
    for leaf, aval, rule in zip(record.results, types, rules):
        follow, sharding = None, rule
        if leaf is not None and leaf.updates is not None:
            same = shapes[leaf.updates] == aval.shape
            home, own = homes[leaf.updates], placed[leaf.updates]
            follow = leaf.updates if same and home is not None else None
            if not same:  # its own, as far as that fits
                own = entering(aval, home, own) if home is not None else None
            sharding = rule or own
        elif leaf is not None:
            follow, of_parameter = parameter(leaf, aval)
            inherited = leaf.rule is not None and not leaf.rule.own
            sharding = of_parameter or rule if inherited else rule or of_parameter
        follows.append(follow)
        asked.append(sharding)
    everywhere = [
        leaf is not None
        and leaf.updates is not None
        and sharding is None
        and not aval.shape
        and ((own := given[leaf.updates]) is None or own.mesh in spanning)
        for leaf, aval, sharding in zip(record.results, types, asked)
    ]
    beside = [
        _only_home(inside, leaf) if leaf is not None and leaf.within else None for leaf in record.results
    ]
    return Ends(given, homes, follows, asked, beside, everywhere)


def _only_home(inside: dict[Any, set[Mesh]], leaf: Leaf) -> Mesh | None:
    """The mesh of the innermost module around a piece of state that has other state, if it is one."""
    path, within = leaf.path, leaf.within
    above = [path[:k] for k in range(len(path) - 1, 0, -1)]
    above += [within[:k] for k in range(len(within) - 1, -1, -1)]  # of a copy, or another module
    homes = next((inside[module] for module in above if module in inside), set())
    return next(iter(homes)) if len(homes) == 1 else None


def _given(x: Any, leaf: Leaf | None, meshes: Meshes) -> NamedSharding | None:
    """Where an argument lives: by in_shardings, else by its own sharding; None if nowhere in particular."""
    rule = _rule(leaf, meshes)
    if rule is not None:
        return rule
    if isinstance(x, jax.Array) and x.committed and isinstance(x.sharding, NamedSharding):
        return meshes.sharding(x.sharding)
    return None


def _rule(leaf: Leaf | None, meshes: Meshes) -> NamedSharding | None:
    if leaf is None or leaf.rule is None:
        return None
    task, sharding, _ = leaf.rule
    if sharding.memory_kind not in (None, own := jax.local_devices()[0].default_memory().kind):
        raise ValueError(
            f"{leaf}: mm.jit keeps arrays in {own!r} memory, not in {sharding.memory_kind!r}: "
            "leave memory_kind out, and move the results with jax.device_put"
        )
    if isinstance(sharding, NamedSharding):
        return meshes.sharding(sharding, task.name if task is not None else None)
    devices = list(sharding.device_set)
    if len(devices) > 1:
        raise ValueError(
            f"{leaf}: mm.jit places arrays by NamedSharding, PartitionSpec or TaskSharding, not {sharding}"
        )
    return NamedSharding(meshes.canonical(Mesh(devices, ("device",))), PartitionSpec())
