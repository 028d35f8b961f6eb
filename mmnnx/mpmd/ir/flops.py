"""What a jaxpr tells before it is compiled: its floating-point operations, and its largest arrays."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import PRODUCTS, nbytes

Flops = Counter[str]  # by the dtype of the operands
Product = tuple[str, int, int]  # the dtype of its operands, its operations, the bytes of operands and results

# Only values tell how many tokens come to an expert: names of scopes tell how many are expected.
_ROWS = re.compile(r"\bone_in_(\d+)_rows\b")
_ITERATIONS = re.compile(r"\babout_(\d+)_iterations\b")


def expect_rows(one_in: int) -> AbstractContextManager[Any]:
    """What is computed inside counts as if one in so many of its rows were computed."""
    return nullcontext() if one_in == 1 else jax.named_scope(f"one_in_{one_in}_rows")


def expect_iterations(count: int) -> AbstractContextManager[Any]:
    """A `while` inside, whose iterations depend on values, counts as if there were so many."""
    return jax.named_scope(f"about_{count}_iterations")


def expected_iterations(names: str) -> int | None:
    """How many `expect_iterations` has said around a loop with such a name stack; None if nothing."""
    said = _ITERATIONS.search(names)
    return int(said[1]) if said else None


def count_flops(jaxpr: Any) -> Flops:
    """Operations in matrix products and convolutions over all devices, two for a product and its sum.

    Bodies of scans count once for each iteration, of a `while` once (or as `expect_iterations` says), of a
    `cond` those of the largest branch. A Pallas kernel counts as its author says (`cost_estimate`). One whose
    author says nothing counts once for each step of its grid, as if no block was left out; sizes of the grid
    that depend on values count as 1. Experts count as if each had as many tokens. Elementwise operations are
    left out: they are bound by memory.

    Args:
      jaxpr: a ClosedJaxpr or Jaxpr.

    Returns:
      The operations, by the name of the dtype of the operands.

    Example:
      >>> count_flops(jax.make_jaxpr(jnp.dot)(jnp.ones((8, 4)), jnp.ones((4, 2))))
      Counter({'float32': 128})
    """
    return flops_of(_compat.open_jaxpr(jaxpr)[2])


def flops_of(eqns: Iterable[Any]) -> Flops:
    """`count_flops` of some equations of a jaxpr."""
    total: Flops = Counter()
    for (dtype, flops, _), n in _products(eqns).items():
        total[dtype] += n * flops
    return +total


def count_kernels(jaxpr: Any) -> Counter[Product]:
    """Pallas kernels of one device, as `count_products` counts them."""
    return _products(_compat.open_jaxpr(jaxpr)[2], counted=("pallas_call",), devices=1)


def count_products(jaxpr: Any) -> Counter[Product]:
    """Matrix products, convolutions and kernels one by one, counted as `count_flops` does.

    Example:
      >>> count_products(jax.make_jaxpr(jnp.dot)(jnp.ones((8, 4)), jnp.ones((4, 2))))
      Counter({('float32', 128, 224): 1})
    """
    return _products(_compat.open_jaxpr(jaxpr)[2])


def _products(
    eqns: Iterable[Any], counted: Collection[str] = (*PRODUCTS, "pallas_call"), devices: int | None = None
) -> Counter[Product]:
    """The equations whose primitive is counted, and those inside of others; over all devices, or of one."""
    total: Counter[Product] = Counter()
    for eqn in eqns:
        name = eqn.primitive.name
        done: Counter[Product] = Counter()
        if name in counted:
            done = _product(eqn)
        elif name == "cond":
            branches = [_products(_compat.open_jaxpr(b)[2], counted, devices) for b in eqn.params["branches"]]
            done = max(branches, key=lambda branch: sum(flops * n for (_, flops, _), n in branch.items()))
        else:
            times = eqn.params["length"] if name == "scan" else 1
            if name == "while":
                times = expected_iterations(str(eqn.source_info.name_stack)) or 1
            if name == "shard_map":  # its body is what one device does, along these axes
                sizes = (eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
                times = devices or math.prod(sizes)
            for inner in _bodies(eqn):
                once = _products(_compat.open_jaxpr(inner)[2], counted, devices)
                done.update({product: times * n for product, n in once.items()})
        said = _ROWS.search(str(eqn.source_info.name_stack))
        one_in = int(said[1]) if said else 1
        for (dtype, flops, moved), n in done.items():
            total[dtype, flops // one_in, moved // one_in] += n
    return total


def _product(eqn: Any) -> Counter[Product]:
    """An equation, once for each dtype that it multiplies in; what it moves counts with the largest."""
    done = _flops(eqn) or Counter({eqn.outvars[0].aval.dtype.name: 0})  # a kernel may multiply nothing
    (largest, flops), *others = done.most_common()
    return Counter([(largest, flops, _moved(eqn)), *((dtype, n, 0) for dtype, n in others)])


def largest_results(jaxpr: Any, count: int = 8) -> list[tuple[int, str]]:
    """(bytes, what it is) of the largest arrays that equations make, over all devices; each kind once.

    Example:
      >>> largest_results(jax.make_jaxpr(lambda x: x @ x.T)(jnp.ones((64, 2))))[0]
      (16384, 'float32[64,64] dot_general')
    """
    found: dict[tuple[int, str], None] = {}

    def visit(jaxpr: Any) -> None:
        for eqn in _compat.open_jaxpr(jaxpr)[2]:
            inner = _bodies(eqn)
            for one in inner:
                visit(one)
            for aval in () if inner else [v.aval for v in eqn.outvars]:
                sizes = ",".join(map(str, aval.shape))
                name = "/".join(x for x in (str(eqn.source_info.name_stack), eqn.primitive.name) if x)
                nbytes = math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)
                found[nbytes, f"{aval.dtype}[{sizes}] {name}"] = None

    visit(jaxpr)
    return sorted(found, reverse=True)[:count]


def _bodies(eqn: Any) -> list[Any]:
    if eqn.primitive.name == "logical_shard_map":  # over no mesh yet: all of it
        types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
        return [jax.make_jaxpr(eqn.params["fun"])(*types)]
    return _compat.subjaxprs(eqn)


def _flops(eqn: Any) -> Flops:
    if eqn.primitive.name == "pallas_call":
        return _kernel(eqn)
    of = {"dot_general": _dot, "ragged_dot_general": _ragged_dot, "conv_general_dilated": _convolution}
    return of[eqn.primitive.name](eqn)


def _moved(eqn: Any) -> int:
    said = eqn.params.get("cost_estimate")
    return said.bytes_accessed if said else sum(nbytes(v) for v in (*eqn.invars, *eqn.outvars))


def _kernel(eqn: Any) -> Flops:
    """A Pallas kernel: what its author says, or what each step of its grid does."""
    if said := eqn.params["cost_estimate"]:
        return Counter({eqn.outvars[0].aval.dtype.name: said.flops})
    (body,) = _bodies(eqn)
    steps = math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    return Counter({dtype: steps * n for dtype, n in count_flops(body).items()})


def _dot(eqn: Any) -> Flops:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval
    each = math.prod(left.shape[d] for d in contracted)
    return Counter({left.dtype.name: 2 * each * math.prod(eqn.outvars[0].aval.shape)})


def _ragged_dot(eqn: Any) -> Flops:
    ragged = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = ragged.dot_dimension_numbers
    left, right = (v.aval for v in eqn.invars[:2])
    shared = {*contracted, *batch, *ragged.rhs_group_dimensions}
    columns = math.prod(size for d, size in enumerate(right.shape) if d not in shared)
    return Counter({left.dtype.name: 2 * left.size * columns})


def _convolution(eqn: Any) -> Flops:
    kernel, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
    out_features = kernel.shape[numbers.rhs_spec[0]]
    each = math.prod(kernel.shape) // out_features
    dilation = math.prod(eqn.params["lhs_dilation"])  # zeros between inputs cost nothing
    return Counter({kernel.dtype.name: 2 * each * math.prod(eqn.outvars[0].aval.shape) // dilation})
