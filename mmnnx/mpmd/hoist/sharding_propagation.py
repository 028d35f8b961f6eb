"""Over which mesh axes the dimensions of values are sharded, as far as a jaxpr tells.

Constraints and the shardings of arguments say it for some values; it is followed from operands to results,
much as XLA does when it partitions a program. What is found decides what is worth doing, never what is
right: a dimension about which nothing is found counts as whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from mmnnx import _compat
from mmnnx.mpmd.divide.links import links
from mmnnx.mpmd.ir.equations import CALLS, CUSTOM_GRADIENTS, REMAT, SCATTERS, Atom, Var, is_var

Axes = tuple[Any, ...]  # mesh axes, outermost first
Dims = tuple[Axes, ...]  # for each dimension of a value, the axes that it is sharded over
Known = dict[Var, Dims]


def of_spec(spec: PartitionSpec, ndim: int) -> list[Axes | None]:
    """The axes of each dimension, None where a PartitionSpec leaves it open."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    free = PartitionSpec.UNCONSTRAINED
    return [
        None if e is free else () if e is None else tuple(e) if isinstance(e, tuple) else (e,)
        for e in entries
    ]


def follow(eqns: Iterable[Any], known: Known, seen: Callable[[Any, Known], None] | None = None) -> None:
    """Adds to `known` what can be told about the results of equations, those inside other equations too.

    Args:
      eqns: equations in order.
      known: what is known of variables so far.
      seen: called with each equation and what is known before it.
    """
    for eqn in eqns:
        if seen is not None:
            seen(eqn, known)
        found = _RULES.get(eqn.primitive.name, _alike)(eqn, known, seen)
        for v, dims in zip(eqn.outvars, found):
            if any(dims):
                known[v] = dims


def dims_of(atom: Atom, known: Known) -> Dims:
    """What is known of a value; nothing of a literal."""
    nothing: Dims = ((),) * len(atom.aval.shape)
    return known.get(atom, nothing) if is_var(atom) else nothing


def _alike(eqn: Any, known: Known, seen: Any) -> list[Dims]:
    """Results take over the dimensions of operands that have as many, where they are of one size."""
    out = []
    for v in eqn.outvars:
        shape = v.aval.shape
        dims: list[Axes] = [()] * len(shape)
        for a in eqn.invars:
            if len(a.aval.shape) == len(shape):
                for n, axes in enumerate(dims_of(a, known)):
                    if axes and not dims[n] and a.aval.shape[n] == shape[n] and not _used(axes, dims):
                        dims[n] = axes
        out.append(tuple(dims))
    return out


def _used(axes: Axes, dims: Sequence[Axes]) -> bool:
    return any(axis in other for axis in axes for other in dims)


def _constraint(eqn: Any, known: Known, seen: Any) -> list[Dims]:
    before = dims_of(eqn.invars[0], known)
    sharding = eqn.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return [before]
    spec = of_spec(sharding.spec, len(before))
    return [tuple(old if new is None else new for old, new in zip(before, spec))]


def _linked(eqn: Any, known: Known, seen: Any) -> list[Dims]:
    """Each dimension of a result has the axes of the dimension of an operand that it is one with."""
    given = [dims_of(a, known) for a in eqn.invars]
    out: list[list[Axes]] = [[()] * len(v.aval.shape) for v in eqn.outvars]
    for link in links(eqn):
        axes = next((given[n][d] for n, d in enumerate(link.operands) if d is not None and given[n][d]), ())
        for dims, d in zip(out, link.results):
            if d is not None and not _used(axes, dims):
                dims[d] = axes
    return [tuple(dims) for dims in out]


def _gather(eqn: Any, known: Known, seen: Any) -> list[Dims]:
    """A lookup: what the indices are sharded over, in front of and between the dimensions of the slices."""
    offset = eqn.params["dimension_numbers"].offset_dims
    rows = iter(dims_of(eqn.invars[1], known)[:-1])
    return [tuple(() if n in offset else next(rows) for n in range(len(eqn.outvars[0].aval.shape)))]


def _scatter(eqn: Any, known: Known, seen: Any) -> list[Dims]:
    return [dims_of(eqn.invars[0], known)]


def _inside(jaxpr: Any, given: Sequence[Dims], seen: Any) -> list[Dims]:
    """What is known of the results of a jaxpr, from what is known of its arguments."""
    invars, outvars, eqns, _ = _compat.open_jaxpr(jaxpr)
    known = {v: dims for v, dims in zip(invars, given) if any(dims)}
    follow(eqns, known, seen)
    return [dims_of(v, known) for v in outvars]


def entering(eqn: Any, known: Known) -> list[Dims]:
    """What is known of the arguments of the jaxpr in a call or a scan."""
    given = [dims_of(a, known) for a in eqn.invars]
    if eqn.primitive.name != "scan":
        return given
    num_consts, num_carry = _compat.scan_counts(eqn.params)
    fixed, carry = given[:num_consts], given[num_consts:][:num_carry]
    rows = [dims[1:] for dims in given[num_consts + num_carry :]]
    # A carry that only becomes sharded inside is so from the second iteration on.
    found = _inside(eqn.params["jaxpr"], [*fixed, *carry, *rows], None)
    return [*fixed, *(a if any(a) else b for a, b in zip(carry, found)), *rows]


def _call(eqn: Any, known: Known, seen: Any) -> list[Dims]:
    (jaxpr, *_) = _compat.subjaxprs(eqn)
    return _inside(jaxpr, entering(eqn, known), seen)


def _scan(eqn: Any, known: Known, seen: Any) -> list[Dims]:
    found, (_, num_carry) = _call(eqn, known, seen), _compat.scan_counts(eqn.params)
    return [*found[:num_carry], *(((), *dims) for dims in found[num_carry:])]


def _shard_map(eqn: Any, known: Known, seen: Any) -> list[Dims]:
    specs = zip(eqn.params["out_specs"], eqn.outvars)
    return [tuple(axes or () for axes in of_spec(spec, v.aval.ndim)) for spec, v in specs]


_RULES: dict[str, Callable[[Any, Known, Any], list[Dims]]] = {
    "sharding_constraint": _constraint,
    "shard_map": _shard_map,
    "gather": _gather,
    "scan": _scan,
    **dict.fromkeys(CALLS | CUSTOM_GRADIENTS | {REMAT}, _call),
    **dict.fromkeys(SCATTERS, _scatter),
    **dict.fromkeys(
        [f"reduce_{kind}" for kind in ("sum", "max", "min", "prod", "and", "or", "xor")]
        + ["argmax", "argmin", "broadcast_in_dim", "dot_general", "reshape", "squeeze", "transpose"],
        _linked,
    ),
}
