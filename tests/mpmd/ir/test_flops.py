"""Operations are counted from equations, with the iterations of loops."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.modules.grouped_matmul import grouped_matmul
from mmnnx.modules.moe import MoE
from mmnnx.mpmd.ir.flops import count_flops, count_kernels
from tests.mpmd.parity import pipeline

A, B = jnp.ones((8, 4)), jnp.ones((4, 2))
ONE = 2 * 8 * 4 * 2


def count(f, *args):
    return dict(count_flops(jax.make_jaxpr(f)(*args)))


def test_products():
    assert count(jnp.dot, A, B) == {"float32": ONE}
    assert count(lambda a, b: a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16), A, B) == {"bfloat16": ONE}
    assert count(lambda a, b: jnp.einsum("nij,njk->nik", a, b), jnp.ones((3, 8, 4)), jnp.ones((3, 4, 2))) == {
        "float32": 3 * ONE
    }
    assert count(lambda a: jnp.tanh(a) + 1, A) == {}


def test_a_gradient_is_twice_its_forward():
    loss = lambda b, a: (a @ b).sum()
    assert count(jax.value_and_grad(loss, argnums=(0, 1)), B, A) == {"float32": 3 * ONE}


def test_loops_and_branches():
    square = jnp.ones((4, 4))
    one = 2 * 4**3
    body = lambda x, _: (x @ x, None)
    assert count(lambda x: lax.scan(body, x, None, length=5)[0], square) == {"float32": 5 * one}
    nested = lambda x: lax.fori_loop(0, 3, lambda i, x: lax.scan(body, x, None, length=5)[0], x)
    assert count(nested, square) == {"float32": 15 * one}
    branch = lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)
    assert count(branch, square) == {"float32": 2 * one}
    assert count(jax.jit(jax.checkpoint(lambda x: x @ x)), square) == {"float32": one}


def test_a_shard_map_counts_on_every_device():
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    f = jax.shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    assert count(f, A, B) == {"float32": ONE}
    # Along "y" its body is what the devices do together.
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    f = jax.shard_map(
        lambda a, b: a @ b, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}
    )
    assert count(f, A, B) == {"float32": ONE}


def test_kernels_count_as_their_authors_say():
    """Over all devices, or of one."""
    kernel = pl.pallas_call(
        lambda a, out: None, jax.typeof(A[:2]), cost_estimate=pl.CostEstimate(100, 0, 50), interpret=False
    )
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    f = jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    twice = jax.make_jaxpr(
        lambda a: lax.scan(lambda a, _: (f(a) @ jnp.ones((4, 4)), None), a, None, length=2)
    )(A)
    assert count_flops(twice) == {"float32": 2 * (4 * 100 + 2 * 8 * 4 * 4)}
    ((dtype, flops, nbytes),) = count_kernels(twice)
    assert (dtype, flops, nbytes) == ("float32", 100, 50) and count_kernels(twice).total() == 2


def test_kernels_whose_authors_say_nothing():
    """Each step of the grid, that of `vmap` among its dimensions, and the loops and branches inside."""

    def body(a, b, out):
        @pl.when(pl.program_id(0) > 0)
        def _():
            out[...] = lax.fori_loop(0, 3, lambda _, x: x @ b[...], a[...])

    block = pl.BlockSpec((8, 8), lambda n: (n, 0))
    kernel = pl.pallas_call(
        body,
        jax.ShapeDtypeStruct((32, 8), jnp.float32),
        grid=(4,),
        in_specs=[block, pl.BlockSpec((8, 8), lambda n: (0, 0))],
        out_specs=block,
    )
    jaxpr = jax.make_jaxpr(jax.vmap(kernel, (0, None)))(jnp.ones((5, 32, 8)), jnp.ones((8, 8)))
    flops = 5 * 4 * 3 * (2 * 8 * 8 * 8)
    assert count_flops(jaxpr) == {"float32": flops}
    assert count_kernels(jaxpr) == {("float32", flops, 4 * (2 * 5 * 32 * 8 + 8 * 8)): 1}


def test_ragged_products():
    """All rows once, forward; and for the gradients of both operands."""
    rows, w, sizes = jnp.ones((128, 4)), jnp.ones((3, 4, 2)), jnp.zeros(3, jnp.int32)
    assert count(lax.ragged_dot, rows, w, sizes) == {"float32": 2 * 128 * 4 * 2}
    loss = lambda x, w: lax.ragged_dot(x, w, sizes).sum()
    assert count(jax.value_and_grad(loss, argnums=(0, 1)), rows, w) == {"float32": 3 * 2 * 128 * 4 * 2}


@pytest.mark.parametrize("groups", [2, 8])
def test_grouped_products_do_not_grow_with_the_groups(groups):
    """All rows once, forward; and for the gradients of both operands."""
    rows, sizes = jnp.ones((128, 4), jnp.bfloat16), jnp.zeros(groups, jnp.int32)
    w = jnp.ones((groups, 4, 2), jnp.bfloat16)
    one = 2 * 128 * 4 * 2
    assert count(grouped_matmul, rows, w, sizes) == {"bfloat16": one}
    loss = lambda x, w: grouped_matmul(x, w, sizes).sum()
    assert count(jax.value_and_grad(loss, argnums=(0, 1)), rows, w) == {"bfloat16": 3 * one}


def test_experts_count_as_if_each_had_as_many_tokens():
    """Over four devices, each of which could get all tokens, as much as on one; forward and backward.

    Each device weighs and adds up what it has for all tokens: that counts four times, and is little.
    """

    def flops(devices):
        mesh, tasks = pipeline(1, devices)
        task = dataclasses.replace(tasks[0], logical_axes={"expert": "model"})
        make = lambda: MoE(16, 32, experts=8, top_k=2, rngs=nnx.Rngs(0))
        with mesh:
            model = mm.jit(make, out_shardings=mm.TaskSharding({mm.path(): task}))()
            grad = mm.jit(nnx.grad(lambda model, x: model(x)[0].sum()))
            program = grad.program(model, np.ones((2, 64, 16), np.float32))
        return sum((count_flops(f.jaxpr) for f in program.fragments), Counter()).total()

    assert flops(1) < flops(4) < 1.05 * flops(1)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(groups):
    x, kernel = jnp.ones((1, 16, 16, 8)), jnp.ones((3, 3, 8 // groups, 4))
    f = lambda x, k: lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )
    assert count(f, x, kernel) == {"float32": 2 * 16 * 16 * 4 * 9 * (8 // groups)}
