"""Grouped products against a loop over rows, by blocks and by the kernels for TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

import mmnnx as mm
from mmnnx.modules import grouped_matmul as module
from mmnnx.modules.grouped_matmul import grouped_matmul
from tests.slow import all_but, examples, few


def operands(sizes, spare: int, width: int, out: int, dtype=jnp.float32):
    """Rows, of which `spare` are in no group, matrices, and the cotangent of the product."""
    keys = jax.random.split(jax.random.key(sum(sizes) + width), 3)
    rows = sum(sizes) + spare
    shapes = (rows, width), (len(sizes), width, out), (rows, out)
    x, w, ct = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes))
    return x, w, jnp.array(sizes, jnp.int32), ct


def by_rows(x, w, sizes, ct):
    """The product and the gradients of both operands, one row at a time, in float64."""
    x, w, ct = (np.asarray(a, np.float64) for a in (x, w, ct))
    y, dx, dw = np.zeros(ct.shape), np.zeros(x.shape), np.zeros(w.shape)
    for row, group in enumerate(np.repeat(np.arange(len(w)), np.asarray(sizes))):
        y[row] = x[row] @ w[group]
        dx[row] = ct[row] @ w[group].T
        dw[group] += np.outer(x[row], ct[row])
    return y, dx, dw


def assert_close(got, expected, tolerance=1e-5):
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=tolerance * max(1, np.abs(b).max()))


def computed(x, w, sizes, ct):
    y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
    return (y, *back(ct))


@examples(25)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 9))
def test_it_is_the_loop_over_rows(sizes, spare):
    given = operands(sizes, spare, 3, 5)
    assert_close(jax.jit(computed)(*given), by_rows(*given))


def test_second_derivatives_are_finite_differences():
    x, w, sizes, _ = operands([2, 0, 3], 1, 3, 2)
    check_grads(jax.jit(lambda x, w: grouped_matmul(x, w, sizes)), (x, w), order=2, modes=["rev"], rtol=1e-2)


def test_no_matrix_is_transposed_in_memory():
    x, w, sizes, ct = operands([2, 0, 3], 1, 3, 2)
    assert "permutation=(0, 2, 1)" not in str(jax.make_jaxpr(computed)(x, w, sizes, ct))


BLOCKS = [([700], 0), ([0, 0, 0], 4), ([1, 2, 600, 0], 50), ([0, 0, 1, 0], 0)]


@pytest.mark.parametrize("sizes, spare", all_but(BLOCKS[1:2], BLOCKS))
def test_many_blocks_none_and_one_group(sizes, spare):
    given = operands(sizes, spare, 4, 2)
    assert_close(jax.jit(computed)(*given), by_rows(*given))


@pytest.mark.slow
def test_sums_are_taken_in_float32():
    given = operands([300, 212], 0, 512, 8, jnp.bfloat16)
    got = jax.jit(computed)(*given)
    assert {a.dtype for a in got} == {jnp.dtype("bfloat16")}
    assert_close(got, by_rows(*given), 2**-8)


@few(1)
@pytest.mark.parametrize("sizes, spare, width, out", [([100, 0, 60, 30], 66, 64, 48), ([3, 700], 0, 130, 8)])
def test_the_kernels_for_tpus_are_the_loop_too(sizes, spare, width, out):
    x, w, sizes, ct = operands(sizes, spare, width, out)
    y, dx, dw = by_rows(x, w, sizes, ct)
    used = int(sizes.sum())  # they leave rows in no group as they are
    product, back, outer = jax.jit(
        lambda x, w, sizes, ct: (
            module.product_by_kernel(x, w, sizes, interpret=True),
            module.product_by_kernel(ct, w, sizes, transposed=True, interpret=True),
            module.outer_product_by_kernel(x, ct, sizes, interpret=True),
        )
    )(x, w, sizes, ct)
    assert_close((product[:used], back[:used], outer), (y[:used], dx[:used], dw))


@pytest.mark.slow
def test_on_tpus_the_work_does_not_grow_with_the_groups():
    """By the compiler's own count, with gradients."""
    (device, *_) = mm.target("v5e:2x2")
    sharding = jax.sharding.SingleDeviceSharding(device)

    def flops(groups: int) -> float:
        shapes = ((512, 256), jnp.bfloat16), ((groups, 256, 256), jnp.bfloat16), ((groups,), jnp.int32)
        args = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
        loss = lambda x, w, sizes: jnp.sum(grouped_matmul(x, w, sizes).astype(jnp.float32) ** 2)
        return jax.jit(jax.grad(loss, (0, 1))).lower(*args).compile().cost_analysis()["flops"]

    few, many = flops(4), flops(32)
    assert 3 * 2 * 512 * 256 * 256 <= few < many < 1.1 * few
