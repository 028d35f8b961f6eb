"""What uses new values of state within the step that made them: it runs where they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import MOMENTUM, assert_same, born_with_optimizer, pipeline, place, values
from tests.slow import grid

STAGES, WIDTH = 3, 8


class Net(nnx.Module):
    def __init__(self):
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(n)) for n in range(STAGES))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def updated(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


def evaluated(model, optimizer, x):
    """The loss before the update and after it."""
    return updated(model, optimizer, x), loss_fn(model, x)


def evaluated_in_bfloat16(model, optimizer, x):
    loss = updated(model, optimizer, x)
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), nnx.state(model))
    return loss, loss_fn(nnx.merge(nnx.graphdef(model), half), x.astype(jnp.bfloat16)).astype(jnp.float32)


def adversary(model, optimizer, x):
    """The gradient by the input, through the new weights: such as a GAN's second loss."""
    loss = updated(model, optimizer, x)
    return loss, jax.grad(lambda x: loss_fn(model, x))(x)


def sharpness_aware(model, optimizer, x):
    """Gradients at weights that were moved along the gradient, and are put back (Foret et al. 2020)."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    weights, norm = nnx.state(model, nnx.Param), optax.tree.norm(grads)
    nnx.update(model, jax.tree.map(lambda w, g: w + 0.05 * g / norm, weights, grads))
    second, grads = nnx.value_and_grad(loss_fn)(model, x)
    nnx.update(model, weights)
    optimizer.update(model, grads)
    return loss, second


def twice(model, optimizer, x):
    return updated(model, optimizer, x), updated(model, optimizer, x)


STEPS = [evaluated, evaluated_in_bfloat16, adversary, sharpness_aware, twice]


@pytest.mark.parametrize("step, rows", grid(STEPS, [4, 32], step=5))  # fewer bytes than weights, and more
def test_activations_alone_are_sent(step, rows):
    """Forwards once and backwards once for each loss, beside a few scalars."""
    x = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)
    model = Net()
    whole, alone = (model, nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param)), nnx.jit(step)
    mesh, tasks = pipeline(STAGES)
    with mesh:
        split = born_with_optimizer(Net, place(tasks, *[[("layers", n)] for n in range(STAGES)]), MOMENTUM)
        run = mm.jit(step)
        sent = [t.shape for t in run.program(*split, x).transfers if t.shape]
        for _ in range(2):
            expected = values((alone(*whole, x), *map(nnx.state, whole)))
            assert_same(values((run(*split, x), *map(nnx.state, split))), expected, 1e-4)
    passes = {evaluated: 3, evaluated_in_bfloat16: 3}.get(step, 4)
    assert sent == [(rows, WIDTH)] * passes * (STAGES - 1)


class Residual(Net):
    def __call__(self, x):
        for layer in self.layers:
            normal = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
            x = x + jnp.sin(layer(normal))
        return x


def three_times(model, optimizer, x):
    return [updated(model, optimizer, x) for _ in range(3)]


RESIDUAL = {"evaluated": (evaluated, 3), "sharpness": (sharpness_aware, 4), "three": (three_times, 6)}


@pytest.mark.parametrize("name, is_placed", grid(list(RESIDUAL), [False, True]))
def test_a_second_pass_flows_as_the_first_does(name, is_placed):
    """From stage to stage, where each layer adds to what it reads."""
    step, passes = RESIDUAL[name]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32))
    model = Residual()
    whole = model, nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param)
    mesh, tasks = pipeline(STAGES)
    with mesh:
        placement = place(tasks, *[[("layers", n)] for n in range(STAGES)])
        split = born_with_optimizer(Residual, placement, MOMENTUM)
        batch = jax.device_put(x, split[0].layers[0].kernel.sharding) if is_placed else x
        run = mm.jit(step)
        sent = [t.shape for t in run.program(*split, batch).transfers if t.shape]
        expected = values((nnx.jit(step)(*whole, x), *map(nnx.state, whole)))
        assert_same(values((run(*split, batch), *map(nnx.state, split))), expected, 1e-4)
    assert sent == [x.shape] * passes * (STAGES - 1)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.MultiSteps(optax.adam(1e-2), 2), id="MultiSteps"),
        pytest.param(optax.apply_if_finite(optax.adam(1e-2), 3), id="finite", marks=pytest.mark.slow),
        pytest.param(optax.novograd(1e-2), id="novograd", marks=pytest.mark.slow),
    ],
)
def test_two_steps_of_an_optimizer_that_holds_a_cond(optimizer):
    x = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
    model = Net()
    whole = model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    mesh, tasks = pipeline(STAGES)
    with mesh:
        placement = place(tasks, *[[("layers", n)] for n in range(STAGES)])
        split = born_with_optimizer(Net, placement, optimizer)
        run = mm.jit(twice)
        sent = [t.shape for t in run.program(*split, x).transfers if len(t.shape) > 1]
        expected = values((nnx.jit(twice)(*whole, x), *map(nnx.state, whole)))
        assert_same(values((run(*split, x), *map(nnx.state, split))), expected, 1e-4)
    assert sent == [x.shape] * 4 * (STAGES - 1)
