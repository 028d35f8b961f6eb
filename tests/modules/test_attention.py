"""Attention against linen and formulas; decoding against the full forward; tensor parallel runs."""

from __future__ import annotations

import functools
import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.modules.attention import Attention
from mmnnx.modules.chunked_attention import chunked_attention
from mmnnx.modules.kv_cache import KVCache
from mmnnx.modules.logical import constrain
from mmnnx.modules.masks import combine
from mmnnx.modules.rotary import RotaryScaling, rotary
from tests.slow import all_but, few, grid

normal = nnx.initializers.normal(0.5)
close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def build(width: int = 16, heads: int = 4, *args, seed: int = 0, **options) -> Attention:
    inits = dict(kernel_init=normal, out_init=normal, bias_init=normal)
    return Attention(width, heads, *args, rngs=nnx.Rngs(seed), **inits | options)


def sample(*shape, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def same(fun, reference, *args) -> None:
    """Two functions of pytrees agree in value and in the gradients of a random weighting of it."""
    weight = sample(*jax.eval_shape(reference, *args).shape, seed=9)

    def value_and_grads(f):
        def loss(*args):
            y = f(*args)
            return (y * weight).sum(), y

        return jax.jit(jax.grad(loss, tuple(range(len(args))), has_aux=True))(*args)

    (grads, y), (expected_grads, expected) = map(value_and_grads, (fun, reference))
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(expected_grads))
    jax.tree.map(close, (grads, y), (expected_grads, expected))


def with_weights(attention: Attention, **options):
    """`attention` as a function of its weights and inputs."""
    graph, state = nnx.split(attention)

    def call(weights, *inputs):
        nnx.replace_by_pure_dict(state, weights)
        return nnx.merge(graph, state)(*inputs, **options)

    return call, nnx.to_pure_dict(state)


