"""What a device computes and moves, read from what XLA wrote, and counted by hand."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.modules import LMConfig, lora
from mmnnx.modules.build import build
from mmnnx.modules.flash_attention import flash_attention
from mmnnx.modules.grouped_matmul import grouped_matmul
from mmnnx.mpmd.ir.flops import count_flops, count_kernels
from mmnnx.plan import operations as read
from mmnnx.plan.hlo import parse
from mmnnx.plan.language_models import flops_of_token
from mmnnx.plan.operations import largest_values, operations
from tests.slow import few

F32, BF16 = jnp.float32, jnp.bfloat16


@functools.cache
def tpus(count):
    return Mesh(np.array(mm.target("v5e:2x2")[:count]), ("x",))


def compiled(f, *args, mesh=None, spec=P()):
    """A program for a TPU that need not be here."""
    sharding = NamedSharding(tpus(1) if mesh is None else mesh, spec)
    placed = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in args]
    return parse(jax.jit(f).lower(*placed).compile().as_text())


def flops(hlo):
    return read.flops(operations(hlo))


def moved_bytes(hlo):
    return read.moved_bytes(operations(hlo))


def conv(x, kernel):
    return lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_a_matrix_product():
    hlo = compiled(jnp.dot, ((256, 512), F32), ((512, 128), F32))
    assert flops(hlo) == {"float32": 2 * 256 * 512 * 128}
    assert moved_bytes(hlo) == 4 * (256 * 512 + 512 * 128 + 256 * 128)


def test_operations_one_by_one():
    """A loop of products, one outside with what is done to its result, and a copy in another order."""

    def f(x, w, y):
        x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        return x @ w[0] + 1, jnp.sin(y).T + 1

    found = operations(compiled(f, ((256, 512), BF16), ((6, 512, 512), BF16), ((4096, 2048), F32)))
    of_one = {"bfloat16": 2 * 256 * 512 * 512}
    assert sorted((o.runs, o.flops) for o in found if o.flops) == [(1, of_one), (6, of_one)]
    assert sum(o.runs * o.moved_bytes for o in found if not o.flops) >= 2 * 4096 * 2048 * 4


def test_the_branch_with_the_most_work_counts():
    def f(flag, x, w):
        return lax.cond(flag, lambda x, w: x @ w, lambda x, w: jnp.sin(jnp.sin(x).T).T + 1 - w, x, w)

    found = operations(compiled(f, ((), jnp.bool_), ((512, 512), F32), ((512, 512), F32)))
    assert read.flops(found) == {"float32": 2 * 512**3}


def test_a_branch_that_moves_much_counts():
    """Its seconds are more than those of a product whose operations are more than its bytes."""

    def f(flag, x, y):
        product = lambda x, y: (y[:512, :512] @ x).sum()
        return lax.cond(flag, product, lambda x, y: jnp.sin(y).sum(), x, y)

    found = operations(compiled(f, ((), jnp.bool_), ((512, 512), F32), ((8192, 4096), F32)))
    assert not read.flops(found) and read.moved_bytes(found) > 8192 * 4096 * 4


def test_loops_that_cannot_be_counted():
    f = lambda x, n: lax.fori_loop(0, n, lambda i, x: jnp.sin(x @ x), x)
    hlo = compiled(f, ((256, 256), F32), ((), jnp.int32))
    assert [read.made_by(i) for i in hlo.uncounted_loops()] == ["while"]
    assert read.flops(operations(hlo)) == {"float32": 2 * 256**3}
    known = compiled(lambda x: f(x, 3), ((256, 256), F32))
    assert not known.uncounted_loops()
    assert (hlo.iterations_on_values(), known.iterations_on_values()) == (1, 0)
    often = compiled(
        lambda x, n: lax.scan(lambda x, _: (f(x, n), None), x, None, 5)[0], ((256, 256), F32), ((), jnp.int32)
    )
    assert often.iterations_on_values() == 5


@pytest.mark.parametrize("one_in", [1, 4])
def test_loops_over_the_tokens_of_experts_count_as_if_each_had_as_many(one_in):
    """Of four of `4 * one_in` experts, forward and backward, where there are no kernels for them."""
    loss = lambda x, w, sizes: jnp.sin(grouped_matmul(x, w, sizes, one_in)).sum()
    x, w, sizes = jnp.ones((4096, 64)), jnp.ones((4, 64, 32)), jnp.zeros(4, jnp.int32)
    hlo = parse(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w, sizes).compile().as_text())
    assert not hlo.uncounted_loops()
    assert flops(hlo) == {"float32": 3 * 2 * 4096 * 64 * 32 // one_in}
    assert hlo.iterations_on_values() == 3 * {1: 8, 4: 4}[one_in]  # in blocks of 512, of 256


def test_kernels_count_as_their_authors_say():
    """In place of what XLA's text has of them; not where it has none."""
    said = {("bfloat16", 1000, 10): 3}
    args = ((256, 512), F32), ((512, 128), F32)
    kernel = pl.pallas_call(
        lambda x, out: out.__setitem__(..., x[...]), jax.ShapeDtypeStruct((256, 128), F32)
    )
    *others, last = operations(compiled(lambda x, y: kernel(x @ y), *args), said)
    assert last == read.Operation({"bfloat16": 1000}, 10, runs=3)
    assert read.flops(others) == {"float32": 2 * 256 * 512 * 128}
    without = compiled(jnp.dot, *args)
    assert operations(without, said) == operations(without)


