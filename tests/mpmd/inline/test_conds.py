"""`cond` and `while`: in one task whatever they are handed; a `cond` of several becomes one for each."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import mmnnx as mm
from mmnnx.mpmd.partition.scalar_packing import FEWEST
from tests.mpmd.parity import assert_same, born, pipeline, place, values
from tests.slow import all_but, few, grid


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros(4))


def counted(m, x):
    m.count[...] += 1
    return m.a(x)


IN_ONE_TASK = {
    "closed over": lambda m, x: lax.cond(x.sum() > 0, lambda x: m.a(x), lambda x: x, x),
    "nnx.cond": lambda m, x: nnx.cond(x.sum() > 0, lambda m, x: m.a(x), lambda m, x: x, m, x),
    "nnx.cond, written": lambda m, x: nnx.cond(x.sum() > 0, counted, lambda m, x: x, m, x),
    "nnx.switch": lambda m, x: nnx.switch(1, [lambda m, x: m.a(x), lambda m, x: x], m, x),
    "nnx.while_loop": lambda m, x: nnx.while_loop(
        lambda c: c[1] < 3, lambda c: (c[0], c[1] + 1, c[0].a(c[2])), (m, 0, x)
    )[2],
    "unused operand": lambda m, x: lax.cond(
        x.sum() > 0, lambda x, k: m.a(x), lambda x, k: x, x, m.b.kernel[...]
    ),
    "only its shape": lambda m, x: lax.while_loop(
        lambda c: c[1] < m.b(x).shape[0], lambda c: (m.a(c[0]), c[1] + 1), (x, 0)
    )[0],
}


def either(m, x, n):
    """Branches that go through the tasks in one order, in the other, and not at all."""
    branches = [lambda m, x: m.b(jnp.tanh(m.a(x))), lambda m, x: m.a(jnp.tanh(m.b(x))), lambda m, x: 2 * x]
    return nnx.switch(n, branches, m, x)


def chosen(m, x, n):
    """No branch computes anything, and each result is of another task."""
    kernels = m.a.kernel[...], m.b.kernel[...]
    a, b = lax.cond(n > 0, lambda a, b: (a, b), lambda a, b: (2.0 * a, 3.0 * b), *kernels)
    return jax.nn.relu(x @ a) @ b


def written(m, x, n):
    def write(m, x):
        m.count[...] += x.sum()
        m.b.bias[...] = m.b.bias[...] + m.a(x).mean(0)
        return m.b(x)

    return nnx.cond(n > 0, write, lambda m, x: m.a(x), m, x)


def within(m, x, n):
    """In a loop and in each other."""

    def body(c, i):
        inner = lambda c: lax.cond(i > 1, lambda c: m.b(c), lambda c: c + 1, m.a(c))
        return lax.cond(i < n + 2, inner, lambda c: c * 2, c), c.sum()

    c, sums = lax.scan(body, x, jnp.arange(4))
    return c + sums.sum()


IN_TWO_TASKS = {f.__name__: f for f in (either, chosen, written, within)}


def placed():
    mesh, tasks = pipeline(2)
    with mesh:
        return mesh, born(Model, place(tasks, ["a", "count"], ["b"]))


@few(3)
@pytest.mark.parametrize("kind", IN_ONE_TASK)
def test_in_one_task(kind):
    """The rest of a module that is an operand, and what nothing reads, does not count."""
    whole, alone = Model(), nnx.jit(lambda m, x: m.b(IN_ONE_TASK[kind](m, x)))
    mesh, model = placed()
    with mesh:
        run = mm.jit(lambda m, x: m.b(IN_ONE_TASK[kind](m, x)))
        for x in (np.ones((2, 4), np.float32), -np.ones((2, 4), np.float32)):
            np.testing.assert_allclose(run(model, x), alone(whole, x), rtol=1e-6)
            np.testing.assert_array_equal(model.count[...], whole.count[...])
        assert {t.shape for t in run.program(model, x).transfers} == {(2, 4)}


@pytest.mark.parametrize("kind, differentiated", grid([*IN_TWO_TASKS], [True, False], step=4))
def test_in_two_tasks(kind, differentiated):
    """One cond for each task, whichever branch is taken."""

    def run(m, x, n):
        if not differentiated:
            return IN_TWO_TASKS[kind](m, x, n)
        return nnx.value_and_grad(lambda m: (IN_TWO_TASKS[kind](m, x, n) ** 2).mean())(m)

    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    whole, alone, split = Model(), nnx.jit(run), mm.jit(run)
    mesh, model = placed()
    with mesh:
        for n in range(3):
            expected = values((alone(whole, x, n), nnx.state(whole)))
            assert_same(values((split(model, x, n), nnx.state(model))), expected, 1e-5)
            assert model.b.bias[...].sharding.device_set == {mesh.mesh.devices[1]}


OPTIMIZERS = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "MultiSteps of a chain": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)), 3
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "apply_if_finite of what has no state": lambda: optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-2)), 3
    ),
    "novograd": lambda: optax.novograd(1e-2),
    "mechanize": lambda: optax.contrib.mechanize(optax.adam(1e-2)),
}


@pytest.mark.parametrize(
    "kind",
    all_but(["MultiSteps of a chain", "apply_if_finite of what has no state", "mechanize"], OPTIMIZERS),
)
def test_optimizers_that_hold_a_cond(kind):
    """Over four steps, in one of which the gradients are not finite."""

    def step(model, optimizer, x):
        grad_fn = nnx.value_and_grad(lambda m, x: (m.b(jnp.tanh(m.a(x))) ** 2).mean())
        loss, grads = mm.microbatch(grad_fn, 0, 2, argnum=1, reduce="mean")(model, x)
        optimizer.update(model, grads)
        return loss

    def make(model):
        return nnx.Optimizer(model, OPTIMIZERS[kind](), wrt=nnx.Param)

    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    batches = [x, x * (np.inf if kind.startswith("apply_if_finite") else 2), x, x]
    whole = Model()
    optimizer = make(whole)
    mesh, split = placed()
    with mesh:
        split_optimizer = mm.jit(make)(split)
        run, alone = mm.jit(step), nnx.jit(step)
        for batch in batches:
            alone(whole, optimizer, batch)
            run(split, split_optimizer, batch)
            expected = values((nnx.state(whole), nnx.state(optimizer)))
            assert_same(values((nnx.state(split), nnx.state(split_optimizer))), expected, 1e-4)
        transfers = run.program(split, split_optimizer, x).transfers
    sizes = [math.prod(t.shape) for t in transfers if t.microbatch is None]
    # Each task's state is updated there: no gradient goes anywhere, but what is known of all of them.
    assert max(sizes, default=0) <= (1 if kind.startswith("MultiSteps") else FEWEST)


def test_refused():
    def run(m, x):
        def said(x):
            jax.debug.print("{}", x.sum())
            return m.b(m.a(x))

        return lax.cond(x.sum() > 0, said, lambda x: x, x)

    mesh, model = placed()
    with mesh, pytest.raises(ValueError, match="'cond' contains computation of 2 tasks: stage0.*stage1"):
        mm.jit(run)(model, jnp.ones((2, 4)))