def formula(weights, x, memory=None, *, heads: int, mask=True, turn=lambda y: y, normalise=False):
    """Softmax attention by its definition, key-value heads repeated; `mask` broadcasts to [b, h, q, k]."""

    def linear(name, y):
        return y @ weights[name]["kernel"] + weights[name].get("bias", 0.0)

    source = x if memory is None else memory
    head_dim = weights["query"]["kernel"].shape[1] // heads
    q, k, v = (
        linear(name, y).reshape(*y.shape[:2], -1, head_dim)
        for name, y in (("query", x), ("key", source), ("value", source))
    )
    if normalise:
        q, k = (
            y / jnp.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * weights[f"{name}_norm"]["scale"]
            for name, y in (("query", q), ("key", k))
        )
    q, k = turn(q), turn(k)
    k, v = (jnp.repeat(y, heads // y.shape[2], axis=2) for y in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(head_dim)
    scores = jnp.where(mask, scores, -jnp.inf)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
    return linear("out", y.reshape(*x.shape[:2], -1))


call_of = nnx.jit(lambda attention, x, **options: attention(x, **options))


def before(length: int, window: int | None = None) -> np.ndarray:
    """Which keys a causal query sees, [queries, keys]."""
    distance = np.arange(length)[:, None] - np.arange(length)
    return (distance >= 0) & (distance < (window or length))


# ---------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize("masked, width", grid([False, True], [10, None], step=2))
def test_multi_head_and_cross_attention_are_those_of_linen(width, masked):
    attention = build(bias=True, out_bias=True, memory_width=width)
    mask = (
        jax.random.bernoulli(jax.random.key(1), 0.6, (2, 1, 5, 5)) | jnp.eye(5, dtype=bool)
        if masked
        else None
    )
    call, weights = with_weights(attention, mask=mask)
    inputs = (sample(2, 5, 16),) if width is None else (sample(2, 5, 16), sample(2, 5, width, seed=1))

    def linen(weights, *inputs):
        by_head = {}
        for name, layer in weights.items():
            shape = (4, 4, -1) if name == "out" else (-1, 4, 4)
            bias = layer["bias"] if name == "out" else layer["bias"].reshape(4, 4)
            by_head[name] = {"kernel": layer["kernel"].reshape(shape), "bias": bias}
        reference = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=16, out_features=16)
        return reference.apply({"params": by_head}, *inputs, mask=mask)

    same(call, linen, weights, *inputs)


@pytest.mark.parametrize("kv_heads, window", grid([1, 2, 4], [3, None, 1], step=3))
def test_causal_grouped_query_attention_in_a_window(kv_heads, window):
    call, weights = with_weights(build(16, 4, kv_heads, causal=True, window=window))
    reference = functools.partial(formula, heads=4, mask=before(7, window))
    if window == 1:  # a softmax over one key has no gradient by queries and keys
        close(call(weights, sample(2, 7, 16)), reference(weights, sample(2, 7, 16)))
    else:
        same(call, reference, weights, sample(2, 7, 16))


def test_a_window_without_causality_looks_both_ways():
    call, weights = with_weights(build(window=2))
    distance = np.arange(6)[:, None] - np.arange(6)
    same(call, functools.partial(formula, heads=4, mask=abs(distance) < 2), weights, sample(2, 6, 16))


def test_head_size_apart_from_the_width():
    attention = build(16, 4, 2, 6)
    assert attention.query.kernel.shape == (16, 24) and attention.key.kernel.shape == (16, 12)
    call, weights = with_weights(attention)
    same(call, functools.partial(formula, heads=4), weights, sample(2, 5, 16))


@few(1)
@pytest.mark.parametrize("shape", [(2, 4, 5, 5), (2, 1, 5, 5), (1, 4, 1, 5), (2, 1, 1, 5)])
def test_masks_of_every_shape_take_away_from_causality(shape):
    mask = jax.random.bernoulli(jax.random.key(2), 0.5, shape)
    mask = mask.at[..., 0].set(True)  # no row without a key
    call, weights = with_weights(build(16, 4, 2, causal=True), mask=mask)
    same(call, functools.partial(formula, heads=4, mask=mask & before(5)), weights, sample(2, 5, 16))


def test_a_query_that_sees_nothing_gets_the_mean_of_the_values():
    attention, x = build(16, 4), sample(2, 5, 16)
    y = attention(x, mask=jnp.ones((2, 1, 5, 5), bool).at[:, :, 2].set(False))
    close(y[:, 2], attention.out(attention.value(x).mean(axis=1)))


def test_packed_sequences_are_sequences_of_their_own():
    attention = build(16, 4, 2, causal=True, rotary_base=1e4)
    x = sample(2, 7, 16)
    segments = jnp.array([[0, 0, 0, 1, 1, 1, 1], [5, 5, 2, 2, 2, 2, 5]])
    positions = jnp.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 2]])
    y = call_of(attention, x, segment_ids=segments, positions=positions)
    close(y[:1, :3], call_of(attention, x[:1, :3]))
    close(y[:1, 3:], call_of(attention, x[:1, 3:]))
    close(y[1:, 2:6], call_of(attention, x[1:, 2:6]))
    split = jnp.array([0, 1, 6])  # a segment in two pieces
    close(y[1:, split], call_of(attention, x[1:, split]))


def test_segments_and_a_mask_and_cross_attention():
    queries, keys = jnp.array([[0, 0, 1, 1, 1], [2, 2, 2, 0, 0]]), jnp.array([[1, 0, 0, 1], [0, 2, 2, 2]])
    mask = jnp.ones((2, 1, 1, 4), bool).at[0, 0, 0, 1].set(False)
    call, weights = with_weights(build(), mask=mask, segment_ids=queries, memory_segment_ids=keys)
    seen = (queries[:, :, None] == keys[:, None, :])[:, None] & mask
    inputs = sample(2, 5, 16), sample(2, 4, 16, seed=1)
    same(call, functools.partial(formula, heads=4, mask=seen), weights, *inputs)


@few(1)
@pytest.mark.parametrize("scaling", [None, RotaryScaling(original_max_position_embeddings=64)])
def test_rotary_positions_and_normalised_queries(scaling):
    attention = build(16, 2, 1, causal=True, rotary_base=100.0, rotary_scaling=scaling, qk_norm=True)
    for norm in (attention.query_norm, attention.key_norm):
        norm.scale.set_value(sample(8, seed=4))
    positions = jnp.array([[0, 1, 2, 3, 4], [50, 51, 52, 60, 61]])
    turn = lambda y: rotary(y, positions, 100.0, scaling)
    reference = functools.partial(formula, heads=2, mask=before(5), turn=turn, normalise=True)
    call, weights = with_weights(attention, positions=positions)
    same(call, reference, weights, sample(2, 5, 16))
    x = sample(2, 5, 16)
    close(call_of(attention, x), call_of(attention, x, positions=jnp.arange(5)))


