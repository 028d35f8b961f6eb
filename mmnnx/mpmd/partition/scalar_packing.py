"""Arrays of one element that a fragment makes for another mesh go there as one array.

To clip gradients by their global norm, or to look whether they are finite, takes a scalar of each parameter;
and a transfer costs its latency, however little is sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar, Plan
from mmnnx.mpmd.ir.rewrite import name_results, trace_equations

FEWEST = 4
"""Fewer scalars than these are sent one by one."""

Results = list[list[PlacedVar]]
Packed = dict[tuple[Mesh, Any], list[Var]]  # what a fragment sends as one, by the mesh that reads it and type


def pack_scalars(plan: Plan, results: Results, names: Mapping[Mesh, str]) -> tuple[Plan, Results]:
    """A plan whose fragments send scalars of one type to a mesh as one vector, if there are at least FEWEST.

    Those that are results there are taken out of it by one more fragment. What loops and whiles read stays as
    it is.

    Args:
      plan: of a function.
      results: for each of its results, the values that hold it.
      names: of the meshes.

    Returns:
      The plan, and the values that hold the results then.
    """
    plan, results = _with_receivers(plan, results, names)
    return _packing(plan, [value for held in results for value in held]), results


def _with_receivers(plan: Plan, results: Results, names: Mapping[Mesh, str]) -> tuple[Plan, Results]:
    """A plan in which many scalars that are results on a mesh, and come from another, are read there."""
    maker = {v: f for f in plan.steps if isinstance(f, Fragment) for v in f.outvars}
    arriving: defaultdict[tuple[Mesh, Fragment, Any], list[Var]] = defaultdict(list)
    for v, mesh in dict.fromkeys(value for held in results for value in held):
        if v in maker and maker[v].mesh != mesh and _is_scalar(v):
            arriving[mesh, maker[v], _type(v)].append(v)
    read: defaultdict[Mesh, list[Var]] = defaultdict(list)
    for (mesh, _, _), group in arriving.items():
        if len(group) >= FEWEST:
            read[mesh] += group
    steps, homes = list(plan.steps), dict(plan.homes)
    arrived: dict[PlacedVar, PlacedVar] = {}
    for mesh, group in read.items():
        copies, made = trace_equations(lambda *xs: [jnp.copy(x) for x in xs], *group, scope="")
        jaxpr = _compat.close_jaxpr(group, made, [e.eqn for e in copies])
        name = names[mesh]
        steps.append(Fragment(name, name, mesh, "none", None, jaxpr, tuple(group), tuple(made)))
        homes |= dict.fromkeys(made, mesh)
        arrived |= {(v, mesh): (new, mesh) for v, new in zip(group, made)}
    plan = dataclasses.replace(plan, steps=tuple(steps), homes=homes)
    return plan, [[arrived.get(value, value) for value in held] for held in results]


def _packing(plan: Plan, required: Iterable[PlacedVar]) -> Plan:
    """A plan in which fragments read vectors of scalars, but for these results and what loops read."""
    fragments = [step for step in plan.steps if isinstance(step, Fragment)]
    as_it_is = {*required}
    as_it_is.update(read for step in plan.steps if not isinstance(step, Fragment) for read in step.reads)
    reads = dict.fromkeys((v, f.mesh) for f in fragments for v in f.invars)
    readers: defaultdict[Var, list[Mesh]] = defaultdict(list)  # in an order that is the same in all processes
    for v, mesh in reads:
        if (v, mesh) not in as_it_is:
            readers[v].append(mesh)
    packed = {f: p for f in fragments if (p := _packed(f, plan.homes, readers))}
    if not packed:
        return plan
    vectors: dict[PlacedVar, tuple[Var, int]] = {}  # what brings a scalar to a mesh, and where in it
    homes, made = dict(plan.homes), {}
    sent = {(v, mesh) for p in packed.values() for (mesh, _), group in p.items() for v in group}
    alone = {v for v, _ in (reads.keys() | as_it_is) - sent}
    for f, groups in packed.items():
        equations, outvars = list(f.jaxpr.eqns), [v for v in f.outvars if v in alone]
        for (mesh, _), group in groups.items():
            packing, (vector,) = trace_equations(_stack, *group, scope="")
            equations += [e.eqn for e in packing]
            outvars.append(vector)
            homes[vector] = f.mesh
            vectors |= {(v, mesh): (vector, n) for n, v in enumerate(group)}
        made[f] = _rebuilt(f, f.invars, outvars, equations)
    steps = [_unpacked(made.get(s, s), vectors) if isinstance(s, Fragment) else s for s in plan.steps]
    return dataclasses.replace(plan, steps=tuple(steps), homes=homes)


def _packed(f: Fragment, homes: Mapping[Var, Mesh], readers: Mapping[Var, Sequence[Mesh]]) -> Packed:
    found: defaultdict[tuple[Mesh, Any], list[Var]] = defaultdict(list)
    for v in f.outvars:
        if _is_scalar(v) and v in homes:
            for mesh in readers.get(v, ()):
                if mesh != f.mesh:
                    found[mesh, _type(v)].append(v)
    return {key: group for key, group in found.items() if len(group) >= FEWEST}


def _is_scalar(v: Var) -> bool:
    return math.prod(v.aval.shape) == 1 and not jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)


def _type(v: Var) -> Any:
    return v.aval.dtype, v.aval.weak_type


def _stack(*scalars: jax.Array) -> jax.Array:
    return jnp.concatenate([x.reshape(1) for x in scalars])


def _unpacked(f: Fragment, vectors: Mapping[PlacedVar, tuple[Var, int]]) -> Fragment:
    """A fragment that takes what it reads out of vectors."""
    taken: defaultdict[Var, dict[Var, int]] = defaultdict(dict)
    for v in f.invars:
        if (v, f.mesh) in vectors:
            vector, n = vectors[v, f.mesh]
            taken[vector][v] = n
    if not taken:
        return f
    equations = []
    for vector, scalars in taken.items():
        places = [(n, v.aval.shape) for v, n in scalars.items()]
        take = lambda x, places=places: [x[n : n + 1].reshape(shape) for n, shape in places]
        made, atoms = trace_equations(take, vector, scope="")
        equations += [e.eqn for e in name_results(made, atoms, [*scalars])]
    invars = [v for v in f.invars if (v, f.mesh) not in vectors]
    return _rebuilt(f, [*invars, *taken], f.outvars, [*equations, *f.jaxpr.eqns])


def _rebuilt(
    f: Fragment, invars: Sequence[Var], outvars: Sequence[Var], equations: Sequence[Any]
) -> Fragment:
    jaxpr = _compat.close_jaxpr(invars, outvars, equations)
    return dataclasses.replace(f, jaxpr=jaxpr, invars=tuple(invars), outvars=tuple(outvars))
