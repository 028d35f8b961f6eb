"""Sums over a data axis that are taken once, after the microbatch loop.

The gradient of a weight is a product over the examples of a microbatch. Where these are sharded over a mesh
axis, XLA adds up what the devices make, in every microbatch. Here the product is divided into as many parts
as the axis has devices, each over the examples of one: the accumulator holds a part for each device, and the
parts are added up after the loop. It is the same sum in another order, whatever is sharded how: what
`mmnnx.mpmd.hoist.sharding_propagation` finds decides about speed alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from mmnnx import _compat
from mmnnx.mpmd.hoist.sharding_propagation import Axes, Known, dims_of, entering, follow, of_spec
from mmnnx.mpmd.ir.equations import Atom, Equation, Loop, Node, Var, is_var
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.ir.rewrite import inline
from mmnnx.mpmd.ir.shardings import same_shape

Sizes = Mapping[Any, int]  # of the axes of a mesh
# For each leading dimension of a divided value: the axes that its parts are over, and how many there are.
Groups = tuple[tuple[Axes, int], ...]


class Undivided(Exception):
    """A sum that cannot be taken after the loop.

    The message says why, if XLA may reduce it there; `of` is the value that is in the way, if it is one.
    """

    def __init__(self, why: str = "", of: Var | None = None):
        super().__init__(why)
        self.of = of


def reduce_once(
    nodes: Sequence[Node], placement: Placement, given: Mapping[Var, NamedSharding | None]
) -> list[Node]:
    """Divides the accumulators of loops whose terms are sums over sharded examples.

    Args:
      nodes: all nodes, in order.
      placement: where they are.
      given: the shardings of the inputs of the function.

    Returns:
      The nodes, with loops replaced that hold such accumulators.
    """
    out: list[Node] = []
    maker = {v: node for node in nodes if isinstance(node, Equation) for v in node.outvars}
    for node in nodes:
        if isinstance(node, Loop) and node.spec.length > 1:
            fresh = {a for a in node.init if _is_zero(a, maker)}
            out += _divide(node, placement.bodies[node], given, fresh)
        else:
            out.append(node)
    return out


def _divide(
    loop: Loop, body: Placement, given: Mapping[Var, NamedSharding | None], zero: Collection[Atom]
) -> list[Node]:
    """A loop with what comes before and after it; `zero` are its inputs that are all zeros."""
    meshes = dict.fromkeys(location.mesh for location in body.locations.values())
    if all(mesh.size == 1 for mesh in meshes):
        return [loop]
    known = _slices(loop, given)
    follow((e.eqn for e in loop.body), known)
    region = _Region(loop.body, [*loop.carry_out, *loop.ys], known)
    sums: dict[int, tuple[Equation, Groups]] = {}  # by number of the carry
    undivided: dict[Var, str] = {}
    names = {mesh: _names(mesh, meshes) for mesh in meshes}
    for n, (enters, leaves) in enumerate(zip(loop.carry_in, loop.carry_out)):
        last = region.maker.get(leaves)
        if last is None or last not in body.locations or not _adds_to(last, enters, region.uses):
            continue
        mesh = body.locations[last].mesh
        sizes = {axis: mesh.shape[own] for axis, own in names[mesh].items()}
        try:
            sums[n] = last, region.plan(_added(last, enters), sizes)
        except Undivided as reason:
            # A larger value, which the sum is made of, is an activation: XLA reduces it for other readers.
            small = reason.of is None or reason.of.aval.size == enters.aval.size
            if str(reason) and small and region.is_sharded(last, sizes):
                undivided[loop.carries[n]] = str(reason)
    before: list[Node] = []
    after: list[Node] = []
    new: dict[int, tuple[Var, Var, Var, Var]] = {}
    axes_of: dict[Var, tuple[Axes, ...]] = {}
    body_after = [e for e in region.rewritten() if all(e is not last for last, _ in sums.values())]
    for n, (last, groups) in sums.items():
        enters, leaves, total = loop.carry_in[n], loop.carry_out[n], loop.carries[n]
        counts = tuple(count for _, count in groups)
        aval = enters.aval.update(shape=(*counts, *enters.aval.shape))
        empty = lambda a=aval: jnp.copy(jnp.zeros(a.shape, a.dtype))
        zeros, (start,) = inline(empty, scope=last.scope)
        before += zeros
        running, parts = jex.Var(aval), jex.Var(aval)
        add = lambda acc, x: acc + x.astype(acc.dtype)
        added, (out,) = inline(add, running, region.divided[_added(last, enters)], scope=last.scope)
        body_after += added
        lead = tuple(range(len(groups)))
        starts = [] if loop.init[n] in zero else [loop.init[n]]
        total_of = lambda x, *s, lead=lead: sum(s, jnp.sum(x, lead, dtype=x.dtype))
        summed, _ = inline(total_of, parts, *starts, scope="")
        after += [*summed[:-1], Equation(summed[-1].eqn.replace(outvars=[total]), "")]
        new[n] = start, running, out, parts
        own = names[body.locations[last].mesh]
        axes_of[parts] = tuple(tuple(own[axis] for axis in axes if axis in own) for axes, _ in groups)

    def replaced(old: Sequence[Any], k: int) -> tuple[Any, ...]:
        return tuple(new[n][k] if n in new else v for n, v in enumerate(old))

    divided = dataclasses.replace(
        loop,
        body=tuple(body_after),
        init=replaced(loop.init, 0),
        carry_in=replaced(loop.carry_in, 1),
        carry_out=replaced(loop.carry_out, 2),
        carries=replaced(loop.carries, 3),
        parts=axes_of,
        undivided=undivided,
    )
    return [*before, divided, *after]


def _names(mesh: Mesh, meshes: Iterable[Mesh]) -> dict[Any, Any]:
    """What the axes of a mesh are called where its values come from, and here: what is sent to a mesh of the
    same shape stays sharded over the axes that stand at the same places."""
    others = (other for other in meshes if same_shape(other, mesh))
    names = {axis: own for other in others for axis, own in zip(other.axis_names, mesh.axis_names)}
    return names | {own: own for own in mesh.axis_names}


def _slices(loop: Loop, given: Mapping[Var, NamedSharding | None]) -> Known:
    """How the slices of a loop are sharded, where the argument that they are of says it."""
    known: Known = {}
    for v, row in zip(loop.slice_vars, loop.slices):
        own = given.get(loop.sources[row[0]]) if row[0] in loop.sources else None
        if own is not None:
            known[v] = tuple(axes or () for axes in of_spec(own.spec, v.aval.ndim)[: v.aval.ndim])
    return known


def _adds_to(last: Equation, enters: Var, uses: Counter) -> bool:
    """Whether an equation, the last of a microbatch, adds something to a carry, which nobody else reads."""
    others = [a for a in last.invars if a is not enters]
    once = uses[enters] == uses[last.outvars[0]] == 1
    return last.name == "add" and len(others) == 1 and once and is_var(others[0])


def _added(last: Equation, enters: Var) -> Var:
    return next(a for a in last.invars if a is not enters)


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
_OPEN = {"scan", "checkpoint", "remat2"}
_SUMS = {"dot_general", "reduce_sum", "scatter-add"}


class _Region:
    """A list of equations, that of a loop or of a jaxpr inside it, and which of its values are divided."""

    def __init__(
        self, equations: Sequence[Equation], results: Sequence[Atom], known: Known, args: Sequence[Var] = ()
    ):
        self.equations, self.results, self.known, self.args = equations, results, known, args
        self.maker = {v: e for e in equations for v in e.outvars}
        self.uses = Counter(a for e in equations for a in e.invars if is_var(a))
        self.uses.update(filter(is_var, results))
        self.chosen: dict[Var, Groups] = {}
        self.contracted: dict[Equation, list[Split]] = {}
        self.divided: dict[Var, Var] = {}  # filled by `rewritten`
        self.inner: dict[Equation, _Region] = {}

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
          Undivided: if that is not possible; nothing is changed then.
        """
        found: list[tuple[_Region, Var, Groups]] = []
        groups = self._groups(var, sizes, found)
        for region, v, its in found:
            region.chosen[v] = its
        return groups

    def _groups(self, var: Atom, sizes: Sizes, found: list[tuple[_Region, Var, Groups]]) -> Groups:
        e = self.maker.get(var) if is_var(var) else None
        if e is None:
            raise Undivided
        if self.uses[var] != 1:
            raise Undivided("other work in the loop reads it too", var)
        if splits := _contracted(e, self.known, self.maker, sizes):
            self.contracted[e] = splits
            groups: Groups = tuple((axes, count) for axes, count, _ in splits)
        elif e.name in _LINEAR and (e.name not in _ROUNDING or _is_float(e)):
            groups = self._groups(e.invars[0], sizes, found)
        elif e.name == "mul":
            groups = self._groups(e.invars[self._factor(e, sizes)], sizes, found)
        elif e.name in _LINEAR_IN_ALL:
            several = {self._groups(a, sizes, found) for a in e.invars}
            if len(several) > 1:
                raise Undivided("its terms are sums over other axes")
            (groups,) = several
        elif e.name in _OPEN:
            inner, number = self._opened(e), e.outvars.index(var)
            if e.name == "scan" and number < _compat.scan_counts(e.eqn.params)[1]:
                raise Undivided("it is summed up in a scan")
            groups = inner._groups(inner.results[number], sizes, found)
        elif e.name in _SUMS:
            raise Undivided  # of what is not sharded, as far as is known
        else:
            raise Undivided(f"it goes through {e.name!r}, which is not taken apart")
        found.append((self, var, groups))
        return groups

    def _factor(self, e: Equation, sizes: Sizes) -> int:
        """Which factor of a product is the sum."""
        reasons: list[Undivided] = []
        for n, a in enumerate(e.invars):
            try:
                self._groups(a, sizes, [])
                return n
            except Undivided as reason:
                reasons.append(reason)
        raise reasons[0]

    def _opened(self, e: Equation) -> _Region:
        """The jaxpr in an equation."""
        if e not in self.inner:
            (jaxpr, *_) = _compat.subjaxprs(e.eqn)
            invars, outvars, eqns, _ = _compat.open_jaxpr(jaxpr)
            args = [jex.Var(v.aval) for v in invars]
            closed = _compat.close_jaxpr(invars, outvars, eqns)
            flat, results = inline(jex.jaxpr_as_fun(closed), *args, scope="")
            known = {v: dims for v, dims in zip(args, entering(e.eqn, self.known)) if any(dims)}
            follow((f.eqn for f in flat), known)
            self.inner[e] = _Region(flat, results, known, args)
        return self.inner[e]

    def rewritten(self) -> list[Equation]:
        """The equations, with what was planned divided."""
        out: list[Equation] = []
        for e in self.equations:
            if not any(v in self.chosen for v in e.outvars):
                out.append(e)
            elif e.name in _OPEN:
                out += self._rewritten_inside(e)
            elif e in self.contracted:
                flat, (self.divided[e.outvars[0]],) = inline(
                    _over_parts(e, self.contracted[e]), *filter(is_var, e.invars), scope=e.scope
                )
                out += flat
            elif e.name == "sharding_constraint":  # it is one on the whole sum
                self.divided[e.outvars[0]] = self.divided[e.invars[0]]
            else:
                operands = [self.divided.get(a, a) for a in e.invars if is_var(a)]
                axes = [0 if a in self.divided else None for a in e.invars if is_var(a)]
                fun = _alone(e)
                for _ in self.chosen[e.outvars[0]]:
                    fun = jax.vmap(fun, axes)
                flat, (self.divided[e.outvars[0]],) = inline(fun, *operands, scope=e.scope)
                out += flat
        return out

    def _rewritten_inside(self, e: Equation) -> list[Equation]:
        inner, params = self.inner[e], e.eqn.params
        equations = inner.rewritten()
        results: list[Any] = [inner.divided.get(v, v) if is_var(v) else v for v in inner.results]
        closed = _compat.close_jaxpr(inner.args, results, [f.eqn for f in equations])
        lead = {n: len(self.chosen[v]) for n, v in enumerate(e.outvars) if v in self.chosen}
        if e.name != "scan":
            outvars = list(e.outvars)
            for n in lead:
                outvars[n] = jex.Var(results[n].aval)
            self.divided.update((e.outvars[n], outvars[n]) for n in lead)
            jaxpr = closed if isinstance(params["jaxpr"], type(closed)) else closed.jaxpr
            return [Equation(e.eqn.replace(params=params | {"jaxpr": jaxpr}, outvars=outvars), e.scope)]
        num_consts, num_carry = _compat.scan_counts(params)
        compute = jex.jaxpr_as_fun(closed)

        def scan(*args: Any) -> list[Any]:
            consts, carry, xs = (
                args[:num_consts],
                args[num_consts:][:num_carry],
                args[num_consts + num_carry :],
            )

            def step(carry: Any, x: Any) -> tuple[Any, Any]:
                made = compute(*consts, *carry, *x)
                return tuple(made[:num_carry]), made[num_carry:]

            options = {name: params[name] for name in ("length", "reverse", "unroll")}
            carry, ys = jax.lax.scan(step, carry, xs, **options)
            # The parts come first, before the dimension of the scan.
            return [jnp.moveaxis(x, 0, lead.get(n, 0)) for n, x in enumerate((*carry, *ys))]

        flat, made = inline(
            lambda *xs: scan(*_filled(e.invars, xs)), *filter(is_var, e.invars), scope=e.scope
        )
        self.divided.update((e.outvars[n], made[n]) for n in lead)
        own = {made[n]: v for n, v in enumerate(e.outvars) if n not in lead}
        return [Equation(f.eqn.replace(outvars=[own.get(v, v) for v in f.outvars]), e.scope) for f in flat]