def test_epsilon_of_the_norms():
    x = sample(1, 3, 16)
    assert jnp.abs(build(qk_norm=True)(x) - build(qk_norm=True, norm_epsilon=1.0)(x)).max() > 1e-3


@pytest.mark.slow
def test_bfloat16():
    options = dict(causal=True, rotary_base=1e4, qk_norm=True, kernel_init=nnx.initializers.lecun_normal())
    wide, narrow = (build(16, 4, 2, dtype=dtype, **options) for dtype in (None, jnp.bfloat16))
    x = sample(2, 9, 16)
    y, cache = narrow(x, cache=narrow.init_cache(2, 9))
    assert y.dtype == cache.key.dtype == narrow(x).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(narrow))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(narrow(x).astype(jnp.float32), wide(x), atol=0.1)
    np.testing.assert_allclose(y.astype(jnp.float32), wide(x), atol=0.1)
    half = build(param_dtype=jnp.bfloat16, qk_norm=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("bfloat16")}
    assert half(x.astype(jnp.bfloat16)).dtype == half.init_cache(1, 2).key.dtype == jnp.bfloat16


def test_the_implementation_is_handed_on():
    x = sample(2, 5, 16)
    close(build(implementation="xla")(x), build()(x))
    with pytest.raises(ValueError, match="Unsupported implementation option: none such"):
        build(implementation="none such")(x)


def test_names_of_weights():
    def names(attention):
        found = {}
        for path, variable in nnx.to_flat_state(nnx.state(attention)):
            found[".".join(path)] = variable.get_metadata("out_sharding")
            assert len(found[".".join(path)]) == variable.ndim
        return found

    default = names(build(bias=True, out_bias=True, qk_norm=True))
    assert default["query.kernel"] == ("embed", "heads") and default["query.bias"] == ("heads",)
    assert default["key.kernel"] == default["value.kernel"] == ("embed", "kv_heads")
    assert default["out.kernel"] == ("heads", "embed") and default["out.bias"] == ("embed",)
    assert default["query_norm.scale"] == (None,)
    given = names(build(query_axes=("a", "b"), kv_axes=("c", "d"), out_axes=("e", "f")))
    assert given == {
        "query.kernel": ("a", "b"),
        "key.kernel": ("c", "d"),
        "value.kernel": ("c", "d"),
        "out.kernel": ("e", "f"),
    }


def test_initialisers():
    x = sample(2, 5, 16)
    np.testing.assert_array_equal(build(out_init=nnx.initializers.zeros)(x), 0)
    np.testing.assert_array_equal(build(kernel_init=nnx.initializers.zeros).value.kernel[...], 0)
    ones = build(bias=True, out_bias=True, bias_init=nnx.initializers.ones)
    np.testing.assert_array_equal(jnp.stack([ones.key.bias[...], ones.out.bias[...]]), 1)


# ------------------------------------------------------------------------------------------------ decoding

STYLES = {
    "plain": dict(),
    "llama": dict(kv_heads=2, rotary_base=1e4),
    "window": dict(kv_heads=1, rotary_base=1e4, window=3, qk_norm=True, bias=True),
}


@functools.cache
def style(name: str) -> tuple[Attention, object]:
    """An attention and its call with a cache, compiled."""
    attention = build(causal=True, **STYLES[name])
    return attention, nnx.jit(lambda x, cache: attention(x, cache=cache))


@pytest.mark.parametrize(
    "pieces, name", grid([(1,) * 9, (1, 8), (4, 1, 1, 1, 1, 1), (9,), (3, 4, 2)], [*STYLES], step=2), ids=str
)
def test_decoding_equals_the_full_forward(name, pieces):
    attention, step = style(name)
    x, cache, done = sample(2, 9, 16), attention.init_cache(2, 12), []
    for start, tokens in zip(np.cumsum((0, *pieces)), pieces):
        y, cache = step(x[:, start : start + tokens], cache)
        done.append(y)
    close(jnp.concatenate(done, axis=1), call_of(attention, x))
    assert cache.length == 9 and cache.capacity == 12


