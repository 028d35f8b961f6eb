"""Writes a jaxpr over whole values as one over pieces.

A piece goes from equation to equation as the whole value would, wherever an equation may be computed for a
part of that dimension (`links`). Loops are in `loops.py`, what takes parts of a divided dimension in
`indexing.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.divide.flatten import flatten
from mmnnx.mpmd.divide.links import Link, links
from mmnnx.mpmd.divide.recut import recut
from mmnnx.mpmd.divide.values import Cut, Key, Pieces, Value
from mmnnx.mpmd.ir.equations import CUSTOM_GRADIENTS, REMAT, Atom, Equation, Var, is_var
from mmnnx.mpmd.ir.rewrite import trace_equations
from mmnnx.sharding.division import starts
from mmnnx.sharding.placement import PlacementError

Special = Callable[["Writer", Equation, Sequence[Value], Sequence[Cut | None]], Sequence[Value] | None]
SPECIAL: dict[str, Special] = {}
"""Equations that have a rule of their own: from the equation, its operands, and how its results are wanted,
to the results; None if the rule does not hold for this one."""


class Writer:
    """Writes equations over pieces.

    Attributes:
      written: the equations.
      constants: variables for arrays that the function captured, and the arrays.
    """

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.constants: dict[Var, Any] = {}
        self._values: dict[Var, Value] = {}
        self._whole: dict[Key, Atom] = {}  # of values that are in pieces, those that are there whole as well
        # How others could be, by the equation that first made them; not at all, what was given in pieces.
        self._made: dict[Key, tuple[Equation, list[Value]] | None] = {}
        self._recuts: dict[Key, Pieces] = {}  # for values in other pieces than they were made in, these
        # By dimension and size, how values are divided that were given.
        self._given: dict[tuple[int, int], Cut] = {}
        self._maker: dict[Var, Any] = {}  # of variables that were written
        self._numbers: dict[Var, Any] = {}  # of what was asked to be known
        self._calls: dict[Var, Any] = {}  # for results of equations, the call that these are in
        self._cuts: dict[tuple[Var, Cut], Pieces] = {}

    def write_jaxpr(
        self, jaxpr: Any, args: Sequence[Value], scope: str, wanted: Sequence[Cut | None] = ()
    ) -> list[Value]:
        """Writes the equations of a jaxpr.

        Args:
          jaxpr: open or closed.
          args: its arguments.
          scope: the name stack around it.
          wanted: for each result, how it has to be divided; None where it may be as it comes.

        Returns:
          Its results.

        Raises:
          PlacementError: for an equation that would need a divided value whole.
        """
        invars = [jex.Var(v.aval) for v in _compat.open_jaxpr(jaxpr)[0]]
        self._values.update(zip(invars, args))
        for v in args:
            if isinstance(v, Pieces):
                self._made.setdefault(v.key, None)
                self._given.setdefault((v.dim, v.cut.size), v.cut)
        flat, results = flatten(jaxpr, invars, scope, self.constants, self._calls)
        asked = _asked(flat, list(zip(results, wanted)))
        for node in flat:
            self._write(node, [asked.get(v) for v in node.outvars])
        found = [self._read(a) for a in results]
        cuts = [*wanted, *[None] * (len(found) - len(wanted))]
        return [v if cut is None else self.cut(v, cut, scope) for v, cut in zip(found, cuts)]

    # ------------------------------------------------------------------------------------------- values

    def _read(self, atom: Atom) -> Value:
        return self._values.get(atom, atom) if is_var(atom) else atom

    def whole(self, value: Value, reader: Equation) -> Atom:
        """A value as a whole, if it is there so, or can be made so without putting pieces together; or if it
        was made of what was given, and is one number for each row, such as the losses of a population.

        Raises:
          PlacementError: says which equation reads it whole.
        """
        if not isinstance(value, Pieces):
            return value
        if (divided := self._made_of(value)) is not None:
            if self._made.get(value.key) is not None and math.prod(value.shape) == value.cut.size:
                (joined,) = self.trace(
                    lambda *parts: jax.lax.concatenate(parts, value.dim), value.atoms, reader.scope
                )
                self._whole[value.key] = joined
                return joined
            raise PlacementError(_refusal(divided, reader, self.line(reader)))
        value = self._recuts.get(value.key, value)
        if value.key in self._whole:
            return self._whole[value.key]
        maker = self._made[value.key]
        assert maker is not None
        node, operands = maker
        made = self.emit(node, [self.whole(v, reader) for v in operands])
        for v, atom in zip(node.outvars, made):
            if isinstance(pieces := self._values.get(v), Pieces):
                self._whole[pieces.key] = atom
        return self._whole[value.key]

    def _made_of(self, value: Pieces) -> Pieces | None:
        """What was given in pieces, and is not there whole, of which a value is made: floats before keys."""
        found: list[Pieces] = []
        seen, left = {value.key}, [value]
        while left:
            v = left.pop()
            v = self._recuts.get(v.key, v)
            if v.key in self._whole:
                continue
            if (maker := self._made.get(v.key)) is None:
                found.append(v)
                continue
            more = [x for x in maker[1] if isinstance(x, Pieces) and x.key not in seen]
            seen.update(x.key for x in more)
            left += more
        floats = (v for v in found if jnp.issubdtype(v.atoms[0].aval.dtype, jnp.floating))
        return next(floats, next(iter(found), None))

    def cut(self, value: Value, cut: Cut, scope: str) -> Pieces:
        """A value in pieces.

        Raises:
          PlacementError: for one that is divided along another dimension.
        """
        if isinstance(value, Pieces):
            return value if value.cut == cut else self._recut(value, cut, scope)
        if is_var(value) and (value, cut) in self._cuts:
            return self._cuts[value, cut]
        maker = self._maker.get(value) if is_var(value) else None
        atoms: list[Atom] = []
        for start, size in zip(starts(cut.sizes), cut.sizes):
            if maker is not None and (smaller := _smaller_broadcast(maker, cut.dim, size)) is not None:
                atoms += self.append(smaller, str(maker.source_info.name_stack))
            else:
                take = lambda x, start=start, size=size: jax.lax.slice_in_dim(
                    x, start, start + size, axis=cut.dim
                )
                atoms += self.trace(take, [value], scope)
        pieces = Pieces(cut.dim, tuple(atoms), "")
        if is_var(value):
            self._cuts[value, cut] = pieces
        self._whole[pieces.key] = value
        return pieces

    def cut_given(self, dim: int, size: int) -> Cut | None:
        """How a dimension of this size is divided in what was given; None if it is not."""
        return self._given.get((dim, size))

    def _recut(self, value: Pieces, cut: Cut, scope: str) -> Pieces:
        """The same value in other pieces: rows go from one to another, and may have to be sent.

        Raises:
          PlacementError: for one that is divided along another dimension.
        """
        if value.dim != cut.dim:
            raise PlacementError(
                f"{value.name or 'a value'} is divided along dimension {value.dim} into {value.cut}, and a "
                f"result that is made of it along dimension {cut.dim} into {cut}: divide both alike"
            )
        made = recut(value, cut.sizes, lambda fun, atoms: self.trace(fun, atoms, scope))
        self._recuts[made.key] = self._recuts.get(value.key, value)
        return made

    def line(self, node: Equation) -> str:
        """The line of the user's program that an equation is of, or the call that it is in."""
        line = _compat.source_line(node.eqn)
        call = self._calls.get(node.outvars[0]) if node.outvars else None
        return _compat.source_line(call) if line == _compat.UNKNOWN_LINE and call is not None else line

    def known(self, atom: Atom) -> Any:
        """The number that an atom is made of constants to be, such as an index; None if it is not."""
        if not is_var(atom):
            return atom.val
        if atom not in self._numbers:
            self._numbers[atom] = self._computed(atom)
        return self._numbers[atom]

    def _computed(self, atom: Var) -> Any:
        maker = self._maker.get(atom)
        if maker is None or atom.aval.shape or _compat.subjaxprs(maker):
            return None
        operands = [self.known(a) for a in maker.invars]
        if any(a is None for a in operands) or not operands:
            return None
        with jax.ensure_compile_time_eval():
            made = maker.primitive.bind(*map(jax.numpy.asarray, operands), **maker.params)
        return made[0] if maker.primitive.multiple_results else made

    # ---------------------------------------------------------------------------------------- equations

    def trace(self, fun: Callable[..., Any], atoms: Sequence[Atom], scope: str) -> list[Atom]:
        """Writes the equations of `fun` over whole values; its results."""
        flat, results = trace_equations(fun, *atoms, scope=scope)
        for e in flat:
            self.written.append(_compat.under_scope(e.eqn, e.scope))
            self._maker.update(dict.fromkeys(e.outvars, self.written[-1]))
        return results

    def emit(self, node: Equation, operands: Sequence[Atom]) -> list[Var]:
        """Writes an equation over other operands; its results."""
        return self.append(node.eqn.replace(invars=list(operands)), node.scope)

    def append(self, eqn: Any, scope: str) -> list[Var]:
        """Writes an equation under a name stack, with results of its own; these."""
        fresh = [jex.Var(v.aval) for v in eqn.outvars]
        self.written.append(_compat.under_scope(eqn.replace(outvars=fresh), scope))
        self._maker.update(dict.fromkeys(fresh, self.written[-1]))
        return fresh

    def _write(self, node: Equation, wanted: Sequence[Cut | None]) -> None:
        """Writes what an equation becomes; its results are known from then on."""
        operands = [self._read(a) for a in node.invars]
        in_pieces = any(isinstance(v, Pieces) for v in operands)
        if not in_pieces and not any(wanted):
            self._values.update(zip(node.outvars, self.emit(node, operands)))
            return
        rule = SPECIAL.get(node.name, by_parts)
        results = rule(self, node, operands, wanted)
        if results is None and rule is not by_parts:
            results = by_parts(self, node, operands, wanted)
        if results is None:
            whole = [self.whole(v, node) for v in operands]
            results = self.emit(node, whole)
        self._values.update(zip(node.outvars, results))
        for v in results:
            if isinstance(v, Pieces):
                self._made.setdefault(v.key, (node, list(operands)))


