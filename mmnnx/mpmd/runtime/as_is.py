"""Where a function needs no program: JAX alone does what is asked."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from mmnnx.mpmd.distributed.processes import holders, is_described
from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.ir.equations import Equation, Flat, is_var
from mmnnx.mpmd.ir.shardings import constrains, explicit_mesh, is_committed


def runs_as_it_is(function: Function, flat: Flat, mesh: Mesh) -> bool:
    """Whether JAX, which runs a function where the arguments that it reads are, does what is asked.

    Args:
      function: one that touches one mesh.
      flat: its equations.
      mesh: that mesh.
    """
    record = function.record
    if not function.traced.typed and any(explicit_mesh(jax.typeof(x)) is not None for x in function.leaves):
        return False  # JAX would trace it with shardings in types
    groups = {frozenset(x.sharding.device_set) for x in function.leaves if is_committed(x)}
    if len(groups) > 1:
        return False
    if len(holders(mesh)) < jax.process_count() and not _is_anywhere(function, flat):
        return False  # every process decides alike
    if is_described(mesh.devices.flat[0]):
        return False
    if any(leaf is not None and leaf.rule for leaf in (*record.inputs, *record.results)):
        return False
    if function.is_placed:  # else it runs on the default device
        if groups != {frozenset(mesh.devices.flat)} or not _reads_one(function, flat):
            return False
        if record.references:  # JAX takes all of them as committed to where they are
            return False
        if constrains(function.jaxpr, mesh):  # over a mesh that is larger, perhaps
            return False
    # Left to itself, XLA may shard new values of state otherwise than the old ones, and replicates zeros.
    made = {v for node in flat.nodes for v in node.outvars}
    return not any(
        leaf is not None
        and (leaf.updates is not None or leaf.is_optimizer_state)
        and s is not None
        and s.num_devices > 1
        for leaf, s, by_type, v in zip(
            record.results, function.shardings.out_shardings, function.traced.result_shardings, flat.outvars
        )
        if is_var(v) and v in made and by_type is None
    )


def _is_anywhere(function: Function, flat: Flat) -> bool:
    """Whether nothing says where a function runs: each process does it by itself, on its default device."""
    placed = function.is_placed or constrains(function.jaxpr)
    return not (placed or any(is_committed(c) for _, c in flat.constants))


def _reads_one(function: Function, flat: Flat) -> bool:
    """Whether a result depends on an argument that is committed to its devices."""
    live = {v for v in flat.outvars if is_var(v)}
    for node in reversed(flat.nodes):
        if not live.isdisjoint(node.outvars) or (isinstance(node, Equation) and node.eqn.effects):
            live.update(filter(is_var, node.invars))
    return any(is_committed(x) and v in live for x, v in zip(function.leaves, flat.invars))