@pytest.mark.parametrize("name", all_but(["window"], STYLES))
def test_rows_of_several_lengths(name):
    """Prompts padded on the right; each row then goes on as it would alone."""
    attention, step = style(name)
    lengths, x = [2, 5, 1], sample(3, 9, 16)
    padding = np.arange(5)[None, :, None] >= np.array(lengths)[:, None, None]
    y, cache = step(jnp.where(padding, 1e3, x[:, :5]), attention.init_cache(3, 9))
    done = [[y[row, :length]] for row, length in enumerate(lengths)]
    cache = cache.with_length(jnp.array(lengths))
    for n in range(4):
        token = jnp.stack([x[row, length + n] for row, length in enumerate(lengths)])[:, None]
        y, cache = step(token, cache)
        for row in range(3):
            done[row].append(y[row])
    assert cache.length.tolist() == [6, 9, 5]
    expected = call_of(attention, x)
    for row, length in enumerate(lengths):
        close(jnp.concatenate(done[row]), expected[row, : length + 4])


def test_tokens_can_be_taken_back():
    attention, step = style("llama")
    x = sample(2, 6, 16)
    _, cache = step(x.at[:, 3:].set(7.0), attention.init_cache(2, 8))
    y, _ = step(x[:, 3:], cache.with_length(3))
    close(y, call_of(attention, x)[:, 3:])


@pytest.mark.slow
def test_positions_and_masks_with_a_cache():
    attention, x = style("llama")[0], sample(2, 6, 16)
    positions = jnp.array([[0, 1, 2, 0, 1, 2], [3, 4, 9, 10, 11, 12]])
    mask = jax.random.bernoulli(jax.random.key(3), 0.5, (2, 4, 6, 8)).at[..., 0].set(True)
    expected = attention(x, positions=positions, mask=mask[..., :6])
    cache = attention.init_cache(2, 8)
    y, cache = attention(x[:, :4], positions=positions[:, :4], mask=mask[:, :, :4], cache=cache)
    close(y, expected[:, :4])
    y, _ = attention(x[:, 4:], positions=positions[:, 4:], mask=mask[:, :, 4:], cache=cache)
    close(y, expected[:, 4:])


@pytest.mark.slow
def test_gradients_through_a_cache():
    attention, x = style("window")[0], sample(2, 6, 16)

    def in_pieces(x):
        first, cache = attention(x[:, :4], cache=attention.init_cache(2, 6))
        return jnp.concatenate([first, attention(x[:, 4:], cache=cache)[0]], axis=1)

    same(in_pieces, attention, x)


@pytest.mark.slow
def test_tokens_beyond_the_capacity_are_not_kept_and_get_nan():
    attention, step = style("llama")
    x = sample(2, 7, 16)
    _, cache = step(x[:, :3], attention.init_cache(2, 5))
    _, cache = step(x[:, 3:4], cache.with_length(jnp.array([3, 2])))
    y, full = step(x[:, 4:6], cache)  # room for one more in the first row, for both in the second
    assert jnp.isnan(y).all(axis=-1).tolist() == [[False, True], [False, False]]
    assert not jnp.isnan(y[0, 0]).any()
    close(y[0, 0], call_of(attention, x[:1, :5])[0, 4])
    assert full.length.tolist() == [6, 5] and not jnp.isnan(full.value).any()
    again, _ = step(x[:, 4:5], full.with_length(jnp.array([4, 3])))
    close(again[:, 0], y[:, 0])
    with pytest.raises(ValueError, match="7 tokens do not fit a cache for 5: make a larger one"):
        attention(x, cache=attention.init_cache(2, 5))


def test_a_cache_is_a_pytree_of_arrays():
    cache = KVCache.zeros(2, 5, 3, 4, jnp.bfloat16)
    assert [leaf.shape for leaf in jax.tree.leaves(cache)] == [(2, 5, 3, 4), (2, 5, 3, 4), ()]
    assert cache.key.dtype == cache.value.dtype == jnp.bfloat16 and cache.length.dtype == jnp.int32
    key, value = sample(2, 2, 3, 4), sample(2, 2, 3, 4, seed=1)
    cache = jax.jit(KVCache.append)(cache.with_length(1), key, value)
    np.testing.assert_array_equal(cache.key[:, 1:3], key.astype(jnp.bfloat16))
    np.testing.assert_array_equal(cache.value[:, 1:3], value.astype(jnp.bfloat16))
    np.testing.assert_array_equal(cache.key[:, [0, 3, 4]], 0)
    assert cache.positions(2).tolist() == [[3, 4], [3, 4]]
    assert cache.with_length(np.array([1, 4])).positions(1).tolist() == [[1], [4]]
    assert build(16, 4, 2, dtype=jnp.float16).init_cache(1, 2).key.dtype == jnp.float16
    assert build(16, 4, 2).init_cache(1, 2, jnp.bfloat16).key.shape == (1, 2, 2, 4)


