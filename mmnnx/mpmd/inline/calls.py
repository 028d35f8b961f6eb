"""From a traced function to one flat list of equations.

`inline_calls` takes the jaxpr of a function and inlines what stands between the user's equations and the
places they belong to: nested jits and functions with gradients of their own always; remat, loops and branches
where more than one TaskMesh is involved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import Mesh, NamedSharding

from mmnnx import _compat
from mmnnx.mpmd.frontend.function import Function
from mmnnx.mpmd.inline.common_subexpressions import merge_common_subexpressions
from mmnnx.mpmd.inline.conds import write_cond
from mmnnx.mpmd.inline.logical_constraints import resolve_logical_constraints
from mmnnx.mpmd.inline.scans import write_scan
from mmnnx.mpmd.inline.shared_backward import distribute_shared_backward
from mmnnx.mpmd.inline.whiles import write_cond_as_whiles, write_while
from mmnnx.mpmd.inline.writer import HoldsLoop, InLoop, Writer
from mmnnx.mpmd.ir.equations import (
    CALLS,
    CUSTOM_GRADIENTS,
    REMAT,
    Atom,
    Equation,
    Flat,
    Loop,
    Node,
    Var,
    is_var,
    join,
    scopes_in,
    with_bodies,
)
from mmnnx.mpmd.ir.listing import flat_text
from mmnnx.mpmd.ir.loop_spec import loop_spec
from mmnnx.mpmd.ir.origin import ACTIVATION, at_home, combine
from mmnnx.mpmd.ir.rewrite import prune, rename
from mmnnx.sharding.name_stack import scopes


def inline(function: Function) -> Flat:
    """One flat list of equations of a function that touches several meshes.

    Raises:
      ValueError: as `inline_calls` does.
    """
    shardings, names = function.shardings, function.meshes.labels()
    flat = inline_calls(function.jaxpr, shardings.homes, function.task_mesh, names, shardings.follows)
    flat = merge_common_subexpressions(flat, shardings.homes, function.task_of)
    flat = distribute_shared_backward(flat, shardings.homes)
    flat = resolve_logical_constraints(flat, function.task_of)
    for loop in (node for node in with_bodies(flat.nodes) if isinstance(node, Loop)):
        for mesh_of in function.meshes.moving.values():
            for microbatch in range(loop.spec.length):
                mesh_of(microbatch)  # from here on all meshes are known
    function.dump.write("inline", functools.partial(flat_text, flat))
    return flat


def inline_calls(
    jaxpr: Any,
    homes: Sequence[Mesh | None],
    task_mesh: Callable[[str], Mesh | None],
    names: dict[Mesh, str],
    follows: Sequence[int | None] = (),
    loops: bool = True,
) -> Flat:
    """Inlines the calls of `jaxpr` that stand across tasks.

    Args:
      jaxpr: a closed jaxpr.
      homes: for each of its inputs, the mesh where that state lives, None for unplaced inputs.
      task_mesh: from a name stack to the mesh of the task it lies in, None outside tasks.
      names: what messages call each mesh.
      follows: for results, the input whose home will be theirs, if that is known.
      loops: whether microbatch loops become a Loop; otherwise they stay a scan.

    Raises:
      ValueError: for a `while` in a loop of `mm.microbatch` that contains more than one task, or such a
        `cond` that prints or calls back.
    """
    fresh = [jex.Var(v.aval) for v in _compat.open_jaxpr(jaxpr)[0]]
    inliner = _Inliner(task_mesh, names)
    inliner.origin.update((v, at_home(home)) for v, home in zip(fresh, homes))
    destinations = [None if n is None else homes[n] for n in follows]
    nodes: list[Node] = []
    in_loop = InLoop.NO if loops else InLoop.MICROBATCHES
    out = inliner.write_jaxpr(jaxpr, fresh, "", nodes, in_loop, destinations)
    return Flat(tuple(fresh), tuple(inliner.constants), tuple(prune(nodes, out)), tuple(out))


# Equations that compute a jaxpr as it stands, too, but are inlined only where that is of several meshes. (A
# jaxpr can be something else: how a scatter or a reduction combines two entries, or a kernel.)
_CALLED = {REMAT, "custom_vmap_call", "custom_transpose_call", "composite", "remat_opt"}


class _Inliner(Writer):
    def write_equation(
        self, eqn: Any, destinations: Sequence[Mesh | None], scope: str, out: list[Node], in_loop: InLoop
    ) -> Sequence[Atom]:
        name, bodies = eqn.primitive.name, _compat.subjaxprs(eqn)
        if name in CALLS | CUSTOM_GRADIENTS:
            operands = self._constrained(eqn.invars, eqn.params.get("in_shardings", ()), scope, out)
            made = self.write_jaxpr(bodies[0], operands, scope, out, in_loop, destinations)
            return self._constrained(made, eqn.params.get("out_shardings", ()), scope, out)
        if name in ("device_put", "optimization_barrier"):  # of arrays that may be on different meshes
            return [self._write_whole(one, scope, out)[0] for one in _compat.one_by_one(eqn)]
        if name == "scan" and in_loop is InLoop.NO and loop_spec(scope) is not None:
            return write_scan(self, eqn, scope, out, in_loop)
        meshes = self._meshes(eqn, scope)
        if len(meshes) > 1 and name in ("cond", "while"):
            eqn = _compat.without_dead(eqn)
            meshes = self._meshes(eqn, scope)
        if name == "cond" and len(meshes | self._destinations(eqn, destinations, scope)) > 1:
            results = self._write_cond(eqn, destinations, scope, out, in_loop)
            if results is not None:
                return results
        if len(meshes) < 2 or name == "shard_map":
            return self._write_whole(eqn, scope, out)
        if name == "scan":
            return write_scan(self, eqn, scope, out, in_loop)
        if name == "while" and in_loop is InLoop.NO:
            return write_while(self, eqn, scope, out)
        if name == "while" and in_loop is not InLoop.MICROBATCHES:
            raise HoldsLoop
        if name in ("cond", "while"):
            raise ValueError(_several_tasks(eqn, scope, [self.names[m] for m in meshes]))
        if name == "custom_linear_solve" and in_loop is InLoop.NO:
            return self.write_jaxpr(*_compat.solve_of(eqn), scope, out, in_loop)
        if name in _CALLED:
            return self.write_jaxpr(bodies[0], eqn.invars, scope, out, in_loop)
        return self._write_whole(eqn, scope, out)

    def _constrained(
        self, atoms: Sequence[Atom], shardings: Sequence[Any], scope: str, out: list[Node]
    ) -> Sequence[Atom]:
        """Writes what the shardings of a nested jit say of its operands or results."""
        if not any(isinstance(s, NamedSharding) for s in shardings):
            return atoms
        constrain = jax.lax.with_sharding_constraint
        return [
            self.write(functools.partial(constrain, shardings=s), [a], scope, out)[0]
            if isinstance(s, NamedSharding)
            else a
            for a, s in zip(atoms, shardings, strict=True)
        ]

    def _write_cond(
        self, eqn: Any, destinations: Sequence[Mesh | None], scope: str, out: list[Node], in_loop: InLoop
    ) -> Sequence[Atom] | None:
        """Writes a cond of several tasks; None, with nothing added to `out`, if it has effects."""
        inside = InLoop.MICROBATCHES if in_loop is InLoop.MICROBATCHES else InLoop.DIVIDED
        try:
            return write_cond(self, eqn, destinations, scope, out, inside)
        except HoldsLoop:
            if in_loop is not InLoop.NO:
                raise
            return write_cond_as_whiles(self, eqn, scope, out)

    def _write_whole(self, eqn: Any, scope: str, out: list[Node]) -> Sequence[Var]:
        """Writes an equation as it is."""
        if self.task_mesh(scope) is None:  # what has a task inside (checkpoint, scan) is of it
            inside = (s for jaxpr in _compat.subjaxprs(eqn) for s in scopes_in(jaxpr))
            names = (name for s in dict.fromkeys(inside) for name in reversed(scopes(s)))
            scope = join(scope, next((name for name in names if self.task_mesh(name) is not None), ""))
        node = Equation(rename(eqn, {}), scope)
        placed = self.task_mesh(scope) is not None
        self.record(node, ACTIVATION if placed else combine(map(self.origin_of, node.invars)))
        out.append(node)
        return node.outvars

    def _destinations(self, eqn: Any, destinations: Sequence[Mesh | None], scope: str) -> set[Mesh]:
        """The homes of the state that the operands and results of an equation outside tasks are for."""
        homes = [*destinations, *(self.destination.get(a) for a in eqn.invars if is_var(a))]
        return {m for m in homes if m is not None} if self.task_mesh(scope) is None else set()

    def _meshes(self, eqn: Any, scope: str) -> set[Mesh]:
        """The meshes of the tasks in an equation's body and of the state that it reads; none without body."""
        if not _compat.subjaxprs(eqn):
            return set()
        own = self.task_mesh(scope)
        found = {own} if own is not None else set()
        inside = (s for jaxpr in _compat.subjaxprs(eqn) for s in scopes_in(jaxpr, scope))
        found |= {m for s in inside if (m := self.task_mesh(s)) is not None}
        if own is None:
            found |= {home for a in eqn.invars if (home := self.origin_of(a).home) is not None}
        return found


def _several_tasks(eqn: Any, scope: str, tasks: Sequence[str]) -> str:
    name, where = eqn.primitive.name, f" under scope {scope!r}" if scope else ""
    help = (
        "In mm.microbatch there is no schedule for it: how often it runs is not known before. Use a lax.scan "
        "or fori_loop of a fixed length"
        if name == "while"
        else "It prints or calls back, which one TaskMesh would do for another. Leave that out"
    )
    return (
        f"a {name!r}{where} contains computation of {len(tasks)} tasks: {', '.join(sorted(tasks))}. {help}, "
        f"or put the whole {name!r} in one task (mm.task). It was traced at {_compat.source_line(eqn)}"
    )
