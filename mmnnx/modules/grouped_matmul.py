"""Products of groups of rows, each with a matrix of its own; the work does not grow with the groups."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mmnnx.mpmd.ir.flops import expect_iterations, expect_rows

# Imported where it is used: it brings Pallas along. The package has a function of that name, too.
_KERNELS = "jax.experimental.pallas.ops.tpu.megablox.gmm"
_TILE = 1024  # features; with 512 rows, three tiles of bfloat16 take 5 of the 16 MiB of a core's memory


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(
    x: jax.Array, w: jax.Array, sizes: jax.Array, one_in: int = 1, transposed: bool = False
) -> jax.Array:
    """`jax.lax.ragged_dot` that does what the rows need alone, on every platform and in the backward too.

    XLA has no such program everywhere: on CPU `ragged_dot` multiplies every row with every matrix, and with
    jax 0.10 its gradient does so on TPUs. Here TPUs run the Pallas kernels of MegaBlox (arXiv:2211.15841) in
    JAX, and other devices go through the rows block by block.

    Args:
      x: [rows, in], sorted by group.
      w: [groups, in, out], in the dtype of `x`.
      sizes: int32 [groups], how many of the rows each group has, in order; all of them or fewer.
      one_in: one in so many rows is expected to be in a group. Any may be: it only decides how large blocks
        are, and what `mm.plan` counts.
      transposed: whether the matrices are [groups, out, in]; none is transposed in memory.

    Returns:
      [rows, out], in the dtype of `x`; summed in float32, or float64 if `x` is. Rows in no group get zeros.

    Example:
      >>> grouped_matmul(jnp.ones((5, 2)), jnp.ones((3, 2, 4)), jnp.array([2, 0, 1])).sum(1)
      Array([8., 8., 8., 0., 0.], dtype=float32)
    """
    by_kernel = partial(product_by_kernel, transposed=transposed)
    by_blocks = partial(product_by_blocks, transposed=transposed)
    made = _by_platform(by_kernel, by_blocks, one_in, x, w, sizes)
    return jnp.where(jnp.arange(x.shape[0])[:, None] < sizes.sum(), made, 0)


def _forward(
    x: jax.Array, w: jax.Array, sizes: jax.Array, one_in: int, transposed: bool
) -> tuple[jax.Array, Any]:
    return grouped_matmul(x, w, sizes, one_in, transposed), (x, w, sizes)


def _backward(one_in: int, transposed: bool, saved: Any, ct: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = saved
    of_w = (ct, x) if transposed else (x, ct)
    of_x = grouped_matmul(ct, w, sizes, one_in, not transposed)
    return of_x, grouped_outer_product(*of_w, sizes, one_in), None


grouped_matmul.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_outer_product(x: jax.Array, y: jax.Array, sizes: jax.Array, one_in: int = 1) -> jax.Array:
    """For each group the product of its rows of x, transposed, with those of y: [groups, in, out]."""
    return _by_platform(outer_product_by_kernel, outer_product_by_blocks, one_in, x, y, sizes)


def _outer_forward(x: jax.Array, y: jax.Array, sizes: jax.Array, one_in: int) -> tuple[jax.Array, Any]:
    return grouped_outer_product(x, y, sizes, one_in), (x, y, sizes)


def _outer_backward(one_in: int, saved: Any, ct: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, y, sizes = saved
    of_x = grouped_matmul(y, ct, sizes, one_in, transposed=True)
    return of_x, grouped_matmul(x, ct, sizes, one_in), None


grouped_outer_product.defvjp(_outer_forward, _outer_backward)


def _by_platform(
    by_kernel: Any, by_blocks: Any, one_in: int, x: jax.Array, *operands: jax.Array
) -> jax.Array:
    by_kernel, by_blocks = (partial(by, one_in=one_in) for by in (by_kernel, by_blocks))
    if x.dtype not in (jnp.bfloat16, jnp.float32):  # the kernels know no others
        return by_blocks(x, *operands)
    return lax.platform_dependent(x, *operands, tpu=by_kernel, default=by_blocks)


# --------------------------------------------------------------------------------------------- block by block


def product_by_blocks(
    x: jax.Array, w: jax.Array, sizes: jax.Array, one_in: int = 1, transposed: bool = False
) -> jax.Array:
    """One product for each block of rows of a group. Rows in no group get anything."""
    block = _block(x.shape[0], one_in * w.shape[0])
    rows = jnp.pad(x, ((0, block), (0, 0)))
    count, group_of, start_of, _ = _blocks(sizes, block)
    product = "ri,oi->ro" if transposed else "ri,io->ro"

    def step(n: Any, y: jax.Array) -> jax.Array:
        own = lax.dynamic_slice_in_dim(rows, start_of(n), block)
        made = jnp.einsum(product, own, w[group_of(n)], preferred_element_type=_sum_dtype(x))
        # Beyond the end of its group a block writes what the next one overwrites.
        return lax.dynamic_update_slice_in_dim(y, made.astype(y.dtype), start_of(n), 0)

    y = jnp.zeros((rows.shape[0], w.shape[1 if transposed else 2]), x.dtype)
    with expect_iterations(_expected(x.shape[0], w.shape[0], block, one_in)):
        return lax.fori_loop(0, count, step, y)[: x.shape[0]]


def outer_product_by_blocks(x: jax.Array, y: jax.Array, sizes: jax.Array, one_in: int = 1) -> jax.Array:
    """One product for each block of rows of a group, added to those of its group."""
    block = _block(x.shape[0], one_in * sizes.shape[0])
    left, right = (jnp.pad(rows, ((0, block), (0, 0))) for rows in (x, y))
    count, group_of, start_of, end_of = _blocks(sizes, block)

    def step(n: Any, sums: jax.Array) -> jax.Array:
        a, b = (lax.dynamic_slice_in_dim(rows, start_of(n), block) for rows in (left, right))
        own = start_of(n) + jnp.arange(block)[:, None] < end_of(n)
        made = jnp.dot(jnp.where(own, a, 0).T, b, preferred_element_type=_sum_dtype(x))
        return sums.at[group_of(n)].add(made)

    sums = jnp.zeros((sizes.shape[0], x.shape[1], y.shape[1]), _sum_dtype(x))
    with expect_iterations(_expected(x.shape[0], sizes.shape[0], block, one_in)):
        return lax.fori_loop(0, count, step, sums).astype(x.dtype)


def _sum_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _block(rows: int, groups: int) -> int:
    """Rows of a block: about those of an even group, here or elsewhere, so that few are partly empty."""
    return min(512, max(8, 1 << max(1, rows // groups).bit_length() - 1))


def _expected(rows: int, groups: int, block: int, one_in: int) -> int:
    """How many blocks there are, where one in so many rows is in a group and groups are alike."""
    return groups * -(-rows // (one_in * groups * block))


def _blocks(sizes: jax.Array, block: int) -> tuple[Any, Any, Any, Any]:
    """How many blocks there are; and for the number of one its group, its first row, and its group's end."""
    ends, blocks = jnp.cumsum(sizes), -(-sizes // block)
    last = jnp.cumsum(blocks)
    group_of = lambda n: jnp.sum(last <= n)  # those before it have no more blocks
    start_of = lambda n: ends[group_of(n)] - sizes[group_of(n)] + (n - (last - blocks)[group_of(n)]) * block
    return last[-1], group_of, start_of, lambda n: ends[group_of(n)]


# ------------------------------------------------------------------------------------------------- by kernels


def product_by_kernel(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    one_in: int = 1,
    transposed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """The same by a kernel for TPUs. Rows in no group get anything."""
    kernels = importlib.import_module(_KERNELS)
    rows, tile = _padded(x)
    features, out = (min(_TILE, n) for n in (w.shape[1:][::-1] if transposed else w.shape[1:]))
    options: dict[str, Any] = dict(transpose_rhs=transposed, interpret=interpret)
    with expect_rows(one_in):
        return kernels.gmm(rows, w, sizes, x.dtype, (tile, features, out), **options)[: x.shape[0]]


def outer_product_by_kernel(
    x: jax.Array, y: jax.Array, sizes: jax.Array, one_in: int = 1, interpret: bool = False
) -> jax.Array:
    """The same by a kernel for TPUs."""
    kernels = importlib.import_module(_KERNELS)
    (left, tile), (right, _) = _padded(x), _padded(y)
    tiling = (tile, min(_TILE, x.shape[1]), min(_TILE, y.shape[1]))
    with expect_rows(one_in):
        return kernels.tgmm(left.T, right, sizes, x.dtype, tiling, interpret=interpret)


def _padded(x: jax.Array) -> tuple[jax.Array, int]:
    """Rows of zeros added up to a multiple of the kernel's tile, and the tile."""
    tile = min(512, -(-x.shape[0] // 128) * 128)
    return jnp.pad(x, ((0, -x.shape[0] % tile), (0, 0))), tile