def test_a_cache_narrower_than_what_is_computed_in():
    attention, x = style("llama")[0], sample(2, 6, 16)
    y, cache = call_of(attention, x, cache=attention.init_cache(2, 8, jnp.bfloat16))
    assert (y.dtype, cache.key.dtype) == (jnp.float32, jnp.bfloat16)
    expected = call_of(attention, x)
    np.testing.assert_allclose(y, expected, rtol=0.05, atol=0.1)
    assert jnp.abs(y - expected).max() > 0


def test_a_donated_cache_is_written_in_place():
    step = jax.jit(KVCache.append, donate_argnums=0)
    cache = KVCache.zeros(2, 64, 2, 4)
    compiled = step.lower(cache, sample(2, 1, 2, 4), sample(2, 1, 2, 4)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * cache.key.nbytes
    step(cache, sample(2, 1, 2, 4), sample(2, 1, 2, 4))
    assert cache.key.is_deleted()


# ------------------------------------------------------------------------------------------------ subclass


@pytest.mark.slow
def test_a_subclass_overrides_attend():
    class LinearAttention(Attention):
        """Scores without a softmax; it sees what it is told to."""

        def attend(self, query, key, value, mask, *, causal, window):
            seen.append((query.shape, key.shape, mask is None or mask.shape, causal, window))
            key, value = (jnp.repeat(y, self.heads // self.kv_heads, axis=2) for y in (key, value))
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
            allowed = jnp.asarray(before(key.shape[1]))[: query.shape[1]] if mask is None else mask
            return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(allowed, scores, 0.0), value)

    seen = []
    attention = LinearAttention(16, 4, 2, causal=True, window=9, rngs=nnx.Rngs(0))
    x = sample(2, 5, 16)
    y = attention(x)
    assert jnp.abs(y - Attention(16, 4, 2, causal=True, window=9, rngs=nnx.Rngs(0))(x)).max() > 1e-3
    close(attention(x, cache=attention.init_cache(2, 6))[0], y)
    assert seen == [
        ((2, 5, 4, 4), (2, 5, 2, 4), True, True, 9),
        ((2, 5, 4, 4), (2, 6, 2, 4), (2, 1, 5, 6), False, None),
    ]


# ------------------------------------------------------------------------------------------ tensor parallel


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes, kv_heads",
    [
        *itertools.product(
            [
                ((1, 4), dict(heads="model", kv_heads="model")),
                ((2, 2), dict(batch="data", embed="data", heads="model", kv_heads="model")),
                ((1, 4), dict(sequence="model")),
            ],
            [2, 4],
        )
    ],
)
def test_on_several_devices_equals_one(axes, kv_heads):
    """Two key-value heads over four devices: their weights are split, and the heads are left to XLA."""
    axis_sizes, rules = axes
    new = lambda: build(16, 4, kv_heads, causal=True, rotary_base=1e4, qk_norm=True)
    mesh = mm.MultiMesh(axis_sizes=axis_sizes, axis_names=("data", "model"))
    task = mm.Task("layer", logical_axes=rules)
    x, weight = sample(2, 8, 16), sample(2, 8, 16, seed=1)

    def loss(attention, x):
        y = mm.task(lambda x: attention(constrain(x, "batch", "sequence", "embed")), task=task)(x)
        return (y * weight).sum(), y

    def decode(attention, x):
        step = mm.task(lambda x, cache: attention(x, cache=cache), task=task)
        y, cache = step(x[:, :5], attention.init_cache(2, 8))
        rest, cache = step(x[:, 5:], cache)
        return jnp.concatenate([y, rest], axis=1), cache

    def whole(attention, x):
        y = attention(x)
        return (y * weight).sum(), y

    grad = nnx.value_and_grad(loss, has_aux=True)
    (_, expected), expected_grads = nnx.jit(nnx.value_and_grad(whole, has_aux=True))(new(), x)
    with mesh:
        attention = mm.jit(new, out_shardings=mm.TaskSharding({...: task}))()
        (_, y), grads = mm.jit(grad)(attention, x)
        decoded, cache = mm.jit(decode)(attention, x)
    spec = attention.query.kernel[...].sharding.spec
    assert spec == P(*(rules.get(name) for name in ("embed", "heads")))
    assert len(y.sharding.device_set) == len(cache.key.sharding.device_set) == 4
    if kv_heads == 4 and "heads" in rules:
        heads_a_device = 4 // axis_sizes[1]
        assert cache.key.sharding.shard_shape(cache.key.shape)[2] == heads_a_device
    close(y, expected)
    close(decoded, expected)
    jax.tree.map(close, nnx.to_pure_dict(grads), nnx.to_pure_dict(expected_grads))


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(heads=0), "heads=0, kv_heads=0: attention has at least one of each"),
        (dict(width=18), "width 18 is not divisible by 4 heads: give head_dim="),
        (dict(kv_heads=3), "4 heads are not divisible by 3 key-value heads"),
        (dict(head_dim=3, rotary_base=1e4), "a head has 3"),
        (dict(rotary_scaling=RotaryScaling()), "without rotary_base="),
        (dict(window=0), "a window of 0 keys"),
    ],
)
def test_options_that_do_not_fit(options, says):
    with pytest.raises(ValueError, match=says):
        build(**options)


