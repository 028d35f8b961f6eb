"""Equations written: traced from Python, renamed, and dropped where nobody reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import (
    CALLS,
    CUSTOM_GRADIENTS,
    Atom,
    Equation,
    Node,
    Var,
    is_var,
    with_bodies,
)


def trace_equations(fun: Callable, *atoms: Atom, scope: str) -> tuple[list[Equation], list[Var]]:
    """Traces `fun` over the types of `atoms` and returns its equations on them, and the results.

    Calls are inlined, those of functions with gradients of their own too: it is too late to differentiate.
    """
    args = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=a.aval.weak_type) for a in atoms]
    invars, outvars, eqns, consts = _compat.open_jaxpr(jax.make_jaxpr(fun)(*args))
    env = dict(zip(invars, atoms)) | {v: jex.Literal(c, v.aval) for v, c in consts}
    flat: list[Equation] = []
    for eqn in eqns:
        flat += _inline_eqn(eqn, env, scope)
    return flat, [read(env, v) for v in outvars]


def name_results(
    equations: Sequence[Equation], atoms: Sequence[Atom], results: Sequence[Var]
) -> list[Equation]:
    """Equations that were traced, with other variables for what they return.

    What JAX hands through, or returns twice, is copied.

    Args:
      equations, atoms: what `trace_equations` returned.
      results: for each of the atoms, the variable that it shall be.
    """
    fresh = {v for e in equations for v in e.outvars}
    names: dict[Var, Var] = {}
    copied = []
    for atom, result in zip(atoms, results):
        if is_var(atom) and atom in fresh and atom not in names:
            names[atom] = result
        else:
            copied.append((atom, result))
    named = [
        dataclasses.replace(
            e,
            eqn=e.eqn.replace(
                invars=[read(names, a) for a in e.invars], outvars=[names.get(v, v) for v in e.outvars]
            ),
        )
        for e in equations
    ]
    for atom, result in copied:
        (copy,), _ = trace_equations(jnp.copy, read(names, atom), scope="")
        named.append(dataclasses.replace(copy, eqn=copy.eqn.replace(outvars=[result])))
    return named


def _inline_eqn(eqn: Any, env: dict[Var, Atom], scope: str) -> list[Equation]:
    if eqn.primitive.name in CALLS | CUSTOM_GRADIENTS:
        invars, outvars, eqns, consts = _compat.open_jaxpr(_compat.subjaxprs(eqn)[0])
        inner = dict(zip(invars, (read(env, a) for a in eqn.invars)))
        inner |= {v: jex.Literal(c, v.aval) for v, c in consts}
        flat = [e for sub in eqns for e in _inline_eqn(sub, inner, scope)]
        env.update(zip(eqn.outvars, (read(inner, v) for v in outvars)))
        return flat
    return [Equation(rename(eqn, env), scope)]


def read(env: dict[Var, Atom], atom: Atom) -> Atom:
    return env.get(atom, atom) if is_var(atom) else atom


def rename(eqn: Any, env: dict[Var, Atom]) -> Any:
    """The equation over the variables of `env`, with fresh results that `env` learns."""
    fresh = [jex.Var(v.aval) for v in eqn.outvars]
    out = eqn.replace(invars=[read(env, a) for a in eqn.invars], outvars=fresh)
    env.update(zip(eqn.outvars, fresh))
    return out


def prune(nodes: Sequence[Node], outputs: Iterable[Atom]) -> list[Node]:
    """Drops the nodes that `outputs` do not depend on."""
    live = {a for a in outputs if is_var(a)}
    kept: list[Node] = []
    for node in reversed(nodes):
        effects = any(isinstance(n, Equation) and n.eqn.effects for n in with_bodies([node]))
        if effects or any(v in live for v in node.outvars):
            kept.append(node)
            live.update(a for a in node.invars if is_var(a))
    return kept[::-1]
