"""Which dimensions of operands and results of an equation are one and the same.

A link says that an equation may be computed for a part of a dimension. Of `dot_general` each batch dimension
is one, of both operands and the result, and each contracted one, of the operands: there the results of all
parts are summed. Equations that nothing is known of have no links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmnnx.mpmd.ir.equations import SCATTERS

Part = Callable[[int], int]  # from the size of a whole dimension to that of the part


@dataclass(frozen=True)
class Link:
    """A dimension that an equation may be computed for a part of.

    Attributes:
      operands: for each operand which dimension that is, None for one that every part reads whole.
      results: the same for each result.
      combine: what makes a result without that dimension of those of two parts ("add", "max", ...).
      sizes: the parameter that has the sizes of the result, and which of its entries changes.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    combine: str | None = None
    sizes: tuple[str, int] | None = None

    def params(self, params: dict[str, Any], part: Part) -> dict[str, Any]:
        """The parameters of an equation for a part."""
        if self.sizes is None:
            return params
        name, at = self.sizes
        return params | {name: tuple(part(int(n)) if d == at else n for d, n in enumerate(params[name]))}


def links(eqn: Any) -> list[Link]:
    """All links of an equation."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn) if rule is not None else []


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _elementwise(eqn: Any) -> list[Link]:
    """Operands have the dimensions of the result, or size 1 in their place, or none at all."""
    shape = _shape(eqn.outvars[0])
    if any(len(_shape(a)) not in (0, len(shape)) for a in eqn.invars):
        return []

    def operand(a: Any, d: int) -> int | None:
        return d if len(_shape(a)) == len(shape) and _shape(a)[d] == shape[d] else None

    return [
        Link(tuple(operand(a, d) for a in eqn.invars), (d,) * len(eqn.outvars)) for d in range(len(shape))
    ]


def _leading(eqn: Any) -> list[Link]:
    """The dimensions that all have: each key of an array of keys by itself, each number as its bytes."""
    count = min(len(_shape(a)) for a in (*eqn.invars, *eqn.outvars))
    return [Link((d,) * len(eqn.invars), (d,) * len(eqn.outvars)) for d in range(count)]


def _of_matrices(eqn: Any) -> list[Link]:
    """Decompositions of matrices, in their last two dimensions."""
    count = min(len(_shape(a)) for a in eqn.invars) - 2
    return [Link((d,) * len(eqn.invars), (d,) * len(eqn.outvars)) for d in range(count)]


def _fft(eqn: Any) -> list[Link]:
    count = len(_shape(eqn.invars[0])) - len(eqn.params["fft_lengths"])
    return [Link((d,), (d,)) for d in range(count)]


def _broadcast(eqn: Any) -> list[Link]:
    shape, (a, *_) = eqn.params["shape"], eqn.invars
    where = {int(d): i for i, d in enumerate(eqn.params["broadcast_dimensions"]) if _shape(a)[i] == shape[d]}
    return [Link((where.get(d),), (d,), sizes=("shape", d)) for d in range(len(shape))]


def _iota(eqn: Any) -> list[Link]:
    shape, along = eqn.params["shape"], eqn.params["dimension"]
    return [Link((), (d,), sizes=("shape", d)) for d in range(len(shape)) if d != along]


def _reshape(eqn: Any) -> list[Link]:
    """A dimension that stays, or the first of several that one becomes or that become one."""
    if len(eqn.invars) > 1 or eqn.params["dimensions"] is not None:
        return []
    old, new = _shape(eqn.invars[0]), eqn.params["new_sizes"]
    found = []
    for i, n in enumerate(old):
        for j, m in enumerate(new):
            same = math.prod(old[:i]) == math.prod(new[:j])
            if n > 1 and m > 1 and same and (n % m == 0 or m % n == 0):
                found.append(Link((i,), (j,), sizes=("new_sizes", j)))
    return found


def _transpose(eqn: Any) -> list[Link]:
    return [Link((int(i),), (j,)) for j, i in enumerate(eqn.params["permutation"])]


def _without(ndim: int, gone: Sequence[int]) -> dict[int, int]:
    """Where dimensions are once some are gone."""
    kept = [d for d in range(ndim) if d not in gone]
    return {d: j for j, d in enumerate(kept)}


def _squeeze(eqn: Any) -> list[Link]:
    (a,) = eqn.invars
    return [Link((i,), (j,)) for i, j in _without(len(_shape(a)), eqn.params["dimensions"]).items()]


_COMBINE = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}


def _reduction(eqn: Any) -> list[Link]:
    gone, combine = eqn.params["axes"], _COMBINE.get(eqn.primitive.name)
    count, results = len(eqn.invars), len(eqn.outvars)
    kept = _without(len(_shape(eqn.invars[0])), gone)
    found = [Link((i,) * count, (j,) * results) for i, j in kept.items()]
    return found + [Link((int(i),), (None,), combine) for i in gone if combine]


def _along(key: str) -> Callable[[Any], list[Link]]:
    """All dimensions but the one along which the equation works; of that size or whole in all operands."""

    def rule(eqn: Any) -> list[Link]:
        along, shape = eqn.params[key], _shape(eqn.outvars[0])
        return [
            Link((d,) * len(eqn.invars), (d,) * len(eqn.outvars)) for d in range(len(shape)) if d != along
        ]

    return rule


def _reverse(eqn: Any) -> list[Link]:
    ndim, reversed_ = len(_shape(eqn.invars[0])), eqn.params["dimensions"]
    return [Link((d,), (d,)) for d in range(ndim) if d not in reversed_]


def _stack(eqn: Any) -> list[Link]:
    at, ndim = eqn.params["axis"], len(_shape(eqn.invars[0]))
    return [Link((d,) * len(eqn.invars), (d + (d >= at),)) for d in range(ndim)]


def _top_k(eqn: Any) -> list[Link]:
    ndim = len(_shape(eqn.invars[0]))
    along = eqn.params.get("axis", ndim - 1) % ndim
    return [Link((d,), (d,) * len(eqn.outvars)) for d in range(ndim) if d != along]


def _pad(eqn: Any) -> list[Link]:
    config = eqn.params["padding_config"]
    return [Link((d, None), (d,)) for d, edges in enumerate(config) if not any(edges)]


def _slice(eqn: Any) -> list[Link]:
    (a,), (v,) = eqn.invars, eqn.outvars
    whole = [d for d, (n, m) in enumerate(zip(_shape(a), _shape(v))) if n == m]
    return [Link((d,), (d,), sizes=("limit_indices", d)) for d in whole]


def _dynamic_slice(eqn: Any) -> list[Link]:
    a, *indices = eqn.invars
    whole = [d for d, (n, m) in enumerate(zip(_shape(a), eqn.params["slice_sizes"])) if n == m]
    return [Link((d, *(None for _ in indices)), (d,), sizes=("slice_sizes", d)) for d in whole]


def _dynamic_update_slice(eqn: Any) -> list[Link]:
    a, update, *indices = eqn.invars
    whole = [d for d, (n, m) in enumerate(zip(_shape(a), _shape(update))) if n == m]
    return [Link((d, d, *(None for _ in indices)), (d,)) for d in whole]


def _gather(eqn: Any) -> list[Link]:
    a, indices = eqn.invars
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    window = [d for d in range(len(_shape(a))) if d not in _no_window(numbers, "collapsed_slice_dims")]
    rows = [d for d in range(len(_shape(eqn.outvars[0]))) if d not in numbers.offset_dims]
    found = [
        Link((d, None), (numbers.offset_dims[k],), sizes=("slice_sizes", d))
        for k, d in enumerate(window)
        if d not in numbers.start_index_map and sizes[d] == _shape(a)[d]
    ]
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims))
    return found + [Link((batching.get(i), i), (rows[i],)) for i in range(len(_shape(indices)) - 1)]


def _scatter(eqn: Any) -> list[Link]:
    a, _, updates = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    window = [d for d in range(len(_shape(a))) if d not in _no_window(numbers, "inserted_window_dims")]
    rows = [d for d in range(len(_shape(updates))) if d not in numbers.update_window_dims]
    found = [
        Link((d, None, u), (d,))
        for d, u in zip(window, numbers.update_window_dims)
        if d not in numbers.scatter_dims_to_operand_dims and _shape(updates)[u] == _shape(a)[d]
    ]
    batching = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    return found + [Link((d, i, rows[i]), (d,)) for d, i in batching]


def _no_window(numbers: Any, key: str) -> set[int]:
    return {*getattr(numbers, key), *numbers.operand_batching_dims}


def _dot(eqn: Any) -> list[Link]:
    contract, batch = eqn.params["dimension_numbers"]
    found = [Link((int(i), int(j)), (n,)) for n, (i, j) in enumerate(zip(*batch))]
    at = len(batch[0])
    for side, a in enumerate(eqn.invars):
        for d in range(len(_shape(a))):
            if d not in contract[side] and d not in batch[side]:
                found.append(Link((d, None) if side == 0 else (None, d), (at,)))
                at += 1
    return found + [Link((int(i), int(j)), (None,), "add") for i, j in zip(*contract)]


_NAMES_OF_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt
    ceil clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv
    erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p
    logistic lt lt_to max min mul name ne neg nextafter not or polygamma population_count pow random_fold_in
    random_gamma_grad real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    threefry2x32 xor zeta
"""

_RULES: dict[str, Callable[[Any], list[Link]]] = {
    **dict.fromkeys(_NAMES_OF_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(("random_bits", "random_split", "random_wrap", "random_unwrap", "random_seed"), _leading),
    "bitcast_convert_type": _leading,
    **dict.fromkeys(
        ("cholesky", "eigh", "householder_product", "lu", "qr", "svd", "triangular_solve"), _of_matrices
    ),
    **dict.fromkeys((*_COMBINE, "argmax", "argmin"), _reduction),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split"), _along("axis")),
    **dict.fromkeys(("concatenate", "sort"), _along("dimension")),
    **dict.fromkeys(SCATTERS, _scatter),
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "fft": _fft,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "squeeze": _squeeze,
    "stack": _stack,
    "top_k": _top_k,
    "transpose": _transpose,
}