X = sample(2, 5, 16)
IDS = jnp.zeros((2, 5), int)


@pytest.mark.parametrize(
    ("options", "arguments", "says"),
    [
        ({}, (X[0],), r"takes \[batch, length, features\], not \(5, 16\)"),
        ({}, (X, X[0]), r"not \(2, 5, 16\) and \(5, 16\)"),
        ({}, (X[..., :8],), r"made of 16 features, and x is \(2, 5, 8\)"),
        (dict(memory_width=8), (X,), "made of 8 features, and x is"),
        ({}, (X, X[..., :8]), r"made of 16 features, and memory is \(2, 5, 8\): memory_width="),
        (dict(causal=True), (X, X), "are about the order of one sequence"),
        (dict(window=2), (X, X), "are about the order of one sequence"),
        (dict(rotary_base=1e4), (X, X), "are about the order of one sequence"),
        ({}, (X, dict(cache=KVCache.zeros(2, 8, 4, 4))), "a cache is for attention with causal=True"),
        (
            dict(causal=True),
            (X, dict(cache=KVCache.zeros(2, 8, 4, 4), segment_ids=IDS)),
            "without segment_ids",
        ),
        (dict(causal=True), (X, dict(cache=KVCache.zeros(2, 8, 2, 4))), "do not fit a cache of"),
        (dict(causal=True), (X, dict(cache=KVCache.zeros(1, 8, 4, 4))), "do not fit a cache of"),
        (
            {},
            (X, dict(segment_ids=IDS[:, :3])),
            r"segment_ids is \[batch, length\], here \(2, 5\), not \(2, 3\)",
        ),
        ({}, (X, X, dict(segment_ids=IDS)), "takes both segment_ids= and memory_segment_ids="),
        ({}, (X, dict(segment_ids=IDS, memory_segment_ids=IDS)), "takes both"),
        ({}, (X, X, dict(memory_segment_ids=IDS)), "takes both"),
        ({}, (X, X, dict(segment_ids=IDS, memory_segment_ids=IDS[:1])), "memory_segment_ids is"),
        ({}, (X, dict(mask=jnp.ones((5, 5), bool))), "give all four dimensions"),
        ({}, (X, dict(mask=jnp.ones((2, 2, 5, 5), bool))), r"does not broadcast to \(2, 4, 5, 5\)"),
    ],
)
def test_arguments_that_do_not_fit(options, arguments, says):
    attention = build(**options)
    positional = [a for a in arguments if not isinstance(a, dict)]
    named = next((a for a in arguments if isinstance(a, dict)), {})
    with pytest.raises(ValueError, match=says):
        attention(*positional, **named)


def test_masks_are_bool():
    with pytest.raises(TypeError, match="is bool, True where a query sees a key, not float32"):
        build()(X, mask=jnp.ones((2, 1, 5, 5)))
    query = sample(2, 5, 4, 4)
    assert combine(query, query, None, None) is None