def by_parts(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> list[Value] | None:
    """Writes an equation once for each part of a dimension; None, with nothing written, if there is none."""
    found = _link(node, operands, wanted)
    if found is None:
        return None
    link, cut = found
    shapes = [v.shape if isinstance(v, Pieces) else v.aval.shape for v in operands]
    cuts = [None if d is None else cut.moved(d, shape[d]) for d, shape in zip(link.operands, shapes)]
    made_cuts = [
        None if d is None else cut.moved(d, v.aval.shape[d]) for d, v in zip(link.results, node.outvars)
    ]
    split = any(d is not None and c is None for d, c in zip(link.operands, cuts))
    split |= any(d is not None and c is None for d, c in zip(link.results, made_cuts))
    if split:
        return None
    columns = [v if c is None else writer.cut(v, c, node.scope) for v, c in zip(operands, cuts)]
    rows: list[list[Var]] = []
    for n, size in enumerate(cut.sizes):
        part = lambda whole, size=size: whole * size // cut.size
        atoms = [v.atoms[n] if isinstance(v, Pieces) else v for v in columns]
        avals = [_resized(v.aval, c, n) for v, c in zip(node.outvars, made_cuts)]
        eqn = node.eqn.replace(
            invars=atoms,
            outvars=[jex.Var(aval) for aval in avals],
            params=link.params(node.eqn.params, part),
        )
        rows.append(writer.append(eqn, node.scope))
    name = next((v.name for v in operands if isinstance(v, Pieces) and v.name), "")
    return [
        Pieces(c.dim, column, name) if c is not None else _combined(writer, link, column, node)
        for c, column in zip(made_cuts, zip(*rows))
    ]


def _link(node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]) -> tuple[Link, Cut] | None:
    """The link by which an equation can be computed in parts, and these parts."""
    mine = {n: v.cut for n, v in enumerate(operands) if isinstance(v, Pieces)}
    for link in links(node.eqn):
        if mine and all(link.operands[n] == cut.dim for n, cut in mine.items()):
            return link, next(iter(mine.values()))
        for d, cut in zip(link.results, wanted):
            if not mine and cut is not None and d == cut.dim:
                return link, cut
    return None


