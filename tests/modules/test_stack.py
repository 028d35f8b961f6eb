"""Stacked layers compute what a list of them computes, whole or in segments, on one mesh or on several."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmnnx.modules.stack import Stack, apply_layers
from tests.mpmd.parity import assert_parity, assert_same, pipeline, place
from tests.slow import few

WIDTH = 8


class Layer(nnx.Module):
    """Mixes features; keeps a running mean of what it saw and adds noise to what it makes."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        names = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False)
        self.linear = nnx.Linear(WIDTH, WIDTH, kernel_init=names, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, scale=1.0, *, shift=0.0):
        return x + self.dropout(jnp.tanh(self.linear(self.norm(x)))) * scale + shift


class Counter(nnx.Module):
    """Adds its cache to `x`, and one to its cache."""

    def __init__(self, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs(), (WIDTH,)))

    def __call__(self, x, *, cache=None):
        y = x * self.weight[...]
        return y if cache is None else (y + cache, cache + 1)

    def init_cache(self, size):
        return jnp.full((size,), 10.0)


def stack(length=6, seed=0, make=Layer, **options) -> Stack:
    return Stack(make, length, rngs=nnx.Rngs(seed), **options)


def as_list(stacked: Stack) -> nnx.List:
    """The layers of a stack, taken apart."""
    layers = nnx.List()
    for segment in stacked.segments:
        graphdef, state = nnx.split(segment.layers)
        for n in range(len(segment)):
            layers.append(nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[n], state)))  # noqa: B023
    return layers


def inputs(seed=0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (4, WIDTH))


def loss(call, x):
    return jnp.sum(call(x) ** 2)


@nnx.jit
def of_list(layers, x):
    return nnx.value_and_grad(lambda layers: loss(lambda x: apply_layers(layers, x), x))(layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "segments, remat",
    [*itertools.product([4, 2, 1, (1, 5)], [jax.checkpoint_policies.dots_saveable, True, False])],
)
def test_values_and_gradients_are_those_of_a_list(segments, remat):
    stacked = stack(segments=segments, remat=remat)
    listed = as_list(stacked)

    value, grads = nnx.jit(nnx.value_and_grad(loss))(stacked, inputs())
    expected, each = of_list(listed, inputs())

    np.testing.assert_allclose(value, expected, rtol=1e-6)
    rows = [grads["segments"][s]["layers"] for s in range(len(stacked.segments))]
    together = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rows)
    assert_same(together, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(each[n] for n in range(6))))
    # What BatchNorm wrote is written back, and nothing else changed.
    assert_same(as_list(stacked), listed)
    assert jnp.abs(stacked.segments[0].layers.norm.mean[...]).max() > 0


def test_segments_do_not_change_the_weights_and_layers_have_their_own():
    one, three = stack(), stack(segments=3)
    assert_same(as_list(three), as_list(one), rtol=0)
    kernel = one.segments[0].layers.linear.kernel
    assert len(np.unique(kernel[:, 0, 0])) == 6
    assert not np.array_equal(kernel, stack(seed=1).segments[0].layers.linear.kernel)


@few(2)
@pytest.mark.parametrize(
    ("segments", "lengths"), [(1, [6]), (4, [1, 2, 1, 2]), (6, [1] * 6), ((2, 4), [2, 4]), ([1, 5], [1, 5])]
)
def test_lengths_of_segments(segments, lengths):
    stacked = stack(segments=segments)
    assert [len(segment) for segment in stacked.segments] == lengths
    assert [segment.layers.linear.kernel.shape[0] for segment in stacked.segments] == lengths
    assert len(stacked) == 6


@pytest.mark.parametrize(
    ("length", "segments", "says"),
    [
        (0, 1, "at least one layer, not 0"),
        (3, 4, "3 layers cannot be divided into 4 segments"),
        (3, 0, "3 layers cannot be divided into 0 segments"),
        (3, (1, 1), "segments of 1, 1 layers do not make 3 layers"),
        (3, (3, 0), "segments of 3, 0 layers do not make 3 layers"),
        (3, (), "segments of  layers do not make 3"),
    ],
)
def test_lengths_that_do_not_fit(length, segments, says):
    with pytest.raises(ValueError, match=says):
        stack(length, segments=segments)


def test_axes_are_named_with_layers_in_front():
    metadata = stack().segments[0].layers.linear.kernel.get_metadata()
    assert metadata["out_sharding"] == ("layers", "embed", "mlp")