@pytest.mark.parametrize("target", ["v5e:2x2", "cpu"])
def test_flash_attention(target):
    """Its kernel on TPUs does not say that it multiplies twice. Elsewhere XLA has the two products."""
    devices = jax.devices() if target == "cpu" else mm.target(target)
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), P())
    x = jax.ShapeDtypeStruct((2, 512, 4, 128), F32, sharding=sharding)
    traced = jax.jit(lambda x: flash_attention(x, x, x, causal=True)).trace(x)
    hlo = parse(traced.lower().compile().as_text())
    found = read.flops(operations(hlo, count_kernels(traced.jaxpr)))
    assert found == {"float32": 2 * 2 * (2 * 4 * 512 * 512 * 128)}


def test_that_of_one_device():
    product = functools.partial(jnp.einsum, "bij,bjk->bik")
    hlo = compiled(product, ((4, 256, 512), F32), ((4, 512, 128), F32), mesh=tpus(4), spec=P("x"))
    assert flops(hlo) == {"float32": 2 * 256 * 512 * 128}
    assert moved_bytes(hlo) == 4 * (256 * 512 + 512 * 128 + 256 * 128)


def test_a_loop_reads_slices_of_its_weights():
    f = lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
    hlo = compiled(f, ((256, 512), BF16), ((6, 512, 512), BF16))
    assert flops(hlo) == {"bfloat16": 6 * 2 * 256 * 512 * 512}
    # The carry stays in the memory of the core.
    assert moved_bytes(hlo) == pytest.approx(2 * (6 * 512 * 512 + 2 * 256 * 512), abs=1000)


def test_a_loop_that_updates_in_place():
    def f(x):
        row = lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 8192))
        return lax.fori_loop(0, 16, lambda i, x: lax.dynamic_update_slice(x, row(x, i) + 1, (i, 0)), x)

    moved = moved_bytes(compiled(f, ((8192, 8192), F32)))  # 256 MiB: more than the core has
    assert moved == pytest.approx(4 * 8192 * (2 * 8192 + 2 * 16), abs=1000)


def test_a_convolution():
    """Its padding is not multiplied."""
    taken = sum(0 <= 2 * out + k < 8 for out in range(4) for k in range(3))
    args = ((2, 8, 8, 128), F32), ((3, 3, 128, 128), F32)
    products = 2 * 128 * 128 * taken**2
    assert sum(flops(compiled(conv, *args)).values()) == 2 * products
    gradients = jax.grad(lambda x, kernel: (conv(x, kernel) ** 2).sum(), (0, 1))
    assert sum(flops(compiled(gradients, *args)).values()) == 3 * 2 * products


def test_products_of_groups():
    hlo = compiled(lax.ragged_dot, ((512, 256), BF16), ((4, 256, 384), BF16), ((4,), jnp.int32))
    assert flops(hlo) == {"bfloat16": 2 * 512 * 256 * 384}


