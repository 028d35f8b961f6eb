"""Convolution blocks against lax and linen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.modules.conv import ConvBlock, ResidualBlock
from tests.slow import few, grid

FEATURES = 8


def inputs(shape=(2, 9, 9, 4), seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def shaken(module: nnx.Module, seed: int = 1) -> nnx.Module:
    """The module with all its parameters moved, so that scales and biases matter."""
    state = nnx.state(module, nnx.Param)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys)]
    nnx.update(module, jax.tree.unflatten(tree, moved))
    return module


LINEN = {
    "batch": lambda **options: linen.BatchNorm(use_running_average=False, **options),
    "group": lambda **options: linen.GroupNorm(num_groups=4, **options),
    "layer": lambda **options: linen.LayerNorm(**options),
}


def by_linen(block: ConvBlock, x, *, strides=(1, 1), padding="SAME", activation=jax.nn.relu):
    """The block as lax and linen have it, with its own weights."""
    y = jax.lax.conv_general_dilated(
        x, block.conv.kernel[...], strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    params = {"params": {"scale": block.norm.scale[...], "bias": block.norm.bias[...]}}
    if block.norm_kind == "batch":
        zeros, ones = jnp.zeros(y.shape[-1]), jnp.ones(y.shape[-1])
        params["batch_stats"] = {"mean": zeros, "var": ones}
    y, _ = LINEN[block.norm_kind]().apply(params, y, mutable=["batch_stats"])
    return activation(y)


@pytest.mark.parametrize(
    "norm, window", grid([*LINEN], [((1, 1), "SAME"), ((2, 2), "SAME"), ((2, 1), "VALID")], step=3)
)
def test_block_is_that_of_lax_and_linen(norm, window):
    strides, padding = window
    block = ConvBlock(4, FEATURES, strides=strides, padding=padding, norm=norm, groups=4, rngs=nnx.Rngs(0))
    shaken(block)
    expected = by_linen(block, inputs(), strides=strides, padding=padding)
    np.testing.assert_allclose(block(inputs()), expected, atol=2e-5)


@few(1)
@pytest.mark.parametrize("norm", LINEN)
def test_gradients_are_those_of_linen(norm):
    block = shaken(ConvBlock(4, FEATURES, norm=norm, groups=4, activation=jnp.tanh, rngs=nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(block, nnx.Param, ...)
    build = lambda params: nnx.merge(graphdef, params, rest, copy=True)

    def gradients(call):
        loss = lambda params, x: jnp.sum(call(build(params), x) ** 3)
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, inputs())

    got = gradients(lambda block, x: block(x))
    expected = gradients(lambda block, x: by_linen(block, x, activation=jnp.tanh))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-3), got, expected)


def test_batch_norm_keeps_averages_and_uses_them_in_evaluation():
    block = ConvBlock(4, FEATURES, activation=None, rngs=nnx.Rngs(0))
    x = inputs()
    y = block.conv(x)
    block(x)
    np.testing.assert_allclose(block.norm.mean[...], 0.01 * y.mean((0, 1, 2)), atol=1e-6)
    block.eval()
    before = block.norm.mean[...]
    expected = (y - before) / jnp.sqrt(block.norm.var[...] + 1e-5)
    np.testing.assert_allclose(block(x), expected, atol=1e-5)
    np.testing.assert_array_equal(block.norm.mean[...], before)


def test_one_number_is_a_square_kernel():
    block = ConvBlock(4, FEATURES, 5, norm="layer", rngs=nnx.Rngs(0))
    assert block.conv.kernel.shape == (5, 5, 4, FEATURES)


def test_types_initialisers_and_names_are_those_given():
    block = ConvBlock(
        4,
        FEATURES,
        rngs=nnx.Rngs(0),
        dtype=jnp.bfloat16,
        kernel_init=nnx.initializers.ones,
        scale_init=nnx.initializers.zeros,
        axes=("a", "b"),
    )
    assert (block.conv.kernel[...] == 1).all() and (block.norm.scale[...] == 0).all()
    assert (block(inputs()).dtype, block.conv.kernel.dtype) == (jnp.bfloat16, jnp.float32)
    half = ConvBlock(4, FEATURES, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert half.conv.kernel.dtype == half.norm.scale.dtype == jnp.bfloat16
    task = mm.Task("t", logical_axes={"b": "model"}, mesh=jax.make_mesh((2,), ("model",)))
    lookup = mm.TaskSharding({...: task}).lookup
    assert lookup(("kernel",), block.conv.kernel).sharding.spec == P(None, None, None, "model")
    assert lookup(("scale",), block.norm.scale).sharding.spec == P("model")
    assert lookup(("bias",), block.norm.bias).sharding.spec == P("model")


@pytest.mark.slow
def test_features_over_a_mesh_axis_are_the_same():
    task = mm.Task("conv", logical_axes={"conv_out": "model"}, mesh=jax.make_mesh((4,), ("model",)))
    make = lambda: shaken(ResidualBlock(4, FEATURES, 2, rngs=nnx.Rngs(0)))
    placed = mm.jit(make, out_shardings=mm.TaskSharding({...: task}))()
    run = mm.task(lambda block, x: block(x), task=task)
    got = mm.jit(lambda block, x: run(block, x))(placed, inputs())
    assert placed.first.conv.kernel.addressable_shards[0].data.shape == (3, 3, 4, FEATURES // 4)
    np.testing.assert_allclose(got, make()(inputs()), atol=1e-5)


@few(1)
@pytest.mark.parametrize("norm", LINEN)
def test_residual_block_is_the_sum_of_its_parts(norm):
    block = shaken(ResidualBlock(4, FEATURES, 2, norm=norm, groups=4, rngs=nnx.Rngs(0)))
    x, same = inputs(), lambda y: y
    inner = by_linen(block.second, by_linen(block.first, x, strides=(2, 2)), activation=same)
    shortcut = by_linen(block.shortcut, x, strides=(2, 2), activation=same)
    np.testing.assert_allclose(block(x), jax.nn.relu(inner + shortcut), atol=5e-5)
    assert block(x).shape == (2, 5, 5, FEATURES)


def test_a_new_residual_block_passes_on_its_shortcut():
    x = inputs()
    block = ResidualBlock(4, 4, activation=jax.nn.gelu, norm="layer", rngs=nnx.Rngs(0))
    assert block.shortcut is None
    np.testing.assert_allclose(block(x), jax.nn.gelu(x), atol=1e-6)


class Unscaled(ConvBlock):
    def make_norm(self, features, **options):
        return nnx.RMSNorm(features, rngs=options["rngs"])


def test_the_norm_can_be_overridden():
    block = Unscaled(4, FEATURES, activation=None, rngs=nnx.Rngs(0))
    y = block(inputs())
    np.testing.assert_allclose(jnp.mean(y**2, axis=-1), jnp.ones((2, 9, 9)), rtol=1e-3)


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(norm="instance"), "norm='instance' is none of 'batch', 'group', 'layer'"),
        (dict(norm="group", groups=3), "groups=3 does not divide 8 features"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        ConvBlock(4, FEATURES, rngs=nnx.Rngs(0), **options)


def test_activations_have_the_axis_of_the_kernel():
    task = mm.Task("conv", logical_axes={"features": "model"}, mesh=jax.make_mesh((4,), ("model",)))
    block = ConvBlock(4, FEATURES, axes=("inputs", "features"), rngs=nnx.Rngs(0))
    call = mm.jit(lambda block, x: mm.task(lambda x: block(x), task=task)(x))
    assert call(block, inputs()).sharding.spec[-1] == "model"
