"""Values that are kept as parts, from a sum over sharded examples up to the accumulator of a loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.hoist.contractions import (
    CannotHoist,
    Contraction,
    Sizes,
    as_function,
    is_float,
    over_parts,
    sharded_contractions,
)
from mmnnx.mpmd.hoist.sharding_propagation import Axes, Known, entering, follow, of_spec
from mmnnx.mpmd.ir.dataflow import is_zero
from mmnnx.mpmd.ir.equations import REMAT, Atom, Equation, Var, is_var
from mmnnx.mpmd.ir.rewrite import trace_equations
from mmnnx.mpmd.ir.scans import run_scan

# For each leading dimension of a divided value: the axes that its parts are over, and how many there are.
Groups = tuple[tuple[Axes, int], ...]


# Linear in one operand, which is the first; in several, all of which are divided alike.
_LINEAR = {
    "transpose", "reshape", "squeeze", "neg", "copy", "reduce_sum", "slice", "dynamic_slice", "div",
    "convert_element_type", "sharding_constraint",
}  # fmt: skip
_ROUNDING = {
    "div",
    "convert_element_type",
}  # linear for floats alone: parts of integers would be rounded each
_LINEAR_IN_ALL = {"add", "add_any", "sub", "concatenate"}
_OPEN = {"scan", REMAT}
_SUMS = {"dot_general", "reduce_sum", "scatter-add"}


class PartialSums:
    """A list of equations, that of a loop or of a jaxpr inside it, and which of its values are kept as parts.

    Attributes:
      chosen: the values that are kept as parts, with the groups of these.
      contracted: the equations that sum over sharded dimensions, with these.
      parts: for values that are kept as parts, the variables that hold them; `rewritten` fills it in.
    """

    def __init__(
        self, equations: Sequence[Equation], results: Sequence[Atom], known: Known, args: Sequence[Var] = ()
    ):
        self.equations, self.results, self.known, self.args = equations, results, known, args
        self.maker = {v: e for e in equations for v in e.outvars}
        self.uses = Counter(a for e in equations for a in e.invars if is_var(a))
        self.uses.update(filter(is_var, results))
        self.chosen: dict[Var, Groups] = {}
        self.contracted: dict[Equation, list[Contraction]] = {}
        self.parts: dict[Var, Var] = {}
        self.inner: dict[Equation, PartialSums] = {}

    def is_sharded(self, last: Equation, sizes: Sizes) -> bool:
        """Whether anything that an equation is computed from is known to be sharded."""
        seen: set[Equation] = set()
        pending = [last]
        while pending:
            for a in filter(is_var, pending.pop().invars):
                if any(sizes.get(axis, 1) > 1 for axes in self.known.get(a, ()) for axis in axes):
                    return True
                if (e := self.maker.get(a)) is not None and e not in seen:
                    seen.add(e)
                    pending.append(e)
        return False

    def plan(self, var: Var, sizes: Sizes) -> Groups:
        """Has a value divided, and what it is made of up to a sum over sharded dimensions.

        Raises:
          CannotHoist: if that is not possible; nothing is chosen then.
        """
        found: list[tuple[PartialSums, Var, Groups]] = []
        groups = self._groups(var, sizes, found)
        for region, v, its in found:
            region.chosen[v] = its
        return groups

    def _groups(self, var: Atom, sizes: Sizes, found: list[tuple[PartialSums, Var, Groups]]) -> Groups:
        e = self.maker.get(var) if is_var(var) else None
        if e is None:
            raise CannotHoist
        if self.uses[var] != 1:
            raise CannotHoist("other work in the loop reads it too", var)
        if splits := sharded_contractions(e, self.known, self.maker, sizes):
            self.contracted[e] = splits
            groups: Groups = tuple((axes, count) for axes, count, _ in splits)
        elif e.name in _LINEAR and (e.name not in _ROUNDING or is_float(e)):
            groups = self._groups(e.invars[0], sizes, found)
        elif e.name == "mul":
            groups = self._of_factor(e, sizes, found)
        elif e.name in _LINEAR_IN_ALL:
            terms, sums = self._terms(e)
            several = {self._groups(a, sizes, found) for a in terms}
            if len(several) > 1:
                raise CannotHoist("its terms are sums over other axes")
            (groups,) = several
            found += ((self, v, groups) for v in sums)
        elif e.name in _OPEN:
            inner, number = self._opened(e), e.outvars.index(var)
            if e.name == "scan" and number < _compat.scan_counts(e.eqn.params)[1]:
                groups = self._of_carry(e, number, sizes, found)
            else:
                groups = inner._groups(inner.results[number], sizes, found)
        elif e.name in _SUMS or (e.name == "shard_map" and not _may_sum_up(e, var, sizes)):
            raise CannotHoist  # of what is not sharded, as far as is known
        else:
            raise CannotHoist(f"it goes through {e.name!r}, which is not taken apart")
        found.append((self, var, groups))
        return groups

    def _of_carry(
        self, scan: Equation, number: int, sizes: Sizes, found: list[tuple[PartialSums, Var, Groups]]
    ) -> Groups:
        """The groups of what each iteration of a scan adds to a carry, which starts from zeros."""
        inner, at = self._opened(scan), _compat.scan_counts(scan.eqn.params)[0] + number
        enters, leaves = inner.args[at], inner.results[number]
        last = inner.maker.get(leaves) if is_var(leaves) else None
        if last is None or not adds_to(last, enters, inner.uses) or not is_zero(scan.invars[at], self.maker):
            raise CannotHoist("a scan carries it, and does more than to add to it")
        (term,) = (a for a in last.invars if a is not enters)
        groups = inner._groups(term, sizes, found)
        found += ((inner, v, groups) for v in (enters, leaves))
        return groups

    def _terms(self, e: Equation) -> tuple[list[Atom], list[Var]]:
        """What an equation reads, and in place of a sum that it reads its terms; and these sums.

        In a loop: a weight that is used in a thousand places has a gradient of a thousand terms.
        """
        terms: list[Atom] = []
        sums: list[Var] = []
        queue = [*e.invars]
        while queue:
            a = queue.pop(0)
            maker = self.maker.get(a) if is_var(a) else None
            if is_var(a) and maker is not None and maker.name in ("add", "add_any") and self.uses[a] == 1:
                sums.append(a)
                queue += maker.invars
            else:
                terms.append(a)
        return terms, sums

    def _of_factor(self, e: Equation, sizes: Sizes, found: list[tuple[PartialSums, Var, Groups]]) -> Groups:
        """The groups of the factor of a product that is the sum; else why the larger one is none."""
        reasons: list[tuple[int, CannotHoist]] = []
        for a in e.invars:
            inside: list[tuple[PartialSums, Var, Groups]] = []
            try:
                groups = self._groups(a, sizes, inside)
            except CannotHoist as reason:
                reasons.append((a.aval.size, reason))
            else:
                found += inside
                return groups
        raise max(reasons, key=lambda of: of[0])[1]

    def _opened(self, e: Equation) -> PartialSums:
        """The jaxpr in an equation."""
        if e not in self.inner:
            (jaxpr, *_) = _compat.subjaxprs(e.eqn)
            invars, outvars, eqns, _ = _compat.open_jaxpr(jaxpr)
            args = [jex.Var(v.aval) for v in invars]
            closed = _compat.close_jaxpr(invars, outvars, eqns)
            flat, results = trace_equations(jex.jaxpr_as_fun(closed), *args, scope="")
            known = {v: dims for v, dims in zip(args, entering(e.eqn, self.known)) if any(dims)}
            follow((f.eqn for f in flat), known)
            self.inner[e] = PartialSums(flat, results, known, args)
        return self.inner[e]

    def rewritten(self, e: Equation) -> list[Equation]:
        """What takes the place of an equation; equations come in order."""
        if not any(v in self.chosen for v in e.outvars):
            return [e]
        if e.name in _OPEN:
            return self._rewritten_inside(e)
        (result,) = e.outvars
        if e.name == "sharding_constraint":  # it is one on the whole sum
            self.parts[result] = self.parts[e.invars[0]]
            return []
        if e in self.contracted:
            fun, operands = over_parts(e, self.contracted[e]), list(filter(is_var, e.invars))
        else:
            fun, operands = as_function(e), [self.parts.get(a, a) for a in e.invars if is_var(a)]
            axes = [0 if a in self.parts else None for a in e.invars if is_var(a)]
            for _ in self.chosen[result]:
                fun = jax.vmap(fun, axes)
        flat, (self.parts[result],) = trace_equations(fun, *operands, scope=e.scope)
        return flat

    def _rewritten_inside(self, e: Equation) -> list[Equation]:
        inner, params = self.inner[e], e.eqn.params
        carried = {n: _of_parts(v, inner.chosen[v]) for n, v in enumerate(inner.args) if v in inner.chosen}
        inner.parts.update((inner.args[n], v) for n, v in carried.items())
        equations = [new for old in inner.equations for new in inner.rewritten(old)]
        results: list[Any] = [inner.parts.get(v, v) if is_var(v) else v for v in inner.results]
        args = [inner.parts.get(v, v) for v in inner.args]
        closed = _compat.close_jaxpr(args, results, [f.eqn for f in equations])
        lead = {n: len(self.chosen[v]) for n, v in enumerate(e.outvars) if v in self.chosen}
        if e.name != "scan":
            outvars = list(e.outvars)
            for n in lead:
                outvars[n] = jex.Var(results[n].aval)
            self.parts.update((e.outvars[n], outvars[n]) for n in lead)
            jaxpr = closed if isinstance(params["jaxpr"], type(closed)) else closed.jaxpr
            return [Equation(e.eqn.replace(params=params | {"jaxpr": jaxpr}, outvars=outvars), e.scope)]
        num_consts, num_carry = _compat.scan_counts(params)

        def scan(*args: Any) -> list[Any]:
            zeros = {n: jnp.zeros(v.aval.shape, v.aval.dtype) for n, v in carried.items()}
            made = run_scan(
                closed, num_consts, num_carry, params, *(zeros.get(n, x) for n, x in enumerate(args))
            )
            # The parts come first, before the dimension of the scan.
            return [
                jnp.moveaxis(x, 0, lead[n]) if n in lead and n >= num_carry else x for n, x in enumerate(made)
            ]

        flat, made = trace_equations(
            lambda *xs: scan(*_filled(e.invars, xs)), *filter(is_var, e.invars), scope=e.scope
        )
        self.parts.update((e.outvars[n], made[n]) for n in lead)
        given = {v for f in flat for v in f.outvars}
        for n, v in enumerate(made):
            if n not in lead and (v not in given or v in made[:n]):  # JAX hands on what stays as it is
                copied, (made[n],) = trace_equations(jnp.copy, v, scope=e.scope)
                flat += copied
        own = {made[n]: v for n, v in enumerate(e.outvars) if n not in lead}
        return [Equation(f.eqn.replace(outvars=[own.get(v, v) for v in f.outvars]), e.scope) for f in flat]


def adds_to(last: Equation, enters: Var, uses: Counter) -> bool:
    """Whether an equation, the last of an iteration, adds something to a carry, which nobody else reads."""
    others = [a for a in last.invars if a is not enters]
    once = uses[enters] == uses[last.outvars[0]] == 1
    return last.name in ("add", "add_any") and len(others) == 1 and once and is_var(others[0])


def _of_parts(v: Var, groups: Groups) -> Var:
    """A variable for the parts of a value."""
    return jex.Var(v.aval.update(shape=(*(count for _, count in groups), *v.aval.shape)))


def _filled(atoms: Sequence[Atom], values: Sequence[Any]) -> list[Any]:
    """Values for all atoms, given those of the variables among them."""
    rest = iter(values)
    return [next(rest) if is_var(a) else a.val for a in atoms]


def _may_sum_up(e: Equation, result: Atom, sizes: Sizes) -> bool:
    """Whether operands of a shard_map are divided over axes that a result of it is not divided over."""

    def axes(spec: PartitionSpec) -> set[Any]:
        return {axis for dims in of_spec(spec, len(spec)) for axis in dims or () if sizes.get(axis, 1) > 1}

    manual = set(e.eqn.params["newly_manual_axes"])
    if any(size > 1 and axis not in manual for axis, size in e.eqn.params["mesh"].shape.items()):
        return True  # over those the compiler divides as it likes
    own = axes(e.eqn.params["out_specs"][e.outvars.index(result)])
    return any(axes(spec) - own for spec in e.eqn.params["in_specs"])
