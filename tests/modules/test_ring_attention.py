"""Ring attention is attention with all scores: in tiles, over devices, in a pipeline; and what it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mmnnx as mm
from mmnnx.modules import LM, LMConfig, blockwise_attention, ring
from mmnnx.modules.chunked_attention import chunked_attention
from mmnnx.modules.masks import segment_mask
from mmnnx.modules.ring_attention import ring_attention
from tests.mpmd.parity import assert_same
from tests.slow import grid

SEGMENTS = jnp.array([[0] * 5 + [1] * 12 + [2] * 15, [0] * 20 + [3] * 12])


def operands(length: int = 32, dtype=jnp.float32):
    """Queries, keys and values of half as many heads, and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (2, length, n, 4)).astype(dtype) for key, n in zip(keys, (4, 2, 2, 4))]


def computed(attend, *args):
    """Values and gradients."""
    *args, ct = args
    y, back = jax.vjp(attend, *args)
    return (y, *back(ct))


def over(devices, attend):
    """Values and gradients, with the sequence over so many devices."""
    mesh = Mesh(np.array(devices), ("context",))
    task = mm.Task("ring", mesh=mesh, logical_axes={"sequence": "context"})
    return mm.jit(mm.task(lambda *args: computed(attend, *args), task=task))


@pytest.mark.parametrize(
    "options, packed, devices, size",
    grid(
        [
            dict(causal=True, scale=0.3),
            dict(causal=True, window=9),  # which the keys of the next device reach, and of no other
            dict(causal=True, window=30, softcap=2.0),
            dict(causal=False, softcap=2.0),
            dict(causal=False, window=7),
        ],
        [True, False],
        [4, 2, 1],
        [4, 16],
        step=6,
    ),
)
def test_it_gives_values_and_gradients_of_all_scores(options, packed, devices, size, monkeypatch):
    monkeypatch.setattr(ring, "tile_size", lambda length: min(size, length))
    ids, args = SEGMENTS if packed else None, operands()
    mask = segment_mask(SEGMENTS) if packed else None
    whole = lambda *args: chunked_attention(*args, mask, **options)
    expected = jax.jit(lambda *args: computed(whole, *args))(*args)
    run = over(jax.devices()[:devices], lambda *args: ring_attention(*args, ids, **options))
    assert_same(run(*args), expected, rtol=2e-5)


@pytest.mark.slow
def test_sums_are_taken_in_float32():
    args = operands(dtype=jnp.bfloat16)
    run = over(jax.devices()[:2], lambda *args: ring_attention(*args, causal=True))
    wide = [x.astype(jnp.float32) for x in args]
    whole = lambda *args: chunked_attention(*args, causal=True)
    for a, b in zip(run(*args), jax.jit(lambda *args: computed(whole, *args))(*wide)):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=2**-7 * np.abs(b).max())


def test_tiles_divide_what_they_are_of():
    found = [blockwise_attention.tile_size(n) for n in (32, 512, 1024, 1536, 640, 1021)]
    assert found == [32, 512, 512, 512, 320, 1021]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["microbatches", "remat", "scan", "tensor"])
def test_in_a_pipeline(layout):
    """Packed documents over 2 stages x 2 devices for a sequence."""

    def make():
        sizes = dict(vocab=32, layers=2, width=16, heads=4, kv_heads=2, mlp=16, attention="ring")
        return LM(LMConfig(scan=layout == "scan", remat=layout != "microbatches", **sizes), rngs=nnx.Rngs(0))

    def loss(model, batch):
        return model.loss(batch["tokens"], segment_ids=batch["ids"])

    keys = jax.random.split(jax.random.key(0), 2)
    tokens = jax.random.randint(keys[0], (4, 33), 0, 32)
    batch = dict(tokens=tokens, ids=jnp.cumsum(jax.random.bernoulli(keys[1], 0.1, (4, 32)), 1))
    grad = nnx.value_and_grad(loss)
    expected = nnx.jit(grad)(make(), batch)
    extra = {"model": 2} if layout == "tensor" else {}
    mesh = mm.MultiMesh(axis_sizes=(2, 2, *extra.values()), axis_names=("stage", "context", *extra))
    rules = mm.logical_rules(*(["tensor"] if extra else []), sequence="context")
    placed = mm.pipeline_sharding(nnx.eval_shape(make), 2, rules=rules)
    with mesh:
        model = mm.jit(make, out_shardings=placed)()
        step = mm.jit(lambda *args: mm.microbatch(grad, dim=0, size=2, argnum=1, reduce="mean")(*args))
        assert_same(step(model, batch), expected, rtol=5e-5)
        program = step.program(model, batch)
    assert all("ppermute" in str(f.jaxpr) for f in program.fragments if f.phase == "backward")


def compiled_for_tpus(count: int, length: int):
    """Forward and backward of causal attention, with the sequence over so many devices."""
    devices = mm.target("v5e:2x2")[:count]
    sharding = NamedSharding(Mesh(np.array(devices), ("context",)), PartitionSpec(None, "context"))
    x = jax.ShapeDtypeStruct((1, length, 4, 128), jnp.bfloat16, sharding=sharding)
    attend = lambda *args: ring_attention(*args, causal=True)
    return over(devices, attend).lower(x, x, x, x).compile()


@pytest.mark.slow
def test_on_tpus_keys_go_around():
    """And no device has all of them, nor its scores."""
    compiled = compiled_for_tpus(4, 2048)
    assert "collective-permute" in compiled.as_text() and "all-gather" not in compiled.as_text()
    scores = 4 * 512 * 2048 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 2


@pytest.mark.slow
def test_on_tpus_memory_falls_with_the_devices():
    two, four = (compiled_for_tpus(n, 16_384).memory_analysis().temp_size_in_bytes for n in (2, 4))
    assert four < two / 1.5
