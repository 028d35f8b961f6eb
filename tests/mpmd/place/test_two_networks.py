"""Two networks on meshes of their own, one of which is used several times: what crosses is of the batch."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import assert_same, born, pipeline, place
from tests.slow import all_but, grid

ROWS, WIDTH = 16, 32
MESH, TASKS = pipeline(3)
SAMPLES, NOISE = np.random.default_rng(0).normal(size=(2, ROWS, 8)).astype(np.float32)


class MLP(nnx.Module):
    def __init__(self, seed, out=8):
        rngs, sizes = nnx.Rngs(seed), (8, WIDTH, WIDTH, out)
        self.layers = nnx.List(nnx.Linear(*io, rngs=rngs) for io in zip(sizes, sizes[1:]))

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)


def critic_of(first, d, g, xz):
    """A critic's loss (Goodfellow et al. 2014), with one or the other of its two passes written first."""
    if first == "fake":
        fake = d(jax.lax.stop_gradient(g(xz[1])))
        return (fake - d(xz[0])).mean()
    real = d(xz[0])
    return (d(jax.lax.stop_gradient(g(xz[1]))) - real).mean()


def distilled(first, student, teacher, xz):
    """A student's loss by what its teacher says (Hinton et al. 2015), with one or the other written first."""
    runs = {"student": student, "teacher": lambda x: jax.lax.stop_gradient(teacher(x))}
    said = {name: runs[name](xz[0]) for name in (first, *(runs.keys() - {first}))}
    log_student, log_teacher = (jax.nn.log_softmax(said[name]) for name in ("student", "teacher"))
    return (jax.nn.softmax(said["teacher"]) * (log_teacher - log_student)).sum(-1).mean()


def cycle(d, g, xz):
    """Each maps into the domain of the other, and back (CycleGAN, Zhu et al. 2017)."""
    x, y = xz
    return jnp.abs(d(g(x)) - x).mean() + jnp.abs(g(d(y)) - y).mean()


def programs(first, second, step, make=MLP):
    """The program of a step, which is checked, for the networks on these tasks."""
    with MESH:
        split = [born(lambda: make(0), first), born(lambda: MLP(1), second)]
        run = mm.jit(step)
        program = run.program(*split, (SAMPLES, NOISE))
        found = run(*split, (SAMPLES, NOISE))
    whole = [make(0), MLP(1)]
    assert_same(found, nnx.jit(step)(*whole, (SAMPLES, NOISE)))
    assert_same(nnx.state(split), nnx.state(whole))
    return program


def loop(loss_fn, schedule):
    def step(d, g, xz):
        grad_fn = nnx.value_and_grad(loss_fn)
        options = dict(argnum=2, reduce="mean", schedule=schedule, per_call=1)
        loss, grads = mm.microbatch(grad_fn, 0, 4, **options)(d, g, xz)
        descend(d, grads)
        return loss

    return step


def descend(d, grads):
    nnx.update(d, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(d, nnx.Param), grads))