def _combined(writer: Writer, link: Link, column: Sequence[Atom], node: Equation) -> Atom:
    """A result of which each part has a share."""
    combine = _COMBINATIONS[link.combine or ""]
    return reduce(lambda a, b: writer.trace(combine, [a, b], node.scope)[0], column)


_COMBINATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": jax.lax.add,
    "mul": jax.lax.mul,
    "max": jax.lax.max,
    "min": jax.lax.min,
    "and": jax.lax.bitwise_and,
    "or": jax.lax.bitwise_or,
    "xor": jax.lax.bitwise_xor,
}


def _resized(aval: Any, cut: Cut | None, n: int) -> Any:
    """The type of a piece of a value."""
    return aval if cut is None else aval.update(shape=cut.shape(aval.shape, n))


def _smaller_broadcast(eqn: Any, dim: int, size: int) -> Any:
    """What makes a part of what a `broadcast_in_dim` makes; None if it does not make that dimension."""
    if eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) > 1:
        return None
    (a,), (v,) = eqn.invars, eqn.outvars
    numbers = list(eqn.params["broadcast_dimensions"])
    if dim in numbers and a.aval.shape[numbers.index(dim)] > 1:
        return None
    aval = _resized(v.aval, Cut(dim, (size,)), 0)
    return eqn.replace(outvars=[jex.Var(aval)], params=eqn.params | {"shape": aval.shape})


