"""Flash attention is attention with all scores: its kernel, and what stands for it on other platforms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.modules import LM, LMConfig
from mmnnx.modules.attention import Attention
from mmnnx.modules.blockwise_attention import Scores
from mmnnx.modules.chunked_attention import chunked_attention
from mmnnx.modules.flash_attention import (
    by_kernel,
    by_kernel_with_log_total,
    flash_attention,
    gradients_by_kernel,
    with_all_scores,
)
from mmnnx.modules.masks import segment_mask
from tests.mpmd.parity import assert_same
from tests.slow import few, grid

SEGMENTS = jnp.repeat(jnp.array([[0, 1, 1, 2], [0, 0, 3, 3]]), 64, axis=1)


def operands(length: int = 256, head_dim: int = 64):
    """Queries in groups of three, keys, values, and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (2, length, 2, 3, head_dim), (2, length, 2, head_dim), (2, length, 2, head_dim)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, (*shapes, shapes[0]))]


@pytest.mark.parametrize(
    "options, packed",
    grid(
        [
            dict(causal=True, window=None, softcap=None),
            dict(causal=True, window=40, softcap=None),
            dict(causal=False, window=None, softcap=20.0),
            dict(causal=False, window=30, softcap=None),
        ],
        [True, False],
        step=4,
    ),
)
def test_the_kernel_gives_values_and_gradients_of_all_scores(options, packed):
    """In interpret mode, where it runs as on a TPU."""
    how, (*args, ct) = Scores(scale=0.2, **options), operands()
    segments = (SEGMENTS,) if packed else ()

    @jax.jit
    def by_kernels(*args):
        alone = by_kernel(how, *args, *segments, interpret=True)
        y, log_total = by_kernel_with_log_total(how, *args, *segments, interpret=True)
        return alone, y, *gradients_by_kernel(how, *args, y, log_total, ct, *segments, interpret=True)

    @jax.jit
    def expected(*args):
        y, back = jax.vjp(lambda *args: with_all_scores(how, *args, *segments), *args)
        return y, y, *back(ct)

    for a, b in zip(by_kernels(*args), expected(*args), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("length", [128, 100])
def test_elsewhere_it_is_attention_with_a_mask(length):
    query, key, value, _ = operands(length)
    query = query.reshape(2, length, 6, -1)
    segments = SEGMENTS[:, ::2][:, :length]
    for ids in (None, segments):
        expected = chunked_attention(
            query, key, value, None if ids is None else segment_mask(ids), causal=True, window=20
        )
        got = flash_attention(query, key, value, ids, causal=True, window=20)
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.slow
def test_on_tpus_no_scores_are_kept():
    """The compiler's bytes, forward and backward."""
    (device, *_) = mm.target("v5e:2x2")
    sharding = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((1, 2048, 4, 128), jnp.bfloat16, sharding=sharding)

    def compiled(fun):
        loss = lambda q, k, v: fun(q, k, v, causal=True).astype(jnp.float32).sum()
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()

    flash, whole = compiled(flash_attention), compiled(chunked_attention)
    scores = 4 * 2048 * 2048 * 2
    assert whole.memory_analysis().temp_size_in_bytes > scores
    assert flash.memory_analysis().temp_size_in_bytes < scores / 4
    assert "tpu_custom_call" in flash.as_text()


def test_devices_that_have_parts_of_a_sequence_have_some_heads_each():
    """Two of four key-value heads by "model", and one of these by "context"; values and gradients."""
    mesh = jax.make_mesh((2, 2), ("context", "model"))
    task = mm.Task("t", mesh=mesh, logical_axes={"sequence": "context", "kv_heads": "model"})
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(key, (1, 128, heads, 4)) for key, heads in zip(keys, (8, 4, 4))]

    def run(attend, *args):
        loss = lambda *args: jnp.sin(attend(*args, causal=True)).sum()
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*args)

    of_task = mm.jit(mm.task(functools.partial(run, flash_attention), task=task))
    assert_same(of_task(*args), jax.jit(functools.partial(run, chunked_attention))(*args), rtol=2e-5)
    assert "[1,128,1,2,4]" in str(of_task.program(*args).fragments[0].jaxpr)


