"""The two ends of a function: where its arguments live, and where its results must."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.mpmd.frontend.meshes import Meshes
from mmnnx.mpmd.frontend.owners import Owners
from mmnnx.mpmd.frontend.record import Leaf, Record
from mmnnx.mpmd.ir.shardings import entering, is_committed, mesh_of


@dataclasses.dataclass(frozen=True)
class InOutShardings:
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


def find_in_out_shardings(
    record: Record, leaves: Sequence[Any], types: Sequence[Any], meshes: Meshes
) -> InOutShardings:
    """Works out both ends from what was traced, the arguments of a call, and the types of the results."""
    given = [_given(x, leaf, meshes) for x, leaf in zip(leaves, record.inputs)]
    rules = [_rule(leaf, meshes) for leaf in record.results]
    spanning = meshes.spanning()
    placed = [None if g is None or g.mesh in spanning else g for g in given]
    homes = [None if g is None or not jnp.ndim(x) else mesh_of(g) for g, x in zip(placed, leaves)]
    shapes = [jnp.shape(x) for x in leaves]
    owners = Owners(record, given, homes, shapes, types, rules)
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
            follow, of_parameter = owners.of(leaf, aval)
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
    beside = [owners.beside(leaf) if leaf is not None and leaf.within else None for leaf in record.results]
    return InOutShardings(given, homes, follows, asked, beside, everywhere)


def _given(x: Any, leaf: Leaf | None, meshes: Meshes) -> NamedSharding | None:
    """Where an argument lives: by in_shardings, else by its own sharding; None if nowhere in particular."""
    rule = _rule(leaf, meshes)
    if rule is not None:
        return rule
    if is_committed(x) and isinstance(x.sharding, NamedSharding):
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