def _asked(flat: Sequence[Equation], wanted: Sequence[tuple[Atom, Cut | None]]) -> dict[Var, Cut]:
    """How values have to be divided so that results can be that are made of whole ones.

    Weights that are drawn for a whole stack, for instance, are drawn in pieces from the keys on.
    """
    asked = {a: cut for a, cut in wanted if cut is not None and is_var(a)}
    for node in reversed(flat) if asked else ():
        cuts = [asked.get(v) for v in node.outvars]
        if node.name == "scan":
            for a, cut in _asked_of_scan(node, cuts):
                asked.setdefault(a, cut)
            continue
        for link in links(node.eqn) if any(cuts) else ():
            fitting = [c for c, d in zip(cuts, link.results) if c is not None and c.dim == d]
            for a, d in zip(node.invars, link.operands) if fitting else ():
                moved = None if d is None else fitting[0].moved(d, a.aval.shape[d])
                if moved is not None and is_var(a):
                    asked.setdefault(a, moved)
    return asked


def _asked_of_scan(node: Equation, cuts: Sequence[Cut | None]) -> list[tuple[Var, Cut]]:
    """The same for what a scan goes over, if what it stacks is divided."""
    consts, carry = _compat.scan_counts(node.eqn.params)
    cut = next((c for c in cuts[carry:] if c is not None and c.dim == 0), None)
    if cut is None:
        return []
    return [(a, cut) for a in node.invars[consts + carry :] if is_var(a)]


def _refusal(value: Pieces, node: Equation, line: str) -> str:
    return (
        f"{value.name or 'a value'} is divided between tasks along dimension {value.dim} ({value.cut}), and "
        f"{node.name!r} needs all of it in one place, at {line}. Divided state can be scanned over, "
        "computed with element by element, reduced, contracted, and sliced at fixed places; one number for "
        "each row of it can be read whole. For anything else place it on one task"
    )


# ------------------------------------------------------------------------------------- rules of their own


def special(*names: str) -> Callable[[Special], Special]:
    """Gives equations a rule of their own."""

    def register(rule: Special) -> Special:
        SPECIAL.update(dict.fromkeys(names, rule))
        return rule

    return register


@special(*CUSTOM_GRADIENTS, REMAT)
def _call(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value] | None:
    """What is in a call that reads pieces."""
    if not any(isinstance(v, Pieces) for v in operands):
        return None
    (body, *_) = _compat.subjaxprs(node.eqn)
    return writer.write_jaxpr(body, operands, node.scope, wanted)


@special("optimization_barrier")
def _barrier(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value]:
    """A barrier for each operand, or each piece of one."""

    def behind(v: Atom) -> Atom:
        eqn = node.eqn.replace(invars=[v], outvars=[jex.Var(v.aval)])
        return writer.append(eqn, node.scope)[0]

    return [
        Pieces(v.dim, tuple(map(behind, v.atoms)), v.name) if isinstance(v, Pieces) else behind(v)
        for v in operands
    ]


@special("sharding_constraint")
def _constraint(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value] | None:
    """A constraint for each piece, which leaves the divided dimension to XLA."""
    (value,), sharding = operands, node.eqn.params["sharding"]
    if not isinstance(value, Pieces) or not isinstance(sharding, NamedSharding):
        return None
    spec = [*sharding.spec, *[None] * (len(value.shape) - len(sharding.spec))]
    spec[value.dim] = PartitionSpec.UNCONSTRAINED
    inner = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    constrain = lambda x: jax.lax.with_sharding_constraint(x, inner)
    made = (writer.trace(constrain, [atom], node.scope) for atom in value.atoms)
    return [Pieces(value.dim, tuple(map(operator.itemgetter(0), made)), value.name)]


@special("logical_constraint")
def _logical_constraint(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value] | None:
    """The same for one in logical names."""
    (value,), params = operands, node.eqn.params
    if not isinstance(value, Pieces):
        return None
    names = [*params["names"], *[None] * (len(value.shape) - len(params["names"]))]
    names[value.dim] = PartitionSpec.UNCONSTRAINED
    atoms: list[Atom] = []
    for atom in value.atoms:
        eqn = node.eqn.replace(
            invars=[atom], outvars=[jex.Var(atom.aval)], params=params | {"names": tuple(names)}
        )
        atoms += writer.append(eqn, node.scope)
    return [Pieces(value.dim, tuple(atoms), value.name)]