def test_arguments_reach_every_layer():
    stacked = stack()
    expected = inputs()
    for layer in as_list(stacked):
        expected = layer(expected, 0.5, shift=2.0)
    np.testing.assert_allclose(stacked(inputs(), 0.5, shift=2.0), expected, rtol=1e-5, atol=1e-6)


def test_the_carry_may_be_a_pytree():
    class Both(nnx.Module):
        def __init__(self, rngs):
            self.weight = nnx.Param(jax.random.normal(rngs(), (WIDTH,)))

        def __call__(self, carry):
            x, total = carry
            return x * self.weight[...], total + jnp.sum(x)

    stacked = stack(3, make=Both, segments=2)
    x, total = stacked((inputs(), jnp.float32(0)))
    weights = np.concatenate([segment.layers.weight[...] for segment in stacked.segments])
    partial = [inputs() * np.prod(weights[:n], axis=0) for n in range(4)]
    np.testing.assert_allclose(x, partial[3], rtol=1e-5)
    np.testing.assert_allclose(total, sum(np.sum(p) for p in partial[:3]), rtol=1e-4)


@pytest.mark.parametrize("segments", [1, 2])
def test_each_layer_has_a_cache_of_its_own(segments):
    stacked = stack(4, make=Counter, segments=segments)
    cache = stacked.init_cache(WIDTH)
    assert [leaf.shape for leaf in cache] == [(4 // segments, WIDTH)] * segments
    cache = [leaf + jnp.arange(leaf.shape[0])[:, None] for leaf in cache]  # no two alike
    y, new = stacked(inputs(), cache=cache)
    expected, each = apply_layers(as_list(stacked), inputs(), cache=[row for leaf in cache for row in leaf])
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate(new), np.stack(each))


def test_a_list_needs_a_cache_for_each_layer():
    with pytest.raises(ValueError, match="zip"):
        apply_layers(as_list(stack(2, make=Counter)), inputs(), cache=[jnp.zeros(WIDTH)])


def test_dropout_differs_between_layers_and_calls():
    stacked = stack(3, make=lambda rngs: Layer(rngs, 0.5))
    a, b = stacked(inputs()), stacked(inputs())
    assert jnp.abs(a - b).max() > 1e-3
    np.testing.assert_array_equal(stacked.segments[0].layers.dropout.rngs.count[...], [2, 2, 2])
    keys = jax.random.key_data(stacked.segments[0].layers.dropout.rngs.key[...])
    assert len(np.unique(keys, axis=0)) == 3


def test_a_layer_is_traced_once_for_a_segment():
    traces = []

    class Traced(Counter):
        def __call__(self, x):
            traces.append(x)
            return super().__call__(x)

    nnx.jit(lambda s, x: s(x))(stack(12, make=Traced, segments=2), inputs())
    assert len(traces) <= 4  # a scan may look at its body more than once, but not at every layer


@pytest.mark.slow
@pytest.mark.parametrize("remat", [True, jax.checkpoint_policies.dots_saveable])
def test_a_list_can_be_rematerialised(remat):
    layers = as_list(stack(3))
    plain = nnx.grad(lambda m, x: loss(lambda x: apply_layers(m, x), x))(layers, inputs())
    again = nnx.grad(lambda m, x: loss(lambda x: apply_layers(m, x, remat=remat), x))(layers, inputs())
    assert_same(again, plain)
    graphdef, state = nnx.split(layers)
    call = lambda state, x: apply_layers(nnx.merge(graphdef, state), x, remat=remat)
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(call)(state, inputs()).eqns]
    assert sum(name in ("checkpoint", "remat2", "remat") for name in names) == 3


@pytest.mark.slow
def test_each_stage_scans_its_own_segment():
    """Trained over four stages of two devices: everything equals one device."""

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.blocks = Stack(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs), 6, segments=4, rngs=rngs)
            self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, x):
            return self.head(jnp.tanh(self.blocks(x)))

    mesh, tasks = pipeline(4, 2)
    segments = [("blocks", "segments", n) for n in range(4)]
    placement = place(tasks, *([segment] for segment in segments[:3]), [segments[3], "head"])
    x = np.asarray(jax.random.normal(jax.random.key(1), (8, WIDTH)))
    program = assert_parity(
        Net, lambda model, x: jnp.mean(model(x) ** 2), x, placement, mesh=mesh, microbatch=2, steps=2
    )
    crossing = {t.shape for t in program.transfers if t.shape not in ((), (1,))}
    assert crossing == {(2, WIDTH)}  # activations and their gradients alone
