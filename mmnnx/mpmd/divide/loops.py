"""Scans, whiles and conds over pieces.

A scan that goes over pieces becomes one scan for each piece, which takes over the carry of the one before.
Where a loop only carries pieces or reads them, as the loop over microbatches does, its body is written over
pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from mmnnx import _compat
from mmnnx.mpmd.divide.values import Cut, Pieces, Value
from mmnnx.mpmd.divide.writer import Writer, special
from mmnnx.mpmd.ir.equations import Atom, Equation
from mmnnx.mpmd.ir.loop_spec import loop_spec
from mmnnx.mpmd.ir.scans import run_scan, split_operands
from mmnnx.sharding.placement import PlacementError


def divide_jaxpr(
    jaxpr: Any, given: Sequence[Cut | None], wanted: Sequence[Cut | None], names: Sequence[str]
) -> tuple[Any, list[Cut | None]]:
    """A jaxpr over pieces.

    Args:
      jaxpr: a jaxpr over whole values.
      given: how each input is divided; in its place stand its pieces.
      wanted: how each result has to be divided; None where it may be as it comes.
      names: what messages call the inputs.

    Returns:
      A closed jaxpr, and how each of its results is divided.

    Raises:
      PlacementError: for an equation that would need a divided value whole.
    """
    writer = Writer()
    invars, _, _, _ = _compat.open_jaxpr(jaxpr)
    args = [_new(v.aval, cut, name) for v, cut, name in zip(invars, given, names)]
    results = writer.write_jaxpr(jaxpr, args, "", wanted)
    closed = _compat.close_jaxpr(flat(args), flat(results), writer.written, writer.constants)
    return closed, [v.cut if isinstance(v, Pieces) else None for v in results]


def flat(values: Sequence[Value]) -> list[Atom]:
    """Values one after the other, pieces in the place of those that are divided."""
    return [a for v in values for a in (v.atoms if isinstance(v, Pieces) else [v])]


def unflatten(atoms: Sequence[Any], cuts: Sequence[Cut | None], names: Sequence[str]) -> list[Any]:
    """The inverse of `flat`."""
    left = iter(atoms)
    return [
        next(left) if cut is None else Pieces(cut.dim, tuple(next(left) for _ in cut.sizes), name)
        for cut, name in zip(cuts, names)
    ]


def _new(aval: Any, cut: Cut | None, name: str) -> Value:
    """Variables for a value."""
    if cut is None:
        return jex.Var(aval)
    shapes = (cut.shape(aval.shape, n) for n in range(len(cut.sizes)))
    return Pieces(cut.dim, tuple(jex.Var(aval.update(shape=shape)) for shape in shapes), name)


def _cut_of(value: Any) -> Cut | None:
    return value.cut if isinstance(value, Pieces) else None


def _name_of(value: Any) -> str:
    return value.name if isinstance(value, Pieces) else ""


# -------------------------------------------------------------------------------------------------- scans


@special("scan")
def _scan(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value]:
    num_consts, num_carry = _compat.scan_counts(node.eqn.params)
    consts, carry, xs = split_operands(operands, num_consts, num_carry)
    along = {v.cut: v.name for v in xs if isinstance(v, Pieces) and v.dim == 0}
    along |= {cut: "" for cut in wanted[num_carry:] if cut is not None and cut.dim == 0 and not along}
    if not along:
        return _scan_inside(writer, node, consts, carry, xs, wanted)
    cut = next(iter(along))  # what is divided differently is divided like this first
    if loop_spec(node.scope) is not None and (name := along[cut]):
        raise PlacementError(
            f"mm.microbatch slices {name} along the dimension that is divided between tasks: a batch is not"
        )
    columns = [writer.cut(x, cut, node.scope) for x in xs]
    rows: dict[int, list[Value]] = {}
    numbers = range(len(cut.sizes))
    carry_wanted: list[Cut | None] = [_cut_of(v) for v in carry]
    for n in reversed(numbers) if node.eqn.params["reverse"] else numbers:
        params = node.eqn.params | {"length": cut.sizes[n]}
        part = Equation(node.eqn.replace(params=params), node.scope)
        asked = [*carry_wanted, *[None] * len(node.outvars[num_carry:])]
        made = _scan_inside(writer, part, consts, carry, [c.atoms[n] for c in columns], asked)
        carry, rows[n] = list(made[:num_carry]), list(made[num_carry:])
    name = next(iter(along.values()))
    stacks = [Pieces(0, tuple(_atom(rows[n][k], node) for n in numbers), name) for k in range(len(rows[0]))]
    return [*carry, *stacks]


def _scan_inside(
    writer: Writer,
    node: Equation,
    consts: Sequence[Value],
    carry: Sequence[Value],
    xs: Sequence[Value],
    wanted: Sequence[Cut | None],
) -> Sequence[Value]:
    """Writes a scan whose body is over pieces, as far as constants, carries or slices are in pieces."""
    operands = [*consts, *carry, *xs]
    count = len(carry)
    asked = [_cut_of(v) or w for v, w in zip(carry, wanted)]
    inner_wanted = [None if w is None else Cut(w.dim - 1, w.sizes) for w in wanted[count:]]
    if not any(isinstance(v, Pieces) for v in operands) and not any((*asked, *inner_wanted)):
        avals = [v.aval for v in node.outvars[:count]]
        length = node.eqn.params["length"]
        avals += [v.aval.update(shape=(length, *v.aval.shape[1:])) for v in node.outvars[count:]]
        eqn = node.eqn.replace(invars=operands, outvars=[jex.Var(a) for a in avals])
        return writer.append(eqn, node.scope)
    names = [_name_of(v) for v in operands]
    jaxpr = node.eqn.params["jaxpr"]
    rows = [None if (c := _cut_of(x)) is None else Cut(c.dim - 1, c.sizes) for x in xs]

    def inside(cuts: Sequence[Cut | None]) -> tuple[Any, list[Cut | None]]:
        given = [*map(_cut_of, consts), *cuts, *rows]
        return divide_jaxpr(jaxpr, given, [*cuts, *inner_wanted], names)

    cuts, (body, made) = _settled(asked, inside)
    carry = [v if c is None else writer.cut(v, c, node.scope) for v, c in zip(carry, cuts)]
    args = flat([*consts, *carry, *xs])
    sizes = len(flat(consts)), len(flat(carry))
    run = functools.partial(run_scan, body, *sizes, node.eqn.params)
    atoms = writer.trace(run, args, node.scope)
    outer = [*cuts, *(None if c is None else Cut(c.dim + 1, c.sizes) for c in made[count:])]
    result_names = [next((n for n in names if n), "")] * len(outer)
    return unflatten(atoms, outer, result_names)


def _settled(cuts: Sequence[Cut | None], inside: Any) -> tuple[list[Cut | None], Any]:
    """How carries are divided: as they come in, or else as the body leaves them."""
    settled = list(cuts)
    while True:
        found = inside(settled)
        left = found[1][: len(settled)]
        if all(b is None or a is not None for a, b in zip(settled, left)):
            return settled, found
        settled = [a or b for a, b in zip(settled, left)]


def _atom(value: Value, node: Equation) -> Atom:
    """One piece of what a scan over pieces stacks."""
    if isinstance(value, Pieces):
        raise PlacementError(
            f"a scan goes over a divided dimension and stacks {value.name}, which is divided itself. It was "
            f"traced at {_compat.source_line(node.eqn)}: divide one of the two"
        )
    return value


# ----------------------------------------------------------------------------------------- whiles and conds


@special("while")
def _while(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value]:
    params = node.eqn.params
    n, m = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, carry = operands[:n], operands[n : n + m], operands[n + m :]

    def inside(cuts: Sequence[Cut | None]) -> tuple[Any, list[Cut | None]]:
        given = [*map(_cut_of, body_consts), *cuts]
        return divide_jaxpr(params["body_jaxpr"], given, cuts, [*map(_name_of, (*body_consts, *carry))])

    cuts, (body, _) = _settled([_cut_of(v) or w for v, w in zip(carry, wanted)], inside)
    names = [_name_of(v) for v in (*cond_consts, *carry)]
    cond, _ = divide_jaxpr(params["cond_jaxpr"], [*map(_cut_of, cond_consts), *cuts], [None], names)
    carry = [v if c is None else writer.cut(v, c, node.scope) for v, c in zip(carry, cuts)]
    first, second, third = (flat(vs) for vs in (cond_consts, body_consts, carry))
    changed = params | {
        "cond_jaxpr": cond,
        "body_jaxpr": body,
        "cond_nconsts": len(first),
        "body_nconsts": len(second),
    }
    invars = [*first, *second, *third]
    eqn = node.eqn.replace(invars=invars, outvars=[jex.Var(a.aval) for a in third], params=changed)
    return unflatten(writer.append(eqn, node.scope), cuts, list(map(_name_of, carry)))


@special("cond")
def _cond(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value]:
    index, *rest = operands
    given, names = list(map(_cut_of, rest)), list(map(_name_of, rest))
    branches = node.eqn.params["branches"]

    def inside(cuts: Sequence[Cut | None]) -> tuple[Any, list[Cut | None]]:
        made = [divide_jaxpr(b, given, cuts, names) for b in branches]
        columns = zip(*(found for _, found in made))
        return [jaxpr for jaxpr, _ in made], [next((c for c in col if c), None) for col in columns]

    cuts, (made, _) = _settled(wanted, inside)
    outvars = [jex.Var(v.aval) for v in _compat.open_jaxpr(made[0])[1]]
    eqn = node.eqn.replace(
        invars=[writer.whole(index, node), *flat(rest)],
        outvars=outvars,
        params=node.eqn.params | {"branches": tuple(made)},
    )
    return unflatten(writer.append(eqn, node.scope), cuts, [next((n for n in names if n), "")] * len(cuts))
