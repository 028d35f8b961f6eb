"""What an optimizer does to a gradient is done where the parameter is: a walk back from the updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import CALLS, Atom, Equation, Var, is_var

T = TypeVar("T")


def follow_back(
    equations: Sequence[Equation], follows: dict[Var, T], state_of: Callable[[Atom], T | None]
) -> None:
    """Adds to `follows` the values that are combined with state of their shape, directly or further on.

    Args:
      equations: in order.
      follows: what variables are known to follow: a state variable, or its home.
      state_of: what an atom stands for if it is such state, else None.
    """
    for e in reversed(equations):
        if e.name == "cond" or e.name in CALLS:
            operands = e.invars[1:] if e.name == "cond" else e.invars
            for body in _compat.subjaxprs(e.eqn):
                _through(body, operands, e.outvars, follows, state_of)
            continue
        for v in e.outvars:
            if e.name == "reduce_sum" and v in follows:  # of a gradient that is kept in parts
                follows.setdefault(e.invars[0], follows[v])
            alike = [a for a in e.invars if is_var(a) and a.aval.shape == v.aval.shape != ()]
            state = [s for a in alike if (s := state_of(a)) is not None]
            target = state[0] if state else follows.get(v)
            if target is not None:
                for a in alike:
                    follows.setdefault(a, target)


def _through(
    body: Any,
    operands: Sequence[Atom],
    results: Sequence[Var],
    follows: dict[Var, T],
    state_of: Callable[[Atom], T | None],
) -> None:
    """Follows the results of a call or a cond through a body of it to the operands."""
    invars, outvars, eqns, _ = _compat.open_jaxpr(body)
    given = dict(zip(invars, operands))
    inside = {o: follows[v] for o, v in zip(outvars, results) if v in follows and is_var(o)}
    follow_back([Equation(e, "") for e in eqns], inside, lambda a: state_of(given[a]) if a in given else None)
    for v, operand in given.items():
        if v in inside and is_var(operand):
            follows.setdefault(operand, inside[v])
