"""Linear layers, embedding, norms, rotary positions and MLPs against Flax and NumPy; names of axes."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.modules.attention import Attention
from mmnnx.modules.embed import Embed
from mmnnx.modules.linear import Linear, LinearGeneral
from mmnnx.modules.logical import constrain, named
from mmnnx.modules.mlp import MLP, SwiGLU
from mmnnx.modules.norm import LayerNorm, RMSNorm
from mmnnx.modules.rotary import RotaryScaling, YarnScaling, rotary, rotary_frequencies
from tests.slow import grid

normal = nnx.initializers.normal(0.5)


def sample(*shape, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def equal_to(layer: nnx.Module, reference: nn.Module, *inputs: jax.Array, rtol: float = 1e-5) -> None:
    """Values and gradients of an NNX layer are those of a linen layer with its weights.

    Compared are the gradients by weights and by floating inputs of a random weighting of the output.
    """
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    out = reference.apply({"params": params}, *inputs)
    weight = sample(*out.shape, seed=9)
    floating = [i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.floating)]

    graph, state = nnx.split(layer)

    def ours(params, *inputs):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(*inputs)

    def grads(fun):
        loss = lambda params, *inputs: (fun(params, *inputs) * weight).sum()
        return jax.jit(jax.grad(loss, (0, *(1 + i for i in floating))))(params, *inputs)

    assert layer(*inputs).dtype == out.dtype
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=rtol)
    close(layer(*inputs), out)
    expected = grads(lambda params, *inputs: reference.apply({"params": params}, *inputs))
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(expected))
    jax.tree.map(close, grads(ours), expected)


def axes(layer: nnx.Module) -> dict[str, tuple]:
    """The names of the axes of each weight; a weight whose names are as many as its axes."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        names = variable.get_metadata("out_sharding")
        assert len(names) == variable.ndim, path
        found[".".join(map(str, path))] = names
    return found


# ------------------------------------------------------------------------------------------ linear, embed


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_a_dense_layer(bias):
    layer = Linear(6, 8, use_bias=bias, kernel_init=normal, bias_init=normal, rngs=nnx.Rngs(0))
    equal_to(layer, nn.Dense(8, use_bias=bias), sample(2, 5, 6))


def test_linear_general_is_a_dense_general():
    layer = LinearGeneral(
        (3, 4), (5, 2), axis=(1, -1), kernel_init=normal, bias_init=normal, rngs=nnx.Rngs(0)
    )
    equal_to(layer, nn.DenseGeneral((5, 2), axis=(1, -1)), sample(2, 3, 6, 4))


def test_linear_general_with_a_batch_axis():
    layer = LinearGeneral(
        4, 5, batch_axis={0: 3}, kernel_axes=("expert", None, "mlp"), bias_init=normal, rngs=nnx.Rngs(0)
    )
    reference = nn.DenseGeneral(5, batch_dims=(0,))
    equal_to(layer, reference, sample(3, 2, 4))
    assert layer.kernel.get_metadata("out_sharding") == ("expert", None, "mlp")
    assert "out_sharding" not in layer.bias.get_metadata()