def _filled(atoms: Sequence[Atom], values: Sequence[Any]) -> list[Any]:
    """Values for all atoms, given those of the variables among them."""
    rest = iter(values)
    return [next(rest) if is_var(a) else a.val for a in atoms]


def _alone(e: Equation) -> Any:
    """An equation of one result as a function of its variables, each operand one of its own."""
    fresh = [jex.Var(a.aval) if is_var(a) else a for a in e.invars]
    out = jex.Var(e.outvars[0].aval)
    closed = _compat.close_jaxpr(
        [a for a in fresh if is_var(a)], [out], [e.eqn.replace(invars=fresh, outvars=[out])]
    )
    return lambda *xs: jex.jaxpr_as_fun(closed)(*xs)[0]


# For axes, the number of parts, and which dimension of which variable operand is divided.
Split = tuple[Axes, int, dict[int, int]]


def _contracted(e: Equation, known: Known, maker: Mapping[Var, Equation], sizes: Sizes) -> list[Split]:
    """The sharded dimensions that an equation sums over.

    Raises:
      Undivided: for one that the axis does not divide.
    """
    number = {n: k for k, n in enumerate(n for n, a in enumerate(e.invars) if is_var(a))}
    if e.name == "dot_general":
        (left, right), _ = e.eqn.params["dimension_numbers"]
        pairs = [{0: i, 1: j} for i, j in zip(left, right)]
    elif e.name == "reduce_sum":
        pairs = [{0: i} for i in e.eqn.params["axes"]]
    elif e.name == "scatter-add" and _is_zero(e.invars[0], maker):
        numbers = e.eqn.params["dimension_numbers"]
        rows = [i for i in range(e.invars[2].aval.ndim) if i not in numbers.update_window_dims]
        # Batching dimensions are not summed over: each row of the updates goes to a row of its own.
        pairs = [{1: n, 2: i} for n, i in enumerate(rows) if n not in numbers.scatter_indices_batching_dims]
    else:
        pairs = []
    found: list[Split] = []
    for pair in pairs:
        axes = next((d for n, i in pair.items() if (d := dims_of(e.invars[n], known)[i])), ())
        if any(axis in own for axis in axes for own in dims_of(e.outvars[0], known)):
            continue  # each device makes its own part of the result, and has no use for a part of the sum
        count = math.prod(sizes.get(axis, 1) for axis in axes)
        size = e.invars[min(pair)].aval.shape[pair[min(pair)]]
        if size % count:
            names = ", ".join(f"{axis}={sizes[axis]}" for axis in axes if sizes.get(axis, 1) > 1)
            raise Undivided(f"the {size} values that it sums up do not divide over {names}")
        if count > 1 and all(is_var(e.invars[n]) for n in pair):
            found.append((axes, count, {number[n]: i for n, i in pair.items()}))
    return sorted(found, key=lambda split: str(split[0]))


