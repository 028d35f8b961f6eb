"""Where the arguments of a function live, and where its results must."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.mpmd.frontend.meshes import Meshes
from mmnnx.mpmd.frontend.owners import Owners
from mmnnx.mpmd.frontend.record import Leaf, Record
from mmnnx.mpmd.ir.shardings import DividedSharding, entering, is_committed, mesh_of
from mmnnx.sharding.divided_array import PiecewiseSharding
from mmnnx.sharding.division import Division, has_layout
from mmnnx.sharding.task import Task


@dataclasses.dataclass(frozen=True)
class InOutShardings:
    """What is known of the arguments and results of a function, in flat order.

    Attributes:
      in_shardings: for each argument, the sharding that it has or is given, unplaced optimizer state that of
        its parameter; None for one that is unplaced.
      homes: for each argument, its mesh if it is placed state; None for others, and for scalars, which are
        copied to every mesh that reads them.
      follows: for each result, its owner (see `owners`): the placed argument that it belongs to.
      out_shardings: for each result, the sharding that it must have; None for one that stays where it is
        computed.
      module_meshes: for each result that is state, the mesh of all other state of its module, or of the
        module that it is in: where it goes if it depends on nothing, as an empty cache does.
      on_every_mesh: for each result, whether it is the new value of a scalar that is unplaced, or that
        lives on the whole MultiMesh already.
      divided_arguments, divided_results: for each argument and result, how it is divided between tasks; None
        for one that is not. `divide` makes several of it.
    """

    in_shardings: list[NamedSharding | None]
    homes: list[Mesh | None]
    follows: list[int | None]
    out_shardings: list[NamedSharding | None]
    module_meshes: list[Mesh | None]
    on_every_mesh: list[bool]
    divided_arguments: list[DividedSharding | None]
    divided_results: list[DividedSharding | None]


def find_in_out_shardings(
    record: Record,
    leaves: Sequence[Any],
    types: Sequence[Any],
    typed: Sequence[NamedSharding | None],
    meshes: Meshes,
    inputs_in_pieces: bool,
) -> InOutShardings:
    """Where arguments live and results go.

    Args:
      record: what the trace showed.
      leaves: the arguments of a call.
      types: shapes and dtypes of the results.
      typed: the shardings that results had by type.
      meshes: learns the meshes of all of them.
      inputs_in_pieces: as in `enter`.

    Raises:
      ValueError: for a rule that is no NamedSharding, or that names another kind of memory.
    """
    in_shardings = [_in_sharding(x, leaf, meshes) for x, leaf in zip(leaves, record.inputs)]
    for n, device in _on_single_devices(leaves, record.inputs, in_shardings).items():
        in_shardings[n] = _on_device(device, meshes)
    rules = [_rule(leaf, meshes) for leaf in record.results]
    divided = functools.cache(lambda s: None if s is None else meshes.divided(s))
    shapes = [jnp.shape(x) for x in leaves]

    def owners_of(in_shardings: list[NamedSharding | None]) -> tuple[list[DividedSharding | None], Owners]:
        """How each argument is divided, and what finds owners among them, where they live so."""
        found = [
            divided(s) if _is_state(leaf) or (inputs_in_pieces and _is_over_one(s)) else None
            for s, leaf in zip(in_shardings, record.inputs)
        ]
        spanning = meshes.spanning()
        placed = [
            None if s is None or (s.mesh in spanning and d is None) else s
            for s, d in zip(in_shardings, found)
        ]
        homes = [None if s is None or not shape else mesh_of(s) for s, shape in zip(placed, shapes)]
        return found, Owners(record, placed, homes, shapes, types, rules)

    divided_arguments, owners = owners_of(in_shardings)
    unplaced = {  # optimizer state that was made outside of mm.jit, or that is abstract
        n: sharding
        for n, (own, leaf, shape) in enumerate(zip(in_shardings, record.inputs, shapes))
        if own is None and leaf is not None and leaf.is_optimizer_state and shape
        if (sharding := owners.of_parameter(leaf, shape)) is not None
    }
    if unplaced:
        in_shardings = [unplaced.get(n, own) for n, own in enumerate(in_shardings)]
        divided_arguments, owners = owners_of(in_shardings)
    placed, homes, spanning = owners.placed, owners.homes, meshes.spanning()
    unions = {d.whole.mesh for d in (*divided_arguments, *map(divided, rules)) if d is not None}

    follows: list[int | None] = []
    out_shardings: list[NamedSharding | None] = []
    for leaf, aval, rule, by_type in zip(record.results, types, rules, typed):
        follow, sharding = _result(leaf, aval, rule, owners, placed)
        if by_type is not None and rule is None and sharding is not None:
            typed_as = entering(aval, mesh_of(sharding), by_type)
            sharding = sharding if sharding.is_equivalent_to(typed_as, aval.ndim) else typed_as
        if sharding is not None and sharding.mesh in unions and divided(sharding) is None:
            follow, sharding = None, None  # statistics of all layers, say: where they are computed
        follows.append(follow)
        out_shardings.append(sharding)
    on_every_mesh = [
        leaf is not None
        and leaf.updates is not None
        and sharding is None
        and not aval.shape
        and ((own := in_shardings[leaf.updates]) is None or own.mesh in spanning)
        for leaf, aval, sharding in zip(record.results, types, out_shardings)
    ]
    return InOutShardings(
        in_shardings,
        list(homes),
        follows,
        out_shardings,
        [_module_mesh(leaf, owners) for leaf in record.results],
        on_every_mesh,
        divided_arguments,
        list(map(divided, out_shardings)),
    )


def _result(
    leaf: Leaf | None,
    aval: Any,
    rule: NamedSharding | None,
    owners: Owners,
    placed: Sequence[NamedSharding | None],
) -> tuple[int | None, NamedSharding | None]:
    """(the owner of a result, the sharding that it must have).

    Args:
      leaf, aval, rule: what the result is, its type, and what out_shardings ask for it.
      placed: for each argument, its sharding; None if it is unplaced, or whole on several meshes.
    """
    if leaf is None:
        return None, rule
    if leaf.updates is not None:
        home, own = owners.homes[leaf.updates], placed[leaf.updates]
        if owners.shapes[leaf.updates] == aval.shape:
            return leaf.updates if home is not None else None, rule or own
        return None, rule or (entering(aval, home, own) if home is not None else None)  # as far as it fits
    follow, of_owner = owners.owner(leaf, aval)
    inherited = leaf.rule is not None and not leaf.rule.own
    return follow, of_owner or rule if inherited else rule or of_owner


def _module_mesh(leaf: Leaf | None, owners: Owners) -> Mesh | None:
    mesh = owners.module_mesh(leaf) if leaf is not None and leaf.within else None
    # Divided arrays alone can be on a mesh with a layout.
    return None if mesh is None or has_layout(mesh) else mesh


def _is_state(leaf: Leaf | None) -> bool:
    return leaf is not None and (leaf.is_variable or leaf.rule is not None)


def _is_over_one(sharding: NamedSharding | None) -> bool:
    """Whether each dimension is sharded over one axis at most: a batch may be over all that there are."""
    return sharding is not None and all(entry is None or isinstance(entry, str) for entry in sharding.spec)


def _in_sharding(x: Any, leaf: Leaf | None, meshes: Meshes) -> NamedSharding | None:
    """Where an argument lives: by in_shardings, else by its own sharding; None if it is unplaced."""
    rule = _rule(leaf, meshes)
    if rule is not None:
        return rule
    own = x.sharding if is_committed(x) else None
    if isinstance(own, PiecewiseSharding):
        return own.named
    return meshes.sharding(own) if isinstance(own, NamedSharding) else None


def _on_single_devices(
    leaves: Sequence[Any], inputs: Sequence[Leaf | None], in_shardings: Sequence[NamedSharding | None]
) -> dict[int, jax.Device]:
    """The devices of state that `jax.device_put` has put on one that has no other state, where there are
    several devices; else it is unplaced, as what is all on one device is."""
    meshes = {d for s in in_shardings if s is not None for d in s.mesh.devices.flat}
    found = {
        n: x.sharding.device_set
        for n, (x, leaf, own) in enumerate(zip(leaves, inputs, in_shardings))
        if own is None and leaf is not None and leaf.is_variable and jnp.ndim(x) and is_committed(x)
    }
    single = {n: device for n, devices in found.items() if len(devices) == 1 for device in devices}
    elsewhere = {n: device for n, device in single.items() if device not in meshes}
    return elsewhere if len({*meshes, *elsewhere.values()}) > 1 else {}


def _on_device(device: jax.Device, meshes: Meshes) -> NamedSharding:
    return NamedSharding(meshes.canonical(Mesh([device], ("device",))), PartitionSpec())


def _rule(leaf: Leaf | None, meshes: Meshes) -> NamedSharding | None:
    """The sharding that in_shardings or out_shardings ask for, on one of the meshes."""
    if leaf is None or leaf.rule is None:
        return None
    task, sharding = leaf.rule.task, leaf.rule.sharding
    if sharding.memory_kind not in (None, own := jax.local_devices()[0].default_memory().kind):
        raise ValueError(
            f"{leaf}: mm.jit keeps arrays in {own!r} memory, not in {sharding.memory_kind!r}: "
            "leave memory_kind out, and move the results with jax.device_put"
        )
    for one in task.tasks if isinstance(task, Division) else ():
        meshes.canonical(one.to_mesh(), one.name)
    if isinstance(sharding, NamedSharding):
        return meshes.sharding(sharding, task.name if isinstance(task, Task) else None)
    devices = list(sharding.device_set)
    if len(devices) > 1:
        raise ValueError(
            f"{leaf}: mm.jit places arrays by NamedSharding, PartitionSpec or TaskSharding, not {sharding}"
        )
    return _on_device(devices[0], meshes)
