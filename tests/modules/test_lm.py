"""The language model: it sees no future, its heads are what they claim, and its weights are named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmnnx.modules import LM, LMConfig
from mmnnx.modules.lm import rotate

SMALL = dict(vocab=32, layers=2, width=16, heads=4, kv_heads=2, mlp=24)


def new(seed: int = 0, **options) -> LM:
    return LM(LMConfig(**(SMALL | options)), rngs=nnx.Rngs(seed))


def build(seed: int = 0, **options) -> LM:
    """A model whose blocks do something: a new one's pass on what they get."""
    model = new(seed, **options)
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    for block in model.blocks:
        for layer in (block.attention.out, block.mlp.down):
            layer.kernel.set_value(0.3 * jax.random.normal(next(keys), layer.kernel.shape))
    return model


def tokens(shape=(2, 10), seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, 32)


def test_logits_have_a_shape_and_are_float32_whatever_it_computes_in():
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = build(dtype=dtype)(tokens())
        assert (logits.shape, logits.dtype) == ((2, 10, 32), jnp.float32)


def test_weights_are_float32_whatever_it_computes_in():
    state = nnx.state(build(dtype=jnp.bfloat16), nnx.Param)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}


def test_new_blocks_pass_on_what_they_get():
    x = jax.random.normal(jax.random.key(0), (2, 10, 16))
    np.testing.assert_array_equal(new().blocks[0](x), x)
    assert jnp.abs(build().blocks[0](x) - x).max() > 0.1


def test_no_position_sees_a_later_one():
    model, a = build(), tokens()
    b = a.at[:, 6].add(1) % 32
    before, after = model(a), model(b)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (jnp.abs(before[:, 6:] - after[:, 6:]).max(axis=(0, 2)) > 1e-6).all()


def test_positions_matter():
    model = build()
    a = jnp.array([[1, 2, 3, 4]])
    b = jnp.array([[2, 1, 3, 4]])
    assert jnp.abs(model(a)[0, -1] - model(b)[0, -1]).max() > 1e-6


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, 8))
    q = rotate(jnp.tile(x, (1, 12, 1, 1)))[0, :, 0]
    k = rotate(jnp.tile(x[..., ::-1], (1, 12, 1, 1)))[0, :, 0]
    np.testing.assert_allclose(jnp.linalg.norm(q, axis=-1), jnp.linalg.norm(x), rtol=1e-5)
    products = q @ k.T
    for distance in range(-5, 6):
        np.testing.assert_allclose(
            jnp.diagonal(products, distance), products.diagonal(distance)[0], atol=1e-4
        )
    assert products[0].std() > 1e-3


def test_a_key_value_head_serves_neighbouring_query_heads():
    """Grouped-query attention equals full attention whose key and value heads are repeated."""
    grouped, full = build(), build(kv_heads=4)
    state = nnx.to_pure_dict(nnx.state(grouped))
    for block in state["blocks"].values():
        for name in ("key", "value"):
            kernel = block["attention"][name]["kernel"].reshape(16, 2, 4)
            block["attention"][name]["kernel"] = jnp.repeat(kernel, 2, axis=1).reshape(16, 16)
    nnx.update(full, state)
    np.testing.assert_allclose(full(tokens()), grouped(tokens()), rtol=1e-5, atol=1e-6)


def test_loss_is_the_mean_cross_entropy_of_the_next_token():
    model, batch = build(), tokens()
    log_p = jax.nn.log_softmax(model(batch[:, :-1]))
    expected = -np.mean([log_p[i, j, batch[i, j + 1]] for i in range(2) for j in range(9)])
    np.testing.assert_allclose(model.loss(batch), expected, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_first_loss_is_that_of_a_uniform_guess(tied):
    np.testing.assert_allclose(new(tied=tied).loss(tokens((8, 40))), np.log(32), atol=0.15)


def test_tied_output_is_the_embedding():
    untied, tied = build(), build(tied=True)
    assert hasattr(untied, "head") and not hasattr(tied, "head")
    grads = nnx.grad(lambda model: model.loss(tokens()))(tied)
    assert (
        jnp.abs(grads["embed"]["embedding"][...]).sum(axis=1) > 0
    ).all()  # tokens never read are predicted


def test_every_weight_names_its_axes():
    names = {}
    for path, variable in nnx.to_flat_state(nnx.state(build(), nnx.Param)):
        axes = variable.get_metadata("out_sharding")
        assert len(axes) == variable.ndim, path
        names.setdefault(path[-2], set()).add(axes)
    assert names["out"] == {("heads", "embed")}
    assert names["gate"] == {("embed", "mlp")}
    assert names["embed"] == {("vocab", "embed")}
    assert names["head"] == {("embed", "vocab")}


def test_names_of_axes_do_not_disturb_a_mesh_that_lacks_them():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    with jax.set_mesh(mesh):
        model = build()
    np.testing.assert_array_equal(model(tokens()), build()(tokens()))


def test_works_under_jit():
    model = build()
    np.testing.assert_allclose(
        nnx.jit(lambda m, x: m(x))(model, tokens()), model(tokens()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(width=18), "width 18 is not divisible by 4 heads"),
        (dict(width=12), "leaves 3 features a head"),
        (dict(kv_heads=3), "4 heads are not divisible by 3 key-value heads"),
    ],
)
def test_sizes_that_do_not_fit(options, says):
    with pytest.raises(ValueError, match=says):
        LMConfig(**(SMALL | options))
