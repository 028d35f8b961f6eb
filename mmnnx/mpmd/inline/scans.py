"""What becomes of a scan over several tasks: a Loop, one scan for each task, or its iterations in a row."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.inline.distribution import distribute
from mmnnx.mpmd.inline.writer import InLoop, Writer
from mmnnx.mpmd.ir.equations import LAYOUT, Atom, Equation, Loop, Node, Var, is_var, scopes_in
from mmnnx.mpmd.ir.loop_spec import LoopSpec, is_transformed, loop_spec
from mmnnx.mpmd.ir.origin import ACTIVATION, FREE, Kind
from mmnnx.mpmd.ir.rewrite import inline, prune
from mmnnx.sharding.name_stack import is_backward


class _HoldsLoop(Exception):
    """The body of a scan that was to be a Loop holds another one."""


def open_scan(writer: Writer, eqn: Any, scope: str, out: list[Node], in_loop: InLoop) -> Sequence[Atom]:
    """Appends what a scan of several tasks becomes to `out`.

    A loop of `mm.microbatch` becomes a Loop, and so does any other that is in no Loop and no derivative.
    There it is distributed, or else unrolled.

    Returns:
      What stands for its results.
    """
    scan = _Scan.of(eqn)
    spec = loop_spec(scope)
    if spec is not None and in_loop is InLoop.NO:
        return _loop(writer, scan, spec, scope, out, InLoop.MICROBATCHES)
    if is_transformed(scope):
        warnings.warn(
            "a loop of mm.microbatch is inside a gradient or another transformation: its microbatches do not "
            "overlap, and its schedule has no effect. Have the transformation inside the loop, as in "
            "mm.microbatch(jax.value_and_grad(loss_fn), ...)",
            stacklevel=2,
        )
    if in_loop is InLoop.MICROBATCHES or not _can_be_loop(eqn, scope):
        results = _distribute(writer, scan, scope, out)
        return _unroll(writer, scan, scope, out, in_loop) if results is None else results
    if in_loop is InLoop.ITERATIONS:
        raise _HoldsLoop
    try:
        return _loop(writer, scan, LoopSpec(), scope, out, InLoop.ITERATIONS)
    except _HoldsLoop:  # loops do not nest; the inner one is where work can overlap
        return _unroll(writer, scan, scope, out, in_loop)


def _unroll(writer: Writer, scan: _Scan, scope: str, out: list[Node], in_loop: InLoop) -> list[Atom]:
    """Writes the body of a scan once for each iteration."""
    slices = _slices(writer, scan, scope, out)
    carry, rows = scan.init, []
    for i in range(scan.length)[:: scan.turn]:
        args = [*scan.consts, *carry, *(each[i] for each in slices)]
        results = writer.inline(scan.jaxpr, args, scope, out, in_loop)
        writer.carried(results[: len(carry)], carry)
        carry = [_counted(writer, v, scope, out) for v in results[: len(carry)]]
        rows.append(results[len(carry) :])
    stacks = zip(*rows) if rows else [()] * len(scan.ys)
    return [*carry, *_stacked(writer, scan, [stack[:: scan.turn] for stack in stacks], scope, out)]


def _counted(writer: Writer, carry: Atom, scope: str, out: list[Node]) -> Atom:
    """A carry, kept if it is a counter: who reads it is not to count from the beginning each time."""
    if writer.of(carry).kind is not Kind.FREE:
        return carry
    (copy,), (kept,) = inline(jnp.copy, carry, scope=scope)
    writer.record(copy, FREE)
    out.append(dataclasses.replace(copy, kept=True))
    return kept


def _distribute(writer: Writer, scan: _Scan, scope: str, out: list[Node]) -> list[Atom] | None:
    """Writes a scan as one scan for each task, one after the other; None if that cannot be done."""
    carry_in, slice_vars, body, results = _body(writer, scan, scope, InLoop.MICROBATCHES)
    equations = [e for e in prune(body, results) if isinstance(e, Equation)]  # which are all
    carry_out, ys = results[: len(carry_in)], results[len(carry_in) :]
    columns = dict(zip(slice_vars, scan.xs))  # of a variable, its values in all iterations

    def near(v: Var) -> Sequence[Mesh]:
        return writer.near.get(columns.get(v, v), ())

    parts = distribute(equations, carry_in, carry_out, writer.tie, near)
    if parts is None or any(e.eqn.effects for e in equations):
        return None
    # What is handed on and is a result as well, is one value.
    inside = {*carry_in, *(v for e in equations for v in e.outvars)}
    copied = {e.outvars[0]: e.invars[0] for e in equations if e.name == "copy" and is_var(e.invars[0])}
    ys = [copied[y] if copied.get(y) in inside else y for y in ys]
    carries: dict[Var, Var] = {}
    for part in parts:
        own = {v for e in part.nodes for v in e.outvars}
        enters, leaves, init = ([vs[i] for i in part.carries] for vs in (carry_in, carry_out, scan.init))
        gives = list(dict.fromkeys([*part.gives, *(y for y in ys if y in own or y in enters)]))
        reads = dict.fromkeys(a for e in part.nodes for a in e.invars if is_var(a) and a not in own)
        takes = [v for v in reads if v in columns and v not in enters]
        captured = [v for v in reads if v not in columns and v not in enters]
        eqns = [e.eqn for e in part.nodes]
        jaxpr = _compat.close_jaxpr([*captured, *enters, *takes], [*leaves, *gives], eqns)
        run = functools.partial(_run, jaxpr, len(captured), len(enters), scan.eqn.params)
        made = writer.emit_part(run, [*captured, *init, *(columns[v] for v in takes)], part, scope, out)
        carries.update(zip(leaves, made))
        given = list(zip(gives, made[len(leaves) :]))
        columns.update(given)
        writer.hand_on(given, part, parts)
    return [*(carries[v] for v in carry_out), *(columns[y] for y in ys)]


def _loop(
    writer: Writer, scan: _Scan, spec: LoopSpec, scope: str, out: list[Node], inside: InLoop
) -> list[Atom]:
    """Writes a scan as a Loop."""
    slices = [tuple(row[:: scan.turn]) for row in _slices(writer, scan, scope, out)]
    for x, row in zip(scan.xs, slices):
        writer.layout_of.update((v, writer.layout_of.get(x, x)) for v in row if is_var(x))
    # Each carry starts in a buffer of its own, so that it can be updated in place.
    init = [writer.emit(jnp.copy, [a], scope, out)[0] for a in scan.init]
    carry_in, slice_vars, body, results = _body(writer, scan, scope, inside)
    invariant, varying = _split_invariant(prune(body, results), {*carry_in, *slice_vars})
    out += invariant
    ahead = {v for node in invariant for v in node.outvars}
    copies: list[Any] = []
    results = [writer.emit(jnp.copy, [v], scope, copies)[0] if v in ahead else v for v in results]
    carry_out, ys = results[: len(carry_in)], results[len(carry_in) :]
    carries = tuple(jex.Var(v.aval) for v in carry_in)
    stacks = tuple(tuple(jex.Var(y.aval) for _ in range(scan.length)) for y in ys)
    writer.carried(carries, init)
    writer.origin.update((v, ACTIVATION) for row in stacks for v in row)
    loop = Loop(
        dataclasses.replace(spec, length=scan.length),
        (*varying, *copies),
        tuple(init),
        tuple(carry_in),
        tuple(carry_out),
        tuple(slices),
        tuple(slice_vars),
        tuple(ys),
        carries,
        stacks,
        {v: writer.layout_of[v] for v in itertools.chain(init, *slices) if v in writer.layout_of},
    )
    out.append(loop)
    return [*carries, *_stacked(writer, scan, [row[:: scan.turn] for row in stacks], scope, out)]


def _body(
    writer: Writer, scan: _Scan, scope: str, in_loop: InLoop
) -> tuple[list[Var], list[Var], list[Node], list[Var]]:
    """The body of a scan: variables for its carries and slices, equations, and their results."""
    body_vars = [jex.Var(v.aval) for v in _compat.open_jaxpr(scan.jaxpr)[0][len(scan.consts) :]]
    carry_in, slice_vars = body_vars[: len(scan.init)], body_vars[len(scan.init) :]
    writer.carried(carry_in, scan.init)
    writer.origin.update((v, writer.of(a)) for v, a in zip(slice_vars, scan.xs))
    body: list[Node] = []
    results: list[Var] = []
    atoms = writer.inline(scan.jaxpr, [*scan.consts, *body_vars], scope, body, in_loop)
    made = {v for node in body for v in node.outvars}
    for atom in atoms:
        # A result that is no equation's own (an input, a constant, one result twice) gets an equation.
        if not is_var(atom) or atom not in made or atom in results:
            (atom,) = writer.emit(jnp.copy, [atom], scope, body)
        results.append(atom)
    return carry_in, slice_vars, body, results


def _slices(writer: Writer, scan: _Scan, scope: str, out: list[Node]) -> list[list[Var]]:
    """What a scan goes over, taken apart."""
    # Positions are values, not literals: XLA then compiles one kernel for all slices of an array.
    count = scan.length if scan.xs else 0
    positions = [writer.constant(np.int32(m), jax.typeof(np.int32(m))) for m in range(count)]
    return [writer.emit(_rows, [x, *positions], scope, out) for x in scan.xs]


def _stacked(
    writer: Writer, scan: _Scan, stacks: Sequence[Sequence[Atom]], scope: str, out: list[Node]
) -> list[Var]:
    """What the iterations of a scan made, stacked."""
    stacked = []
    for v, row in zip(scan.ys, stacks):
        stack = jnp.stack if row else functools.partial(jnp.zeros, v.aval.shape, v.aval.dtype)
        stacked += writer.emit(lambda *row, stack=stack: stack(row) if row else stack(), row, scope, out)
    return stacked


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan equation taken apart; `turn` is -1 if its last iteration comes first."""

    eqn: Any
    consts: list[Atom]
    init: list[Atom]
    xs: list[Atom]
    length: int
    turn: int

    @classmethod
    def of(cls, eqn: Any) -> _Scan:
        consts, init, xs = _divided(eqn.invars, *_compat.scan_counts(eqn.params))
        return cls(eqn, consts, init, xs, eqn.params["length"], -1 if eqn.params["reverse"] else 1)

    @property
    def jaxpr(self) -> Any:
        """Its body."""
        return self.eqn.params["jaxpr"]

    @property
    def ys(self) -> list[Var]:
        """Its results that are not carries."""
        return self.eqn.outvars[len(self.init) :]