def test_a_backward_on_its_own_runs_no_kernel_of_the_forward():
    config = LMConfig(vocab=32, layers=2, width=16, heads=2, kv_heads=1, mlp=16, attention="flash")
    placed = mm.pipeline_sharding(nnx.eval_shape(lambda: LM(config, rngs=nnx.Rngs(0))), 2)
    grad = mm.microbatch(
        nnx.grad(lambda m, tokens: m.loss(tokens)), size=1, dim=0, argnum=1, schedule="gpipe"
    )
    with mm.MultiMesh(devices=jax.devices()[:2], axis_sizes=(2,), axis_names=("stage",)):
        model = mm.jit(lambda: LM(config, rngs=nnx.Rngs(0)), out_shardings=placed)()
        program = mm.jit(lambda *args: grad(*args)).program(model, jnp.ones((2, 129), jnp.int32))
    kernels = {
        program.labels[f]: [part for part in ("fwd", "dq", "dkv") if f"splash_mha_{part}" in str(f.jaxpr)]
        for f in program.fragments
    }
    for stage in ("stage0", "stage1"):
        assert kernels[f"{stage} forward"] == ["fwd"]
        assert kernels[f"{stage} backward"] == ["dq", "dkv"]


@few(1)
@pytest.mark.parametrize("implementation", ["flash", "ring"])
def test_a_mask_and_a_cache_go_without_it(implementation):
    usual, flash = (
        Attention(16, 4, 2, causal=True, implementation=name, rngs=nnx.Rngs(0))
        for name in (None, implementation)
    )
    x = jax.random.normal(jax.random.key(1), (2, 128, 16))
    mask = jnp.tril(jnp.ones((1, 1, 128, 128), bool), -1) | jnp.eye(128, dtype=bool)
    call = nnx.jit(lambda attention, x, **options: attention(x, **options))
    np.testing.assert_allclose(call(flash, x), call(usual, x), atol=1e-5)
    np.testing.assert_allclose(call(flash, x, mask=mask), call(usual, x, mask=mask), atol=1e-5)
    (y, _), (z, _) = (call(m, x, cache=m.init_cache(2, 128)) for m in (flash, usual))
    np.testing.assert_allclose(y, z, atol=1e-5)


@pytest.mark.slow
def test_in_a_pipeline_heads_are_divided():
    """The losses and gradients of packed documents, and what a device computes with."""

    def make(attention):
        sizes = dict(vocab=32, layers=2, width=16, heads=4, kv_heads=2, mlp=16)
        return LM(LMConfig(attention=attention, **sizes), rngs=nnx.Rngs(0))

    def loss(model, tokens, ids):
        return model.loss(
            tokens, labels=tokens, weights=jnp.ones(tokens.shape) / tokens.size, segment_ids=ids
        )

    tokens = jax.random.randint(jax.random.key(0), (4, 128), 0, 32)
    ids = jnp.repeat(jnp.arange(4), 32)[None].repeat(4, 0)
    grad = nnx.value_and_grad(loss)
    expected = nnx.jit(grad)(make(None), tokens, ids)
    mesh = mm.MultiMesh(axis_sizes=(2, 2, 2), axis_names=("stage", "data", "model"))
    rules = mm.logical_rules("tensor", "data")
    placed = mm.pipeline_sharding(nnx.eval_shape(lambda: make("flash")), 2, rules=rules)
    with mesh:
        model = mm.jit(lambda: make("flash"), out_shardings=placed)()
        step = mm.jit(lambda *args: grad(*args))
        assert_same(step(model, tokens, ids), expected, rtol=2e-5)
        program = step.program(model, tokens, ids)
    text = str([fragment.jaxpr for fragment in program.fragments])
    assert (
        "float32[2,128,1,2,4]" in text or "f32[2,128,1,2,4]" in text
    )  # of four rows and two key-value heads
