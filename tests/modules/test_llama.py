"""The language model against the reference: the `transformers` package, given the same weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmnnx.modules.generate import generate
from mmnnx.modules.lm import LM, LMConfig
from tests.modules.llama import EVERY, FILE, FLAVOURS, NEW, PROMPT, our_path, probed, tokens, weight
from tests.slow import few


@pytest.fixture(scope="module", params=FLAVOURS)
def pair(request):
    """What the reference computes, and an `LM` with its weights, every one of them used once."""
    flavour = f"{request.param}/"
    kept = np.load(FILE)
    expected = {name.removeprefix(flavour): kept[name] for name in kept if name.startswith(flavour)}
    model = nnx.eval_shape(lambda: LM(LMConfig(**FLAVOURS[request.param]), rngs=nnx.Rngs(1)))
    variables = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for name in weights(expected):
        variable = variables.pop(our_path(name))
        shape = turned(name, np.empty(variable.shape)).shape
        variable.set_value(jnp.asarray(turned(name, weight(name, shape))))
    assert not variables
    return expected, model


def weights(expected):
    return [key.removeprefix("gradient ") for key in expected if key.startswith("gradient ")]


def turned(name, x):
    """Linear layers hold their weights transposed."""
    return x.T if our_path(name)[-1] == "kernel" else x


@few(1)
def test_logits(pair):
    expected, model = pair
    assert expected["logits"].std() > 0.5
    got = nnx.jit(lambda model, x: model(x))(model, jnp.asarray(tokens()))[:, ::EVERY]
    np.testing.assert_allclose(got, expected["logits"], rtol=1e-3, atol=2e-4)


@few(1)
def test_loss_and_gradients(pair):
    expected, model = pair
    loss, grads = nnx.jit(nnx.value_and_grad(lambda model, x: model.loss(x)))(model, jnp.asarray(tokens()))
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    found = dict(nnx.to_flat_state(grads))
    for name in weights(expected):
        want = expected[f"gradient {name}"]
        got = probed(name, turned(name, np.asarray(found[our_path(name)][...])))
        np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("pair", FLAVOURS, indirect=True)
def test_greedy_generation(pair):
    expected, model = pair
    np.testing.assert_array_equal(generate(model, tokens(PROMPT), NEW), expected["generated"])