def _divided(args: Sequence[Any], num_consts: int, num_carry: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Operands of a scan: constants, carries, and what it goes over."""
    rest = args[num_consts:]
    return list(args[:num_consts]), list(rest[:num_carry]), list(rest[num_carry:])


def _run(
    jaxpr: Any, num_consts: int, num_carry: int, like: dict[str, Any], *args: jax.Array
) -> list[jax.Array]:
    """A scan like another one, whose body is a jaxpr over constants, carries and slices."""
    consts, init, xs = _divided(args, num_consts, num_carry)

    def body(carry, row):
        made = jex.jaxpr_as_fun(jaxpr)(*consts, *carry, *row)
        return made[:num_carry], made[num_carry:]

    params = {name: like[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(body, init, xs, **params)
    return [*carry, *ys]


def _can_be_loop(eqn: Any, scope: str) -> bool:
    """Whether a scan can be a Loop: it is no part of a derivative, and holds no loop of `mm.microbatch`."""
    derivative = is_backward(scope) or "jvp(" in scope
    inside = (s for jaxpr in _compat.subjaxprs(eqn) for s in scopes_in(jaxpr, scope))
    return eqn.params["length"] > 0 and not derivative and all(loop_spec(s) is None for s in inside)


def _rows(x: jax.Array, *positions: jax.Array) -> list[jax.Array]:
    index = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
    return [index(x, i) for i in positions]


def _split_invariant(body: Sequence[Any], varying: set[Var]) -> tuple[list[Equation], list[Equation]]:
    """Separates what does not depend on the microbatch, to be done once before the loop, from what does."""
    varying = set(varying)
    own = {v for e in body for v in e.outvars}
    constant: set[Var] = set()
    hoisted = []
    for e in body:
        atoms = [a for a in e.invars if is_var(a)]
        if any(a in varying for a in atoms) or e.eqn.effects:
            varying.update(e.outvars)
        elif all(a in own and a in constant for a in atoms):
            constant.update(e.outvars)  # of literals alone: as cheap inside
        else:
            hoisted.append(e)
    keep = {v for e in hoisted for v in e.outvars}
    used_by: dict[Var, list[Any]] = {v: [] for v in keep}
    for e in body:
        for a in e.invars:
            if is_var(a) and a in keep:
                used_by[a].append(e)
    for e in reversed(hoisted):
        if e.name in LAYOUT and not any(keep & set(u.outvars) for v in e.outvars for u in used_by[v]):
            keep -= set(e.outvars)
    chosen = [e for e in hoisted if keep & set(e.outvars)]
    # Literal-only equations that a hoisted one reads go along.
    needed = {a for e in chosen for a in e.invars if is_var(a)}
    for e in reversed(body):
        if constant & set(e.outvars) and needed & set(e.outvars):
            needed.update(a for a in e.invars if is_var(a))
    moved = {id(e) for e in chosen} | {id(e) for e in body if constant & needed & set(e.outvars)}
    return [e for e in body if id(e) in moved], [e for e in body if id(e) not in moved]
