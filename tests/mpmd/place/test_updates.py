"""What an optimizer does after the gradients: where they are, in one program for each task."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import assert_same, born, pipeline, values
from tests.slow import all_but, grid

STAGES, WIDTH = 3, 8


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(STAGES)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


class WithScalars(Model):
    """Parameters without dimensions, which every task has a copy of."""

    def __init__(self):
        super().__init__()
        self.gain = nnx.List([nnx.Param(jnp.float32(n + 1)) for n in range(STAGES)])

    def __call__(self, x):
        for layer, gain in zip(self.layers, self.gain):
            x = x + jnp.tanh(layer(x)) * gain[...]
        return x


def custom(rule):
    """An optimizer by its rule: from whether the step is an even one, gradients and a moment to updates and
    the next moment."""

    def update(grads, state, params=None):
        updates, moment = rule(state[1] % 2 == 0, grads, state[0])
        return updates, (moment, state[1] + 1)

    return lambda: optax.GradientTransformation(lambda p: (times(0, p), jnp.zeros((), jnp.int32)), update)


def times(k, tree):
    return jax.tree.map(lambda x: k * x, tree)


def accumulated(even, grads, moment):
    moment = jax.tree.map(jnp.add, moment, grads)
    updates = lax.cond(even, lambda moment: times(-0.1, moment), lambda moment: times(0, moment), moment)
    return updates, lax.cond(even, optax.tree.zeros_like, lambda moment: moment, moment)


def stored(even, grads, moment):
    return times(-0.1, grads), lax.cond(even, lambda grads: grads, optax.tree.zeros_like, grads)


def nested(even, grads, moment):
    def first(grads, moment):
        return lax.cond(
            even, lambda g, m: (times(-0.1, g), m), lambda g, m: (times(-0.2, m), g), grads, moment
        )

    def second(grads, moment):
        return times(-0.1, moment), lax.cond(even, lambda g: g, lambda g: times(0.5, g), grads)

    return lax.cond(even, second, first, grads, moment)


def jitted(even, grads, moment):
    halved = jax.jit(lambda g: lax.cond(even, lambda g: times(0.5, g), lambda g: g, g))
    return times(-0.1, halved(grads)), moment


BY_THEMSELVES = {
    "adamw": lambda: optax.adamw(1e-2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0, 10)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "MultiSteps without state": lambda: optax.MultiSteps(optax.sgd(1e-2), 2),
    **{rule.__name__: custom(rule) for rule in (accumulated, stored, nested, jitted)},
}
TOGETHER = {  # by what is known of all gradients
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.sgd(1e-2)),
    "prodigy": lambda: optax.contrib.prodigy(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(1e-2), 3),
}
OPTIMIZERS = BY_THEMSELVES | TOGETHER
QUICK = {
    "adamw",
    "adafactor",
    "MultiSteps",
    "schedule_free",
    "stored",
    "nested",
    "clip_by_global_norm",
    "prodigy",
}
MESH, TASKS = pipeline(STAGES)
PLACEMENT = mm.TaskSharding({mm.path({"layers", "gain"}, n): (TASKS[n], P()) for n in range(STAGES)})
BATCH = np.random.default_rng(0).normal(size=(6, WIDTH)).astype(np.float32)


def step_with(microbatch):
    def step(model, optimizer, x):
        grad_fn = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())
        if microbatch:
            grad_fn = mm.microbatch(grad_fn, 0, microbatch, argnum=1, reduce="mean", schedule="1f1b")
        loss, grads = grad_fn(model, x)
        optimizer.update(model, grads)
        return loss

    return step


def made(kind):
    return lambda model: nnx.Optimizer(model, OPTIMIZERS[kind](), wrt=nnx.Param)


@functools.cache
def program(kind, microbatch):
    with MESH:
        model = born(Model, PLACEMENT)
        return mm.jit(step_with(microbatch)).program(model, mm.jit(made(kind))(model), BATCH)


@pytest.mark.parametrize("kind", all_but(QUICK, OPTIMIZERS))
def test_no_gradient_is_sent(kind):
    sent = [t for t in program(kind, 2).transfers if t.microbatch is None]
    assert max((math.prod(t.shape) for t in sent), default=0) < WIDTH
    assert not sent or kind in TOGETHER


@pytest.mark.parametrize("kind", all_but(QUICK, BY_THEMSELVES))
def test_one_program_for_each_task(kind):
    """After the loop; the other one makes the zeros that gradients are added to."""
    calls = [c for c in program(kind, 2).calls if c.microbatch is None]
    assert len(calls) == 2 * STAGES


@pytest.mark.parametrize("kind", all_but(QUICK, BY_THEMSELVES))
def test_nothing_of_it_is_computed_beside_the_forward(kind):
    """A moment times its decay would be kept through the whole step."""

    def kept(kind):
        calls = program(kind, None).calls
        return [[v.aval.shape for v in c.fragment.outvars] for c in calls if c.phase == "forward"]

    assert kept(kind) == kept("adamw")


@pytest.mark.parametrize(
    "kind, microbatch", grid(sorted(OPTIMIZERS.keys() - {"adamw", "lamb", "muon"}), [2, None], step=15)
)
def test_parity(kind, microbatch):
    step, whole = step_with(microbatch), born(WithScalars, None)
    optimizer, alone = made(kind)(whole), nnx.jit(step)
    with MESH:
        split = born(WithScalars, PLACEMENT)
        split_optimizer, run = mm.jit(made(kind))(split), mm.jit(step)
        for _ in range(3):
            alone(whole, optimizer, BATCH)
            run(split, split_optimizer, BATCH)
    found, expected = (values(nnx.state(x)) for x in ((split, split_optimizer), (whole, optimizer)))
    assert_same(found, expected, 1e-4)
    assert {d for x in jax.tree.leaves(nnx.state(split)) for d in x.devices()} == set(MESH.mesh.devices.flat)


@pytest.mark.slow
def test_the_better_of_two_models_takes_the_place_of_the_other():
    """A population (Jaderberg et al. 2017): weights and moments cross, and nothing of what makes them."""

    class Population(nnx.Module):
        def __init__(self):
            self.models = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(n)) for n in range(2))

    optimizers_of = lambda p: nnx.List(nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param) for m in p.models)

    def step(population, optimizers, x):
        losses, states = [], []
        for model, optimizer in zip(population.models, optimizers):
            loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
            optimizer.update(model, grads)
            losses.append(loss)
            states.append(nnx.state((model, optimizer)))
        take = lambda better, a, b: lax.cond(better, lambda a, b: a, lambda a, b: b, a, b)
        new = [take(losses[1 - n] < losses[n], states[1 - n], states[n]) for n in range(2)]
        for both, state in zip(zip(population.models, optimizers), new):
            nnx.update(both, state)
        return losses

    whole = Population()
    with MESH:
        population = born(
            Population, mm.TaskSharding({mm.path("models", n): (TASKS[n], P()) for n in range(2)})
        )
        optimizers, split = mm.jit(optimizers_of)(population), mm.jit(step)
        sent = [t.shape for t in split.program(population, optimizers, BATCH).transfers]
        found = split(population, optimizers, BATCH)
    state = whole, optimizers_of(whole)
    assert_same(found, nnx.jit(step)(*state, BATCH))
    assert_same(nnx.state((population, optimizers)), nnx.state(state))
    assert sent.count((WIDTH, WIDTH)) == sent.count((WIDTH,)) == 6


def test_an_update_by_hand():
    """Chosen by a cond over all gradients, and added to all parameters in one jitted function."""

    def step(model, x):
        grads = nnx.grad(lambda model, x: (model(x) ** 2).mean())(model, x)
        small = sum((g**2).sum() for g in jax.tree.leaves(grads)) < 1e6
        scaled, zeros = (lambda grads, k=k: jax.tree.map(lambda g: k * g, grads) for k in (-0.1, 0.0))
        updates = lax.cond(small, scaled, zeros, grads)
        nnx.update(model, jax.jit(optax.apply_updates)(nnx.state(model, nnx.Param), updates))

    with MESH:
        split = born(Model, PLACEMENT)
        sent = mm.jit(step).program(split, BATCH).transfers
        mm.jit(step)(split, BATCH)
    whole = Model()
    nnx.jit(step)(whole, BATCH)
    assert_same(values(nnx.state(split)), values(nnx.state(whole)), 1e-4)
    assert {t.shape for t in sent} == {(), BATCH.shape}  # activations, their gradients, and sums of squares


@pytest.mark.parametrize("size", all_but([None], [None, 2]))
def test_gradients_that_learned_scalars_weigh(size):
    """GradNorm (Chen et al. 2018): the scalars go to the gradients."""

    class Scales(nnx.Module):
        def __init__(self):
            self.log = nnx.Param(jnp.array([0.5, 2.0]))

    losses = [lambda model, x: (model(x) ** 2).mean(), lambda model, x: jnp.abs(model(x)).mean()]

    def step(model, scales, x):
        def both(model, x):
            return [nnx.grad(loss)(model, x) for loss in losses]

        if size is not None:
            both = mm.microbatch(both, 0, size, argnum=1, reduce="mean")
        a, b = jnp.exp(scales.log[...])
        grads = jax.tree.map(lambda g, h: a * g + b * h, *both(model, x))
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), grads))
        scales.log[...] *= 1 + 0.1 * norm
        return norm

    with MESH:
        split = born(Model, PLACEMENT), born(Scales, mm.TaskSharding({...: (TASKS[-1], P())}))
        run = mm.jit(step)
        sent = run.program(*split, BATCH).transfers
        found = run(*split, BATCH)
    whole = Model(), Scales()
    assert_same(found, nnx.jit(step)(*whole, BATCH))
    assert_same(nnx.state(split), nnx.state(whole))
    assert max(math.prod(t.shape) for t in sent) <= BATCH.size


def test_gradients_of_each_example():
    """Clipped by norm and averaged, as for differential privacy (Abadi et al. 2016). Norms are sent, biases
    have their gradients where kernels have them.
    """

    class Chain(Model):
        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    def step(model, x):
        grads = nnx.vmap(nnx.grad(lambda m, x: (m(x[None]) ** 2).mean()), in_axes=(None, 0))(model, x)
        of_each = lambda g: (g**2).sum(range(1, g.ndim))
        norms = jnp.sqrt(sum(map(of_each, jax.tree.leaves(grads))))
        clip = lambda g: jnp.einsum("n,n...->...", jnp.minimum(1, 0.1 / norms), g) / len(x)
        nnx.update(model, jax.tree.map(lambda w, g: w - clip(g), nnx.state(model), grads))
        return norms

    with MESH:
        split, run = born(Chain, PLACEMENT), mm.jit(step)
        sent = run.program(split, BATCH).transfers
        found = run(split, BATCH)
    whole = Chain()
    assert_same(found, nnx.jit(step)(whole, BATCH))
    assert_same(nnx.state(split), nnx.state(whole))
    rows = len(BATCH)
    assert {math.prod(t.shape) for t in sent} == {rows * WIDTH, rows}
