"""Shard maps in logical names become shard maps over the meshes that they are placed on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.ir.equations import Equation, Node, holds
from mmnnx.mpmd.ir.placement import Placed, Placement
from mmnnx.mpmd.ir.rewrite import name_results, trace_equations
from mmnnx.sharding.logical_shard_map import divided
from mmnnx.sharding.registered_tasks import placed_tasks
from mmnnx.sharding.task import Task

_NAME = "logical_shard_map"


def divide_shard_maps(function: Function, placed: Placed) -> Placed:
    """The same nodes, with each shard map in logical names over its mesh by the rules of its task.

    One without a place, as it is computed wherever it is needed, stays whole.

    Raises:
      ValueError: a rule of a task names an axis that its mesh lacks.
    """
    placement = placed.placement.copy()
    return Placed(placed.flat, _divided(function, placed.nodes, placement), placement)


def over_mesh(function: Function, e: Equation, mesh: Mesh) -> list[Equation]:
    """What stands for an equation on a mesh, with the shard maps in logical names in it over that mesh."""
    if not holds(e.eqn, _NAME):
        return [e]
    scoped, owners = function.task_of(e.scope), placed_tasks(mesh, function.multimesh)
    task = scoped[0] if scoped is not None else next(iter(owners), None)
    return [Equation(eqn, e.scope, e.kept) for eqn in _over_mesh(e.eqn, task, mesh)]


def _divided(function: Function, nodes: Sequence[Node], placement: Placement) -> list[Node]:
    found: list[Node] = []
    for node in nodes:
        if not isinstance(node, Equation):
            body: Any = tuple(_divided(function, node.body, placement.bodies[node]))
            if body != node.body:
                new = dataclasses.replace(node, body=body)
                by_node: list[dict[Node, Any]] = [placement.locations, placement.phases, placement.reasons]
                for keyed in (*by_node, placement.bodies):
                    if node in keyed:
                        keyed[new] = keyed.pop(node)
                node = new
        elif node in placement.locations and holds(node.eqn, _NAME):
            equations = over_mesh(function, node, placement.locations[node].mesh)
            placement.put_like(equations, node)
            found += equations
            continue
        found.append(node)
    return found


def _over_mesh(eqn: Any, task: Task | None, mesh: Mesh) -> list[Any]:
    if eqn.primitive.name != _NAME:
        return [_compat.map_inner_equations(eqn, lambda e: _over_mesh(e, task, mesh))]
    shapes = [a.aval.shape for a in eqn.invars]
    fun = divided(eqn.params["fun"], eqn.params["layout"], shapes, task, mesh)
    named = name_results(*trace_equations(fun, *eqn.invars, scope=""), eqn.outvars)
    return [e.eqn.replace(source_info=eqn.source_info) for e in named]
