"""A jaxpr as one list of equations: calls are inlined, loops and branches stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import CALLS, Atom, Equation, Var, join
from mmnnx.mpmd.ir.rewrite import read, rename


def flatten(
    jaxpr: Any,
    args: Sequence[Atom],
    scope: str,
    constants: dict[Var, Any],
    calls: dict[Var, Any],
    call: Any = None,
) -> tuple[list[Equation], list[Atom]]:
    """The equations of a jaxpr over `args`, each with its full name stack; and its results.

    `constants` learns the arrays that were captured, `calls` for results of equations the outermost `call`
    that these are in.
    """
    invars, outvars, eqns, consts = _compat.open_jaxpr(jaxpr)
    constants.update(consts)
    env: dict[Var, Atom] = dict(zip(invars, args))
    flat: list[Equation] = []
    for eqn in eqns:
        inner = join(scope, str(eqn.source_info.name_stack))
        if eqn.primitive.name in CALLS:
            (body, *_) = _compat.subjaxprs(eqn)
            made, results = flatten(
                body, [read(env, a) for a in eqn.invars], inner, constants, calls, call or eqn
            )
            flat += made
            env.update(zip(eqn.outvars, results))
        else:
            flat.append(Equation(rename(eqn, env), inner))
            if call is not None:
                calls.update(dict.fromkeys(flat[-1].outvars, call))
    return flat, [read(env, a) for a in outvars]