def test_keys_and_values_of_one_shape():
    with pytest.raises(ValueError, match="do not fit a cache"):
        KVCache.zeros(2, 8, 4, 4).append(sample(2, 3, 4, 4), sample(2, 2, 4, 4))


@pytest.mark.parametrize(
    "options, masked",
    grid(
        [
            dict(),
            dict(causal=True),
            dict(causal=True, window=3),
            dict(window=4),
            dict(causal=True, kv_heads=2),
        ],
        [None, "keys", "all"],
        step=6,
    ),
    ids=str,
)
def test_in_chunks_it_is_the_same(options, masked):
    """Values and gradients; no array has the scores of all queries."""
    whole, chunked = build(rotary_base=100.0, **options), build(rotary_base=100.0, chunks=4, **options)
    x = sample(2, 8, 16)
    masks = {"keys": jnp.arange(8)[None, None, None] != 5, "all": sample(2, 1, 8, 8) > -1}
    mask = masks[masked] | jnp.eye(8, dtype=bool)[None, None] if masked == "all" else masks.get(masked)
    (call, weights), (expected, _) = (with_weights(a, mask=mask) for a in (chunked, whole))
    same(call, expected, weights, x)
    shapes = [v.aval.shape for v in results_of(jax.make_jaxpr(call)(weights, x).jaxpr)]
    by_key = [shape for shape in shapes if shape[-1:] == (8,) and len(shape) > 3]
    assert {shape[-2] for shape in by_key if math.prod(shape) == 2 * 4 * 8 * shape[-2]} == {2}


def results_of(jaxpr):
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from results_of(inner)


@pytest.mark.slow
def test_chunks_with_a_cache_and_for_one_token():
    whole, chunked = build(causal=True, rotary_base=100.0), build(causal=True, rotary_base=100.0, chunks=2)
    x = sample(2, 7, 16)
    caches = [a.init_cache(2, 8) for a in (whole, chunked)]
    for part in (x[:, :4], x[:, 4:6], x[:, 6:]):  # the last cannot be divided
        (y, caches[0]), (z, caches[1]) = (a(part, cache=c) for a, c in zip((whole, chunked), caches))
        close(z, y)


@pytest.mark.slow
def test_gradients_of_keys_are_summed_over_chunks_in_float32():
    """In bfloat16 64 chunks would lose most of what comes to a key; so little is lost as at once."""
    query, key, value = (sample(1, 64, 2, 8, seed=n) for n in range(3))

    def gradient(dtype, chunks):
        def loss(key):
            q, k, v = (x.astype(dtype) for x in (query, key, value))
            return chunked_attention(q, k, v, chunks=chunks).astype(jnp.float32).sum()

        return jax.grad(lambda key: loss(key) + 0 * key.sum())(key)

    truth = gradient(jnp.float32, 1)
    errors = [jnp.abs(gradient(jnp.bfloat16, n) - truth).max() for n in (1, 64)]
    assert errors[1] < 2 * errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("window, masked", [*itertools.product([None, 2], [True, False])])
def test_chunks_that_do_not_divide(window, masked):
    """As of tokens whose last is a label alone: the last chunk is shorter. Values and gradients."""
    q, k, v, weights = (sample(2, 7, 2, 8, seed=n) for n in range(4))
    mask = sample(2, 1, 7, 7) > -1 if masked else None
    options = dict(causal=True, window=window)

    def loss(chunks, q, k, v):
        return (chunked_attention(q, k, v, mask, chunks=chunks, **options) * weights).sum()

    found, expected = (jax.value_and_grad(loss, (1, 2, 3))(n, q, k, v) for n in (3, 1))
    jax.tree.map(close, found, expected)
    shapes = [v.aval.shape for v in results_of(jax.make_jaxpr(lambda *a: loss(3, *a))(q, k, v).jaxpr)]
    scores = [s for s in shapes if s[-1:] == (7,) and len(s) > 3 and math.prod(s) == 2 * 2 * 7 * s[-2]]
    assert {shape[-2] for shape in scores} == {3}


def test_no_chunks():
    with pytest.raises(ValueError, match="chunks=0: the queries are at least one part"):
        build(chunks=0)