def test_a_conditional_counts_its_largest_branch():
    f = lambda x, i: lax.switch(i, [lambda x: x, lambda x: x @ x, lambda x: x @ x @ x], x)
    assert sum(flops(compiled(f, ((256, 256), F32), ((), jnp.int32))).values()) == 2 * 2 * 256**3


FMHA = (
    'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":'
    '{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","4","64","64"]}}}'
)
GEMM = (
    'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)
GPU = f"""
HloModule jit_f

ENTRY %main (p: bf16[64,32]) -> bf16[64,16] {{
  %p = bf16[64,32]{{1,0}} parameter(0)
  %q = f8e4m3fn[32,16]{{1,0}} parameter(1)
  %a = bf16[2,4,64,8]{{3,2,1,0}} parameter(2)
  %b = (bf16[64,16]{{1,0}}, s8[1024]{{0}}) custom-call(%p, %q), {GEMM}
  %c = (bf16[2,4,64,8]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %a, %a), {FMHA}
  ROOT %d = bf16[64,16]{{1,0}} get-tuple-element(%b), index=0
}}
"""


def test_libraries_that_xla_calls_for_gpus():
    products, scores = 64 * 32 * 16, 2 * 4 * 64 * 64
    assert flops(parse(GPU)) == {"bfloat16": 2 * products + 2 * 2 * scores * 8}
    backward = GPU.replace("fmhaSoftmax", "fmhaSoftmaxBackward")
    assert flops(parse(backward)) == {"bfloat16": 2 * products + 5 * 2 * scores * 8}


def test_a_loop_whose_iterations_are_not_said():
    """Its counter is compared with a limit."""
    f = lambda x: lax.scan(lambda x, _: (x @ x, None), x, None, length=5)[0]
    args = [jax.ShapeDtypeStruct((256, 256), F32)]
    text = jax.jit(f).lower(*args).compile().as_text()
    assert "known_trip_count" in text
    expected = {"float32": 5 * 2 * 256**3}
    assert flops(parse(text)) == flops(parse(text.replace("known_trip_count", "unknown"))) == expected


def test_large_values_are_named():
    def f(x):
        with jax.named_scope("attention"):
            return jax.nn.softmax(x @ x.T) @ x

    found = largest_values(compiled(f, ((512, 8), F32)), 2**20)
    assert found and found[0].nbytes == 512 * 512 * 4 and found[0].shape == "f32[512,512]"
    assert all("attention" in value.name for value in found)
    assert largest_values(compiled(f, ((512, 8), F32)), 2**30) == []


def products_of_training(config, sequence, rank):
    """For a token, as JAX traces a step: all weights are trained, or LoRA's additions alone."""
    model = nnx.eval_shape(lambda: build(config))
    graphdef, trained, kept = nnx.split(
        lora(model, rank) if rank else model, nnx.LoRAParam if rank else nnx.Param, ...
    )
    grad = jax.grad(lambda trained, kept, tokens: nnx.merge(graphdef, trained, kept).loss(tokens))
    jaxpr = jax.make_jaxpr(grad)(trained, kept, jax.ShapeDtypeStruct((1, sequence + 1), jnp.int32))
    return count_flops(jaxpr).total() / sequence


@few(1)
@pytest.mark.parametrize("rank", [0, 8])
def test_operations_for_a_token_are_those_of_its_products(rank):
    """But for scores above the diagonal, few here, which JAX computes and the model does not need."""
    sequence, config = 64, LMConfig(width=256, mlp=768, scan=True)
    found = flops_of_token(config, sequence, rank)
    assert found == pytest.approx(products_of_training(config, sequence, rank), rel=0.03)


def test_operations_of_attention_are_those_of_what_its_window_shows():
    sequence, config = 1024, LMConfig(layers=3, heads=4, width=128, window=(64, 768, None))
    none = flops_of_token(dataclasses.replace(config, window=1), sequence) - 3 * 12 * 128
    seen = [min(n + 1, w or sequence) for w in config.windows for n in range(sequence)]
    found = flops_of_token(config, sequence) - none
    assert found == pytest.approx(12 * 128 * sum(seen) / sequence, rel=0.01)