ON_A = place(TASKS[:1], ["layers"])
CRITICS = {
    "on one mesh": place(TASKS[1:2], ["layers"]),
    "on two": place(TASKS[1:], [("layers", 0)], [("layers", 1), ("layers", 2)]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "where, schedule",
    [*itertools.product(CRITICS, [None, "gpipe", "1f1b"])],
)
def test_the_order_of_two_passes_makes_no_difference(where, schedule):
    made = [
        programs(CRITICS[where], ON_A, loop(functools.partial(critic_of, first), schedule))
        for first in ("fake", "real")
    ]
    fake, real = ((p.simulate().makespan, sum(t.nbytes for t in p.transfers)) for p in made)
    assert real == fake
    assert {t.shape[0] for t in made[1].transfers} == {4}


@pytest.mark.slow
def test_a_cycle():
    program = programs(CRITICS["on one mesh"], ON_A, loop(cycle, None))
    assert {t.shape for t in program.transfers if t.shape} == {(4, 8)}


@pytest.mark.parametrize("first, microbatched", grid(["student", "teacher"], [False, True], step=2))
def test_a_loss_is_computed_where_its_gradient_goes(first, microbatched):
    """A teacher's logits go to its student, once, and nothing goes the other way."""
    loss_fn = functools.partial(distilled, first)

    def step(student, teacher, xz):
        loss, grads = nnx.value_and_grad(loss_fn)(student, teacher, xz)
        descend(student, grads)
        return loss

    run, count = (loop(loss_fn, "1f1b"), 4) if microbatched else (step, 1)
    program = programs(CRITICS["on two"], ON_A, run)
    of_teacher = [
        (t.source, t.target, *t.shape[1:]) for t in program.transfers if "stage0" in (t.source, t.target)
    ]
    assert of_teacher == [("stage0", "stage2", 8)] * count
    # The weights of a single layer are read by no backward, but trained.
    one_layer = lambda seed: nnx.Linear(8, 8, rngs=nnx.Rngs(seed))
    program = programs(mm.TaskSharding({...: TASKS[2]}), ON_A, run, one_layer)
    assert [(t.source, t.target) for t in program.transfers] == [("stage0", "stage2")] * count


@pytest.mark.parametrize("microbatched", [False, True])
def test_a_student_of_one_layer_with_momentum(microbatched):
    """The gradient meets the momentum first, and the weights by way of it."""

    def step(student, teacher, xz):
        model, velocity = student.model, student.velocity
        grad_fn = nnx.value_and_grad(functools.partial(distilled, "student"))
        if microbatched:
            grad_fn = mm.microbatch(grad_fn, 0, 4, argnum=2, reduce="mean", schedule="1f1b", per_call=1)
        loss, grads = grad_fn(model, teacher, xz)
        new = jax.tree.map(lambda v, g: 0.9 * v + g, nnx.state(velocity), grads)
        nnx.update(velocity, new)
        descend(model, new)
        return loss

    def make(seed):
        one = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(seed))
        return nnx.Dict(model=one(), velocity=one())

    program = programs(mm.TaskSharding({...: TASKS[2]}), ON_A, step, make)
    assert {(t.source, t.target) for t in program.transfers} == {("stage0", "stage2")}


@pytest.mark.parametrize("steps", all_but([2], [1, 2, 3]))
def test_a_gradient_penalty_at_every_step_of_a_critic(steps):
    """WGAN-GP (Gulrajani et al. 2017): steps after the first need points alone, which are sent ahead."""

    def step(d, g, xz):
        samples, noise = xz
        fake = jax.lax.stop_gradient(g(noise))
        for n in range(steps):
            share = jax.random.uniform(jax.random.key(n), (ROWS, 1))
            between = share * samples + (1 - share) * fake

            def loss_fn(d, between=between):
                slopes = jax.grad(lambda x: d(x).sum())(between)
                penalty = ((jnp.sqrt((slopes**2).sum(-1) + 1e-8) - 1) ** 2).mean()
                return d(fake).mean() - d(samples).mean() + 10.0 * penalty

            loss, grads = nnx.value_and_grad(loss_fn)(d)
            descend(d, grads)
        return loss

    program = programs(CRITICS["on one mesh"], ON_A, step)
    assert {(t.source, t.shape) for t in program.transfers} == {("stage0", (ROWS, 8))}
    assert len(program.transfers) <= steps + 1


def test_a_critic_that_a_loop_trains_and_then_its_generator():
    """Weights that a loop renews are read by a backward that reads nothing else: that of a mean."""

    def step(d, g, xz):
        def body(n, carry):
            d, g, key = carry
            key, noise = jax.random.split(key)
            batch = xz[0], jax.random.normal(noise, xz[1].shape)
            descend(d, nnx.grad(functools.partial(critic_of, "real"))(d, g, batch))
            return d, g, key

        d, g, key = nnx.fori_loop(0, 2, body, (d, g, jax.random.key(0)))
        noise = jax.random.normal(key, xz[1].shape)
        loss, grads = nnx.value_and_grad(lambda g: -d(g(noise)).mean())(g)
        descend(g, grads)
        return loss

    linear = lambda seed: nnx.Linear(8, 8, rngs=nnx.Rngs(seed))
    program = programs(mm.TaskSharding({...: TASKS[1]}), ON_A, step, linear)
    assert max(np.prod(t.shape) for t in program.transfers) <= ROWS * 8