def test_dtypes_of_a_linear_layer():
    layer = Linear(6, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert (layer.kernel.dtype, layer(sample(2, 6)).dtype) == (jnp.float32, jnp.bfloat16)
    layer = Linear(6, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert (layer.kernel.dtype, layer(sample(2, 6)).dtype) == (jnp.bfloat16, jnp.float32)


def test_names_of_linear_layers():
    rngs = nnx.Rngs(0)
    assert axes(Linear(6, 8, kernel_axes=("embed", "mlp"), rngs=rngs)) == {
        "kernel": ("embed", "mlp"),
        "bias": ("mlp",),
    }
    assert axes(Linear(6, 8, kernel_axes=("a", "b"), bias_axes=(None,), rngs=rngs))["bias"] == (None,)
    assert axes(LinearGeneral(6, (4, 2), kernel_axes=("embed", "heads", None), rngs=rngs)) == {
        "kernel": ("embed", "heads", None),
        "bias": ("heads", None),
    }
    general = LinearGeneral(
        (3, 2), 4, axis=(-2, -1), kernel_axes=("a", "b", "c"), bias_axes=("d",), rngs=rngs
    )
    assert axes(general) == {"kernel": ("a", "b", "c"), "bias": ("d",)}
    assert "out_sharding" not in Linear(6, 8, rngs=rngs).kernel.get_metadata()


def test_named_leaves_values_alone():
    key, shape = jax.random.key(3), (4, 6)
    layer = Linear(
        *shape, kernel_init=lambda k, s, d: normal(key, s, d), kernel_axes=("a", "b"), rngs=nnx.Rngs(0)
    )
    np.testing.assert_array_equal(layer.kernel[...], normal(key, shape))
    assert named(normal) is normal


def test_embed_and_its_tied_output():
    embed = Embed(11, 6, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 5), 0, 11)
    equal_to(embed, nn.Embed(11, 6), tokens)
    params = {"params": nnx.to_pure_dict(nnx.state(embed))}
    expected = nn.Embed(11, 6).apply(params, sample(2, 5, 6), method="attend")
    np.testing.assert_allclose(embed.attend(sample(2, 5, 6)), expected, rtol=1e-5)
    assert axes(embed) == {"embedding": ("vocab", "embed")}
    assert axes(Embed(11, 6, embedding_axes=(None, "x"), rngs=nnx.Rngs(0))) == {"embedding": (None, "x")}


def test_embed_options():
    small = Embed(50, 40, embedding_init=nnx.initializers.normal(0.02), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert small(jnp.array([3])).dtype == jnp.bfloat16
    np.testing.assert_allclose(small.embedding[...].std(), 0.02, rtol=0.1)
    assert jnp.isnan(small(jnp.array([50]))).all()
    lengths = jnp.linalg.norm(Embed(50, 40, rngs=nnx.Rngs(0)).embedding[...], axis=1)
    np.testing.assert_allclose(lengths.mean(), 1.0, rtol=0.1)


# --------------------------------------------------------------------------------------------------- norms


def test_rms_norm():
    norm = RMSNorm(8, scale_init=normal, epsilon=1e-3, rngs=nnx.Rngs(0))
    equal_to(norm, nn.RMSNorm(epsilon=1e-3), sample(2, 5, 8))
    x, scale = np.asarray(sample(2, 5, 8), np.float64), np.asarray(norm.scale[...])
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(norm(sample(2, 5, 8)), expected, rtol=1e-5)


def test_layer_norm():
    norm = LayerNorm(8, scale_init=normal, bias_init=normal, rngs=nnx.Rngs(0))
    equal_to(norm, nn.LayerNorm(), sample(2, 5, 8))
    without = LayerNorm(8, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))
    y = without(sample(2, 5, 8))
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(y.std(-1), 1, rtol=1e-4)


def test_names_of_norms():
    rngs = nnx.Rngs(0)
    assert axes(RMSNorm(8, rngs=rngs)) == {"scale": ("embed",)}
    assert axes(RMSNorm(8, scale_axes=(None,), rngs=rngs)) == {"scale": (None,)}
    assert axes(LayerNorm(8, rngs=rngs)) == {"scale": ("embed",), "bias": ("embed",)}
    both = LayerNorm(8, scale_axes=("a",), bias_axes=("b",), rngs=rngs)
    assert axes(both) == {"scale": ("a",), "bias": ("b",)}


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_norms_round_the_result_alone(norm):
    """In bfloat16 they are the float32 norm of the same input and scale, rounded once at the end."""
    scale_init = lambda key, shape, dtype: jnp.linspace(
        1, 1.01, *shape, dtype=dtype
    )  # all but 1 are lost in bfloat16
    narrow, wide = (norm(64, dtype=d, scale_init=scale_init, rngs=nnx.Rngs(0)) for d in (jnp.bfloat16, None))
    for x in (sample(4, 64), sample(4, 64, dtype=jnp.bfloat16)):
        y = narrow(x)
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(y, wide(x.astype(jnp.float32)).astype(jnp.bfloat16))
    assert wide(sample(4, 64, dtype=jnp.bfloat16)).dtype == jnp.float32


# -------------------------------------------------------------------------------------------------- rotary


def turned(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Rotary positions as complex numbers: pair (i, i + half) is one number, turned by an angle."""
    half = x.shape[-1] // 2
    turns = np.exp(1j * positions[..., None] * base ** (-np.arange(half) / half))
    z = (x[..., :half] + 1j * x[..., half:]) * turns[..., None, :]
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("by_row", [False, True])
def test_rotary_turns_complex_numbers(base, by_row):
    x = sample(2, 5, 3, 8)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 0, 1, 100]]) if by_row else np.arange(5)
    expected = turned(np.asarray(x, np.float64), positions, base)
    np.testing.assert_allclose(rotary(x, jnp.asarray(positions), base), expected, rtol=1e-4, atol=1e-5)


def test_rotary_gradients_turn_back():
    x, weight, positions = sample(2, 5, 3, 8), sample(2, 5, 3, 8, seed=1), jnp.arange(5)
    grad = jax.grad(lambda x: (rotary(x, positions) * weight).sum())(x)
    expected = turned(np.asarray(weight, np.float64), -np.arange(5), 10_000.0)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)


def test_rotary_products_depend_on_the_distance_alone():
    q, k = sample(1, 1, 1, 8), sample(1, 1, 1, 8, seed=1)

    def product(i, j):
        return (rotary(q, jnp.array([i])) * rotary(k, jnp.array([j]))).sum()

    np.testing.assert_allclose(product(9, 4), product(105, 100), rtol=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-3


def test_rotary_keeps_the_dtype_and_computes_in_float32():
    x = sample(1, 4, 2, 8, dtype=jnp.bfloat16)
    y = rotary(x, jnp.arange(1000, 1004))
    assert y.dtype == jnp.bfloat16
    exact = rotary(x.astype(jnp.float32), jnp.arange(1000, 1004))
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


def test_scaling_of_llama_3():
    """The rule as the reference implementation has it: by wavelength, in three cases."""
    scaling = RotaryScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    frequencies = 500_000.0 ** (-np.arange(64) / 64)
    expected = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4.0:
            expected.append(frequency)
        elif wavelength > 8192 / 1.0:
            expected.append(frequency / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    kept = np.isclose(expected, frequencies)
    divided = np.isclose(expected, frequencies / 8)
    assert kept.any() and divided.any() and not (kept | divided).all()
    np.testing.assert_allclose(rotary_frequencies(128, 500_000.0, scaling), expected, rtol=1e-4)
    x, positions = sample(1, 3, 1, 128), jnp.array([5, 500, 5000])
    scaled = rotary(x, positions, 500_000.0, scaling)
    assert jnp.abs(scaled - rotary(x, positions, 500_000.0)).max() > 0.1


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(truncate):
    """Pairs of features by how often they turn in the original context; the size of what is turned."""
    scaling = YarnScaling(4.0, 32_768, beta_fast=32.0, beta_slow=1.0, truncate=truncate)
    frequencies = 1e6 ** (-np.arange(64) / 64)
    turns = 32_768 * frequencies / (2 * np.pi)
    start, end = np.interp(-np.log([32.0, 1.0]), -np.log(turns), np.arange(64))  # (23.57, 39.63)
    if truncate:
        start, end = np.floor(start), np.ceil(end)
    divided = np.interp(np.arange(64), [start, end], [0.0, 1.0])
    expected = frequencies * (1 - divided) + frequencies / 4 * divided
    np.testing.assert_allclose(rotary_frequencies(128, 1e6, scaling), expected, rtol=1e-4)
    x = sample(1, 3, 1, 128)
    size = np.linalg.norm(rotary(x, jnp.arange(3), 1e6, scaling)) / np.linalg.norm(x)
    assert size == pytest.approx(0.1 * np.log(4.0) + 1.0, rel=1e-5)


def test_the_magnitude_of_yarn():
    """The cases of the reference implementation."""
    yarn = functools.partial(YarnScaling, original_max_position_embeddings=64)
    assert yarn(1.0).magnitude == yarn(0.5).magnitude == 1.0
    assert yarn(4.0, attention_factor=1.5, mscale=2.0, mscale_all_dim=1.0).magnitude == 1.5
    assert yarn(4.0, mscale=2.0).magnitude == yarn(4.0).magnitude
    both = yarn(4.0, mscale=2.0, mscale_all_dim=0.5).magnitude
    assert both == pytest.approx((0.2 * np.log(4.0) + 1) / (0.05 * np.log(4.0) + 1))


def test_what_rotary_refuses():
    x = sample(2, 5, 3, 8)
    with pytest.raises(ValueError, match="a head has 7: use an even size"):
        rotary(x[..., :7], jnp.arange(5))
    with pytest.raises(ValueError, match=r"they are \(4,\), and x is \(2, 5, 3, 8\)"):
        rotary(x, jnp.arange(4))
    with pytest.raises(ValueError, match=r"x is \(5, 3, 8\)"):
        rotary(x[0], jnp.arange(5))
    with pytest.raises(TypeError, match="integers, not float32"):
        rotary(x, jnp.arange(5.0))
    with pytest.raises(ValueError, match="must be above zero"):
        RotaryScaling(factor=0.0)
    with pytest.raises(ValueError, match="must be below its high_freq_factor"):
        RotaryScaling(low_freq_factor=4.0)
    for wrong in (dict(factor=0.0), dict(attention_factor=-1.0), dict(beta_slow=0.0)):
        with pytest.raises(ValueError, match="must be above zero"):
            YarnScaling(**{"factor": 2.0, "original_max_position_embeddings": 64} | wrong)
    with pytest.raises(ValueError, match="must not be above its beta_fast"):
        YarnScaling(2.0, 64, beta_slow=33.0)


# ---------------------------------------------------------------------------------------------------- MLPs


class LinenMLP(nn.Module):
    activation: object
    gated: bool = False
    bias: bool = True

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(12, use_bias=self.bias, name="up")(x)
        if self.gated:
            y *= self.activation(nn.Dense(12, use_bias=self.bias, name="gate")(x))
        else:
            y = self.activation(y)
        return nn.Dense(x.shape[-1], use_bias=self.bias, name="down")(y)


exact_gelu = functools.partial(jax.nn.gelu, approximate=False)


@pytest.mark.parametrize("activation, bias", grid([nnx.gelu, exact_gelu, nnx.relu], [True, False]))
def test_mlp(activation, bias):
    inits = dict(kernel_init=normal, out_init=normal, bias_init=normal)
    mlp = MLP(6, 12, activation=activation, bias=bias, **inits, rngs=nnx.Rngs(0))
    equal_to(mlp, LinenMLP(activation, bias=bias), sample(2, 5, 6))


def test_gelu_of_an_mlp_is_the_tanh_formula():
    x = np.asarray(sample(2, 5, 6), np.float64)
    mlp = MLP(6, 12, rngs=nnx.Rngs(0))
    h = x @ np.asarray(mlp.up.kernel[...])
    h = h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))) / 2
    np.testing.assert_allclose(mlp(sample(2, 5, 6)), h @ mlp.down.kernel[...], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", [None, nnx.gelu])
def test_swiglu(activation):
    given = {} if activation is None else {"activation": activation}
    mlp = SwiGLU(6, 12, kernel_init=normal, out_init=normal, **given, rngs=nnx.Rngs(0))
    equal_to(mlp, LinenMLP(activation or nn.silu, gated=True, bias=False), sample(2, 5, 6))
    assert not any(path.endswith("bias") for path in axes(mlp))


@pytest.mark.slow
def test_names_and_types_of_mlps():
    assert axes(SwiGLU(6, 12, rngs=nnx.Rngs(0))) == {
        "gate.kernel": ("embed", "mlp"),
        "up.kernel": ("embed", "mlp"),
        "down.kernel": ("mlp", "embed"),
    }
    other = MLP(6, 12, kernel_axes=("a", "b"), out_axes=("c", "d"), rngs=nnx.Rngs(0))
    assert axes(other) == {
        "up.kernel": ("a", "b"),
        "up.bias": ("b",),
        "down.kernel": ("c", "d"),
        "down.bias": ("d",),
    }
    for kind in (MLP, SwiGLU):
        mlp = kind(6, 12, dtype=jnp.bfloat16, out_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
        assert mlp(sample(3, 6)).dtype == jnp.bfloat16
        np.testing.assert_array_equal(mlp(sample(3, 6)), 0)
        wide = kind(6, 12, rngs=nnx.Rngs(0))
        narrow = kind(6, 12, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(sample(3, 6))
        np.testing.assert_allclose(narrow.astype(jnp.float32), wide(sample(3, 6)), rtol=0.1, atol=0.05)
        half = kind(6, 12, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("kind", [MLP, SwiGLU])
def test_a_subclass_of_an_mlp_overrides_hidden(kind):
    class Doubled(kind):
        def hidden(self, x):
            return 2 * super().hidden(x)

    options = dict(out_init=normal, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(
        Doubled(6, 12, **options)(sample(2, 6)),
        2 * kind(6, 12, **options | dict(rngs=nnx.Rngs(0)))(sample(2, 6)),
        rtol=1e-5,
    )


# --------------------------------------------------------------------------------------------- constraints


def specs_asked_for(fun, rules, shape):
    """The specs of the sharding constraints in `fun` of one array, in a task over 2 (data) x 2 (model)."""
    asked = []

    def watched(x):
        for eqn in jax.make_jaxpr(fun)(x).eqns:
            if eqn.primitive.name == "sharding_constraint":
                asked.append(eqn.params["sharding"].spec)
        return fun(x)

    with mm.MultiMesh(axis_sizes=(2, 2), axis_names=("data", "model")):
        mm.jit(mm.task(watched, task=mm.Task("t", logical_axes=rules)))(sample(*shape))
    return asked


def constrained(names, rules, shape=(4, 6, 8)):
    """The spec that `constrain` asks for inside a task with these rules; None if it asks for none."""
    asked = specs_asked_for(lambda x: constrain(x, *names), rules, shape)
    assert len(asked) <= 1
    return asked[0] if asked else None


FREE = P.UNCONSTRAINED


@pytest.mark.parametrize(
    ("names", "rules", "spec"),
    [
        (
            ("batch", "sequence", "embed"),
            dict(batch="data", embed="data", sequence=None),
            P("data", None, None),
        ),
        (("batch", "sequence", "embed"), dict(batch="data"), P("data", FREE, FREE)),
        (("batch", ..., "mlp"), dict(mlp="model"), P(FREE, FREE, "model")),
        (("batch", ..., "mlp"), dict(batch="data", mlp="model"), P("data", FREE, "model")),
        ((..., "mlp"), dict(mlp=("data", "model")), P(FREE, FREE, ("data", "model"))),
        (("data", None, "mlp"), {}, P("data", None, FREE)),
        (("batch", ..., FREE), dict(batch=None), P(None, FREE, FREE)),
        (("batch", "sequence", "embed"), {}, None),
        ((None, ..., None), dict(mlp="model"), None),
    ],
)
def test_constraints_follow_the_rules_and_leave_the_rest_to_xla(names, rules, spec):
    assert constrained(names, rules) == spec


def test_what_a_mesh_axis_does_not_divide_is_left_to_xla():
    assert constrained(("batch", "kv_heads"), dict(batch="data", kv_heads="model"), (4, 3)) == P("data", FREE)
    assert constrained(("kv_heads",), dict(kv_heads="model"), (3,)) is None


@pytest.mark.parametrize("kind", [MLP, SwiGLU])
def test_mlps_constrain_what_is_between(kind):
    mlp = kind(6, 12, kernel_axes=("embed", "hidden"), rngs=nnx.Rngs(0))
    rules = dict(batch="data", hidden="model")
    assert specs_asked_for(mlp, rules, (4, 6, 6)) == [P(FREE, FREE, "model")]


def test_attention_constrains_its_heads():
    attention = Attention(
        16, 4, 2, query_axes=("embed", "q"), kv_axes=("embed", "kv"), causal=True, rngs=nnx.Rngs(0)
    )
    of_heads = P("data", FREE, "model", None)
    of_keys = P("data", FREE, None, None)
    rules = dict(batch="data", q="model", kv=None)
    assert specs_asked_for(attention, rules, (4, 6, 16)) == [of_heads, of_keys, of_keys, of_heads]


def test_constraints_do_nothing_outside_of_tasks():
    x = sample(2, 3)
    assert constrain(x, "batch", "embed") is x
    assert mm.task(lambda x: constrain(x, "batch", "embed") is x, "t")(x)
    jaxpr = jax.make_jaxpr(lambda x: constrain(x, "batch", "embed"))(x)
    assert not jaxpr.eqns


def test_names_that_do_not_fit_the_dimensions():
    with pytest.raises(ValueError, match=r"1 names \('batch',\) for an array of 2 dimensions"):
        constrain(sample(2, 3), "batch")
    with pytest.raises(ValueError, match="for an array of 1 dimensions"):
        constrain(sample(2), "batch", "embed", ...)
    with pytest.raises(ValueError, match="one `...` for"):
        constrain(sample(2, 3), ..., ...)
    with pytest.raises(ValueError, match="its mesh has no axis 'x'"):
        constrained(("batch",), dict(batch="x"), (4,))
