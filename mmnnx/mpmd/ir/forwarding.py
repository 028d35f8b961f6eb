"""Which results of a jaxpr are inputs of it: scans and calls hand through what they only read."""

from __future__ import annotations

from typing import Any

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import CALLS, CUSTOM_GRADIENTS, REMAT, is_var

_CALLS = CALLS | CUSTOM_GRADIENTS | {REMAT}


def forwarded(jaxpr: Any) -> list[int | None]:
    """For each result of a jaxpr the number of the input that it is; None for one that is computed.

    `nnx.scan` returns all state of what it goes over, changed or not.

    Example:
      >>> forwarded(jax.make_jaxpr(lambda a, b: (b, a + b, a))(1.0, 2.0))
      [1, None, 0]
    """
    invars, outvars, eqns, _ = _compat.open_jaxpr(jaxpr)
    number = {v: n for n, v in enumerate(invars)}
    for eqn in eqns:
        for v, source in zip(eqn.outvars, _sources(eqn)):
            if source is not None and (n := _number(source, number)) is not None:
                number[v] = n
    return [_number(a, number) for a in outvars]


def _number(atom: Any, number: dict[Any, int]) -> int | None:
    return number.get(atom) if is_var(atom) else None


def _sources(eqn: Any) -> list[Any]:
    """For each result of an equation the operand that it is, if it is one."""
    name, nothing = eqn.primitive.name, [None] * len(eqn.outvars)
    if name == "scan":
        consts, carry = _compat.scan_counts(eqn.params)
        inner = forwarded(eqn.params["jaxpr"])
        return [
            eqn.invars[n]
            if n is not None and (n == consts + k if k < carry else n >= consts + carry)
            else None
            for k, n in enumerate(inner)
        ]
    if name in _CALLS and len(bodies := _compat.subjaxprs(eqn)) == 1:
        return [None if n is None else eqn.invars[n] for n in forwarded(bodies[0])]
    return nothing
