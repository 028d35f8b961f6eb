"""A scan equation: its operands, its body, and the equations that take slices from it and stack results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from mmnnx import _compat
from mmnnx.mpmd.inline.writer import InLoop, Writer
from mmnnx.mpmd.ir.equations import Atom, Equation, Node, Var
from mmnnx.mpmd.ir.rewrite import prune
from mmnnx.mpmd.ir.scans import split_operands


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan equation.

    Attributes:
      eqn: the equation.
      consts, init, xs: its operands: constants, carries, and what it goes over.
      length: how often it runs.
      turn: -1 if its last iteration comes first, else 1.
    """

    eqn: Any
    consts: list[Atom]
    init: list[Atom]
    xs: list[Atom]
    length: int
    turn: int

    @classmethod
    def of(cls, eqn: Any) -> Scan:
        """A scan equation taken apart."""
        consts, init, xs = split_operands(eqn.invars, *_compat.scan_counts(eqn.params))
        return cls(eqn, consts, init, xs, eqn.params["length"], -1 if eqn.params["reverse"] else 1)

    @property
    def jaxpr(self) -> Any:
        """Its body."""
        return self.eqn.params["jaxpr"]

    @property
    def ys(self) -> list[Var]:
        """Its results that are not carries."""
        return self.eqn.outvars[len(self.init) :]


@dataclasses.dataclass(frozen=True)
class Body:
    """The body of a scan: its equations, and variables of its own for what goes in and out.

    Attributes:
      carry_in, carry_out: the carries before and after an iteration.
      slice_vars: the slices that an iteration is given.
      equations: what an iteration computes.
      ys: its results that are not carries.
    """

    carry_in: list[Var]
    slice_vars: list[Var]
    equations: list[Equation]
    carry_out: list[Var]
    ys: list[Var]


def write_body(writer: Writer, scan: Scan, scope: str, in_loop: InLoop) -> Body:
    """Writes the body of a scan; each of its results is made by an equation of its own."""
    body_vars = [jex.Var(v.aval) for v in _compat.open_jaxpr(scan.jaxpr)[0][len(scan.consts) :]]
    carry_in, slice_vars = body_vars[: len(scan.init)], body_vars[len(scan.init) :]
    writer.record_carries(carry_in, scan.init)
    writer.origin.update((v, writer.origin_of(a)) for v, a in zip(slice_vars, scan.xs))
    body: list[Node] = []
    atoms = writer.write_jaxpr(scan.jaxpr, [*scan.consts, *body_vars], scope, body, in_loop)
    results = writer.own_results(atoms, scope, body)
    equations = [e for e in prune(body, results) if isinstance(e, Equation)]  # which are all
    return Body(carry_in, slice_vars, equations, results[: len(carry_in)], results[len(carry_in) :])


def write_slices(writer: Writer, scan: Scan, scope: str, out: list[Node]) -> list[list[Var]]:
    """Writes the slices of what a scan goes over: for each operand, one for each iteration."""
    # Positions are values, not literals: XLA then compiles one kernel for all slices of an array.
    count = scan.length if scan.xs else 0
    positions = [writer.constant(np.int32(m), jax.typeof(np.int32(m))) for m in range(count)]
    return [writer.write(_rows, [x, *positions], scope, out) for x in scan.xs]


def write_stacks(
    writer: Writer, scan: Scan, stacks: Sequence[Sequence[Atom]], scope: str, out: list[Node]
) -> list[Var]:
    """Writes what stacks the results of the iterations of a scan."""
    stacked = []
    for v, row in zip(scan.ys, stacks):
        stack = jnp.stack if row else functools.partial(jnp.zeros, v.aval.shape, v.aval.dtype)
        stacked += writer.write(lambda *row, stack=stack: stack(row) if row else stack(), row, scope, out)
    return stacked


def _rows(x: jax.Array, *positions: jax.Array) -> list[jax.Array]:
    index = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
    return [index(x, i) for i in positions]
