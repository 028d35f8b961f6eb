"""Structural equality: what a jaxpr or an equation computes, as a key that is equal up to names of variables.

To compare keys is faster than to lower both and compare the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import is_var


@dataclasses.dataclass(frozen=True, eq=False)
class _Identity:
    """A constant, equal to itself alone; it lives as long as a key does, so that no other has its id."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def jaxpr_key(jaxpr: Any) -> Hashable:
    """A jaxpr, open or closed, whatever its variables are called.

    Equal keys compute the same. Others may do so nevertheless: functions and meshes count as they are.

    Raises:
      TypeError: for one that holds what cannot be hashed.
    """
    invars, outvars, eqns, consts = _compat.open_jaxpr(jaxpr)
    number: dict[Any, int] = {}

    def named(v: Any) -> int:
        return number.setdefault(v, len(number))

    def read(atom: Any) -> Hashable:
        return named(atom) if is_var(atom) else (atom.aval, _value(atom.val))

    takes = tuple((named(v), v.aval) for v in (*invars, *(v for v, _ in consts)))
    lines = []
    for e in eqns:
        made = tuple((named(v), v.aval) for v in e.outvars)
        lines.append((e.primitive, tuple(map(read, e.invars)), _parameters(e), made, e.ctx))
    key = takes, tuple(_Identity(value) for _, value in consts), tuple(lines), tuple(map(read, outvars))
    hash(key)
    return key


def equation_key(eqn: Any) -> Hashable:
    """What an equation does, whatever its variables are called and wherever they come from.

    Raises:
      TypeError: for one that holds what cannot be hashed.
    """
    reads = tuple(a.aval if is_var(a) else (a.aval, _value(a.val)) for a in eqn.invars)
    key = eqn.primitive, reads, _parameters(eqn), tuple(v.aval for v in eqn.outvars), eqn.ctx
    hash(key)
    return key


def _parameters(eqn: Any) -> Hashable:
    return tuple((name, _value(p)) for name, p in sorted(eqn.params.items()))


def _value(x: Any) -> Hashable:
    """A parameter or a literal: what Python takes to be equal, such as 1, 1.0 and True, is not so here."""
    if isinstance(x, _compat.JAXPR_TYPES):
        return jaxpr_key(x)
    if isinstance(x, (tuple, list)):
        return (type(x), *map(_value, x))
    if isinstance(x, dict):
        return tuple((key, _value(value)) for key, value in x.items())
    if isinstance(x, (np.ndarray, np.generic)):
        return (x.dtype, x.shape, x.tobytes())
    return (type(x), repr(x) if isinstance(x, (float, complex)) else x)
