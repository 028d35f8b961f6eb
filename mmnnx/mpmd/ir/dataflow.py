"""Walks over equations: from updates back to gradients, and from a running sum back to its terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import CALLS, Atom, Equation, Loop, Node, Var, is_var

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


_ADDS = ("add", "add_any")


def running_sums(loop: Loop) -> set[Var]:
    """The carries of a loop that microbatches do nothing with but add to, as they enter."""
    maker = {v: e for e in loop.body for v in e.outvars}
    uses = Counter(a for e in loop.body for a in e.invars if is_var(a))
    uses.update([*loop.carry_out, *loop.ys])
    return {
        enters
        for enters, leaves in zip(loop.carry_in, loop.carry_out)
        if leaves in maker and uses[leaves] == 1 and sum_terms(maker[leaves], enters, maker, uses)[0]
    }


def sum_terms(
    last: Equation, enters: Var, maker: dict[Var, Equation], uses: Counter
) -> tuple[list[Atom], list[Equation]]:
    """The terms that `last` and additions before it add to the carry, and these; nothing if it is no sum.

    What widens a sum of floats is passed through: the terms are widened one by one. (Rounded to integers, or
    kept in fewer bits, they would not add up to the same.)
    """
    if last.name != "add" or uses[enters] != 1:
        return [], []
    terms, adds, queue, found = [], [last], list(last.invars), False
    while queue:
        a = queue.pop(0)
        if a is enters:
            found = True
            continue
        e = maker.get(a) if is_var(a) else None
        if e is not None and (e.name in _ADDS or _widens(e)) and uses[a] == 1:
            adds.append(e)
            queue += e.invars
        else:
            terms.append(a)
    if not found:
        return [], []
    return [t for t in terms if is_var(t)] if all(map(is_var, terms)) else [], adds


def _widens(e: Equation) -> bool:
    """Whether an equation is a conversion of floats to a wider float type."""
    if e.name != "convert_element_type":
        return False
    narrow, wide = e.invars[0].aval.dtype, e.outvars[0].aval.dtype
    floats = jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(wide, jnp.floating)
    return floats and (narrow == wide or jnp.finfo(narrow).bits < jnp.finfo(wide).bits)


def is_zero(atom: Atom, maker: Mapping[Var, Node]) -> bool:
    """Whether a value is all zeros, as seen from where it is made."""
    if not is_var(atom):
        return bool(np.all(atom.val == 0))
    e = maker.get(atom)
    return isinstance(e, Equation) and e.name in ("broadcast_in_dim", "copy") and is_zero(e.invars[0], maker)
