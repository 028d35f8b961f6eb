"""Weights that are sharded over a data axis (FSDP): gathered once, before the microbatch loop.

Left to XLA they are gathered again in the forward and in the backward of every microbatch. The gathered
weights live as long as the loop: inside a step the layout is that of ZeRO-1, between steps that of ZeRO-3
(Rajbhandari et al. 2020, arXiv:1910.02054).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.mpmd.hoist.sharding_propagation import Axes, Dims, Known, dims_of, follow, of_spec
from mmnnx.mpmd.ir.equations import Atom, Equation, Loop, Node, Var, is_var
from mmnnx.mpmd.ir.origin import Kind, at_home
from mmnnx.mpmd.ir.placement import Location, Placed, Placement, Reason
from mmnnx.mpmd.ir.rewrite import trace_equations


def hoist_gathers(placed: Placed, given: Mapping[Var, NamedSharding | None]) -> Placed:
    """Has loops read gathered weights, where these are sharded over axes that the examples are.

    A weight of which each device uses its own part, as with experts, stays as it is.

    Args:
      placed: the function, after `hoist_reductions`.
      given: the shardings of its inputs.

    Returns:
      The function, with loops replaced that read such weights.
    """
    known: Known = {}
    for v, sharding in given.items():
        if sharding is not None:
            known[v] = tuple(axes or () for axes in of_spec(sharding.spec, v.aval.ndim))
    follow((node.eqn for node in placed.nodes if isinstance(node, Equation)), known)
    nodes: list[Node] = []
    for node in placed.nodes:
        if isinstance(node, Loop) and node.parts:
            nodes += _hoisted(node, placed.placement, known)
        else:
            nodes.append(node)
    return Placed(placed.flat, nodes, placed.placement)


def _hoisted(loop: Loop, placement: Placement, known: Known) -> list[Node]:
    """A loop that reads gathered weights, after what gathers them."""
    data = {axis for groups in loop.parts.values() for axes in groups for axis in axes}
    sharded: dict[Var, Dims] = {}
    for v in loop.captured:
        dims = tuple(tuple(a for a in axes if a in data) for axes in dims_of(v, known))
        if any(dims) and placement.where[v].kind is Kind.STATE:
            sharded[v] = dims
    used_in_parts = _used_in_parts(loop, sharded)
    before: list[Node] = []
    gathered: dict[tuple[Var, Mesh], Var] = {}
    for v in sharded:
        if v not in used_in_parts:
            home = placement.where[v].mesh
            kept = (tuple(a for a in axes if a not in data) or None for axes in dims_of(v, known))
            constrain = functools.partial(
                jax.lax.with_sharding_constraint, shardings=NamedSharding(home, PartitionSpec(*kept))
            )
            equations, (whole,) = trace_equations(constrain, v, scope="")
            for e in equations:
                placement.put(e, Location(home), "none", Reason.GATHERS_STATE)
                placement.where.update(dict.fromkeys(e.outvars, at_home(home)))
            gathered[v, home] = whole
            before += equations
    if not before:
        return [loop]
    body = placement.bodies.pop(loop)
    body.where |= {whole: at_home(home) for (_, home), whole in gathered.items()}

    def reading(e: Equation) -> Equation:
        """An equation that reads what is gathered on its mesh."""
        if e not in body.locations:
            return e
        mesh = body.locations[e].mesh
        invars = [gathered.get((a, mesh), a) if is_var(a) else a for a in e.invars]
        if all(a is b for a, b in zip(invars, e.invars)):
            return e
        new = dataclasses.replace(e, eqn=e.eqn.replace(invars=invars))
        body.put_like([new], e)
        return new

    hoisted = dataclasses.replace(loop, body=tuple(map(reading, loop.body)))
    placement.bodies[hoisted] = body
    return [*before, hoisted]


@dataclasses.dataclass(frozen=True, eq=False)
class _Mark:
    """Stands among the axes of a dimension for those that it comes with from a weight."""

    weight: Var
    axes: Axes


def _used_in_parts(loop: Loop, sharded: Mapping[Var, Dims]) -> Collection[Var]:
    """Weights with a sharded dimension that products go through entry by entry, or that stays in activations
    sharded as it is."""
    marks: Known = {
        v: tuple((_Mark(v, axes),) if axes else () for axes in dims) for v, dims in sharded.items()
    }
    found: set[Var] = set()

    def look(eqn: Any, known: Known) -> None:
        if eqn.primitive.name == "dot_general":
            for a, batch in zip(eqn.invars, eqn.params["dimension_numbers"][1]):
                entries = [entry for n in batch for entry in dims_of(a, known)[n]]
                found.update(entry.weight for entry in entries if isinstance(entry, _Mark))
        elif eqn.primitive.name == "sharding_constraint":
            sharding = eqn.params["sharding"]
            look_at(
                sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec(),
                eqn.invars[0],
                known,
            )
        elif eqn.primitive.name == "shard_map":
            for spec, a in zip(eqn.params["in_specs"], eqn.invars):
                look_at(spec, a, known)

    def look_at(spec: PartitionSpec, a: Atom, known: Known) -> None:
        """For a value that is to be sharded so."""
        before = dims_of(a, known)
        for entry, marked in zip(of_spec(spec, len(before)), before):
            for mark in marked:
                if isinstance(mark, _Mark) and set(mark.axes) & set(entry or ()):
                    found.add(mark.weight)

    follow((e.eqn for e in loop.body), marks, look)
    return found
