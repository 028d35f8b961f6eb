"""Derived input shardings: where arguments would best live, on the TaskMesh that reads them first.

XLA propagates sharding constraints back to the arguments of what it compiles. Fragments are too small for
that: between a parameter and the constraint that concerns it there may be a cast that was moved out of the
loop. So all that one mesh computes for the first microbatch is compiled together here, once for each mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.shardings import constrains, entering
from mmnnx.mpmd.partition.partition import Partition

Derived = dict[tuple[Var, Mesh], NamedSharding]


def deriver(function: Function, partition: Partition, program: Program) -> Callable[[], list[NamedSharding]]:
    """What derives the sharding of each input of a function. It keeps none of the arguments alive."""
    whole = function.multimesh.mesh if function.multimesh is not None else None
    inputs, given = partition.flat.invars, function.shardings.in_shardings
    return functools.partial(_derive, program, inputs, given, _first_slices(partition), whole)


def _derive(
    program: Program,
    inputs: Sequence[Var],
    given: Sequence[NamedSharding | None],
    slices: Mapping[Var, Var],
    whole: Mesh | None,
) -> list[NamedSharding]:
    """The sharding of each input: as given, else derived from the constraints inside.

    Scalars are replicated on the whole MultiMesh; where there is none, they are where they are read.
    """
    order: dict[Mesh, float] = {}  # in which activations flow through the meshes
    for call in program.calls:
        position = call.fragment.position
        here = float("inf") if position is None else position
        order[call.mesh] = min(order.get(call.mesh, here), here)
    known = {v: s for v, s in zip(inputs, given) if s is not None}
    homes: dict[Var, Mesh] = {}
    for v, mesh in program.inputs.values():
        # An input may be on a mesh that computes nothing, to be sent on.
        homes[v] = min(homes.get(v, mesh), mesh, key=lambda m: order.get(m, float("inf")))
    default = whole or Mesh(np.array(jax.devices()[:1]), ("device",))  # of a program that does nothing
    first = min(order, key=order.__getitem__, default=default)
    derived: Derived = {}
    for mesh in order:
        shardings = _propagated(program, mesh, known)
        sliced = {(slices[v], m): s for (v, m), s in shardings.items() if v in slices}
        derived |= {(v, m): entering(v.aval, m, s) for (v, m), s in sliced.items()}
        derived |= {key: s for key, s in shardings.items() if key not in sliced or any(s.spec)}
    found = []
    for v, sharding in zip(inputs, given):
        home = homes.get(v, first) if v.aval.shape or whole is None else whole
        found.append(sharding or derived.get((v, home)) or NamedSharding(home, PartitionSpec()))
    return found


def _first_slices(partition: Partition) -> dict[Var, Var]:
    """For the first slice of each sliced input of a loop, that input: it is sharded as the slice is, unless
    something constrains all of it.
    """
    loops = [plan.loop for plan in partition.plan.loops]
    firsts = [(loop, row[0]) for loop in loops for row in loop.slices]
    return {v: loop.sources[v] for loop, v in firsts if v in loop.sources}


def _propagated(program: Program, mesh: Mesh, known: Mapping[Var, NamedSharding]) -> Derived:
    """The shardings that values have on a mesh when XLA compiles together what it computes there."""
    calls = [c for c in program.calls if c.mesh == mesh and c.microbatch in (None, 0)]
    if mesh.size == 1 or not any(constrains(c.fragment.jaxpr) for c in calls):
        return {}
    made: set[int] = set()
    read: dict[int, None] = {}
    for c in calls:
        read.update(dict.fromkeys(s for s in c.inputs if s not in made))
        made.update(c.outputs)

    def together(*args: Any) -> dict[int, Any]:
        values = dict(zip(read, args))
        for c in calls:
            out = jex.jaxpr_as_fun(c.fragment.jaxpr)(*(values[s] for s in c.inputs))
            values.update(zip(c.outputs, out))
        return values  # inputs as well: of results JAX says how they are sharded in names of axes

    def abstract(s: int) -> jax.ShapeDtypeStruct:
        v, _ = program.values[s]
        sharding = known.get(v)
        sharding = sharding if sharding is not None and sharding.mesh == mesh else None
        return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding, weak_type=v.aval.weak_type)

    shardings = jax.jit(together).lower(*map(abstract, read)).compile().output_shardings
    return {
        program.values[s]: entering(program.values[s][0].aval, mesh, sharding)
        for s, sharding in shardings.items()
        if isinstance(sharding, NamedSharding)
    }