def _over_parts(e: Equation, splits: Sequence[Split]) -> Any:
    """An equation as a function whose result has one entry for each part of the dimensions it sums over."""

    def laid(x: Any, number: int) -> Any:
        """An operand with its divided dimensions as (part, rest), the parts in front."""
        mine = [(dims[number], count) for _, count, dims in splits if number in dims]
        at = dict(mine)
        shape: list[int] = []
        where: dict[int, int] = {}
        for i, size in enumerate(x.shape):
            where[i] = len(shape)
            shape += [at[i], size // at[i]] if i in at else [size]
        return jnp.moveaxis(x.reshape(shape), [where[i] for i, _ in mine], range(len(mine)))

    def parted(*xs: Any) -> Any:
        fun = _alone(e)
        for _, _, dims in reversed(splits):
            fun = jax.vmap(fun, [0 if n in dims else None for n in range(len(xs))])
        return fun(*(laid(x, n) for n, x in enumerate(xs)))

    return parted


def _is_zero(atom: Atom, maker: Mapping[Var, Equation]) -> bool:
    """Whether a value is all zeros, as seen from where it is made."""
    if not is_var(atom):
        return atom.val == 0
    e = maker.get(atom)
    return e is not None and e.name in ("broadcast_in_dim", "copy") and _is_zero(e.invars[0], maker)


def _is_float(e: Equation) -> bool:
    return all(jnp.issubdtype(a.aval.dtype, jnp.floating) for a in (e.invars[0], e.outvars[0]))
