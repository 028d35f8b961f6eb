"""Gradients inside of what is differentiated: of a layer, of the whole model, of a first step."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import MOMENTUM, assert_same, born, pipeline, place
from tests.slow import grid

WIDTH, STAGES = 16, 3
X = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
MESH, TASKS = pipeline(STAGES)
PLACEMENT = place(TASKS, *[[("layers", n)] for n in range(STAGES)])


class Net(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(n)) for n in range(STAGES)])

    def layer(self, linear, x):
        return x + jnp.tanh(linear(x))

    def __call__(self, x):
        for linear in self.layers:
            x = self.layer(linear, x)
        return x


class Descending(Net):
    """Each layer goes down its energy, log cosh."""

    def layer(self, linear, x):
        return x - 0.1 * jax.grad(lambda x: jnp.log(jnp.cosh(linear(x))).sum())(x)


class WrittenOut(Net):
    """The same, without a derivative."""

    def layer(self, linear, x):
        return x - 0.1 * jnp.tanh(linear(x)) @ linear.kernel[...].T


def mean_square(model, x):
    return (model(x) ** 2).mean()


def forces(model, x):
    """Those of a learned potential, as for molecules."""
    return ((jax.grad(lambda x: (model(x) ** 2).sum())(x) - 1) ** 2).mean()


def penalty(model, x):
    """A gradient penalty (Gulrajani et al. 2017)."""
    slope = jax.grad(lambda x: model(x)[:, 0].sum())(x)
    return mean_square(model, x) + ((jnp.linalg.norm(slope, axis=-1) - 1) ** 2).mean()


def after_a_step(model, x):
    """MAML (Finn et al. 2017)."""
    graph, params = nnx.split(model)
    grads = jax.grad(lambda params: mean_square(nnx.merge(graph, params), x))(params)
    return mean_square(nnx.merge(graph, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)), x)


def curvature(model, x):
    """Of the loss along x: forward over reverse, and no derivative of that."""
    slope = jax.grad(lambda x: mean_square(model, x))
    return jax.jvp(slope, (x,), (x,))[1]


def train(loss_fn, schedule):
    def step(model, optimizer, x):
        grad_fn = nnx.value_and_grad(loss_fn)
        if schedule is not None:
            grad_fn = mm.microbatch(grad_fn, 0, 2, argnum=1, reduce="mean", schedule=schedule)
        loss, grads = grad_fn(model, x)
        optimizer.update(model, grads)
        return loss

    return step


def check(make, step):
    """Two calls of a step are those of one device; returns its program."""
    reference = make()
    references = reference, nnx.Optimizer(reference, MOMENTUM, wrt=nnx.Param)
    whole, split = nnx.jit(step), mm.jit(step)
    with MESH:
        model = born(make, PLACEMENT)
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, MOMENTUM, wrt=nnx.Param))(model)
        program = split.program(model, optimizer, X)
        for _ in range(2):
            with mm.ignore_transforms():
                expected = whole(*references, X)
            assert_same(split(model, optimizer, X), expected)
        assert_same(nnx.state((model, optimizer)), nnx.state(references))
    return program


@pytest.mark.parametrize(
    "loss_fn, schedule", grid([penalty, forces, after_a_step], [None, "1f1b", "zero-bubble-h1"], step=4)
)
def test_of_the_whole_model(loss_fn, schedule):
    program = check(Net, train(loss_fn, schedule))
    rows = {None: 4}.get(schedule, 2)
    if loss_fn is not after_a_step:  # which sends some products that are as large as weights
        assert {t.shape for t in program.transfers} <= {(rows, WIDTH), (rows,), ()}
    if loss_fn is forces:  # there and back, and what is derived of both; two values more between two stages
        calls = len({t.microbatch for t in program.transfers})
        assert len(program.transfers) <= calls * (4 * (STAGES - 1) + 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, "1f1b", "zero-bubble-h1"])
def test_a_layer_that_takes_one_is_a_layer(schedule):
    """What crosses, and when what runs, is as if it had been written out."""
    programs = [check(make, train(mean_square, schedule)) for make in (Descending, WrittenOut)]
    sent = [[(t.source, t.target, t.shape, t.microbatch) for t in p.transfers] for p in programs]
    assert sent[0] == sent[1]
    assert programs[0].simulate().makespan == programs[1].simulate().makespan


@pytest.mark.parametrize("function", [lambda m, x: m(x), curvature], ids=["layers", "curvature"])
def test_one_that_is_not_differentiated(function):
    make = {curvature: Net}.get(function, Descending)
    reference = nnx.jit(function)(make(), X)
    with MESH:
        model = born(make, PLACEMENT)
        run = mm.jit(function)
        transfers = run.program(model, X).transfers
        assert_same(run(model, X), reference)
    ways = 1 if make is Descending else 4  # forward and backward, both with their tangents
    assert [t.shape for t in transfers] == [(4, WIDTH)] * ways * (STAGES - 1)


def test_curvature_beside_a_gradient():
    """Of the loss along some direction, as second-order optimizers take it: nobody derives that."""

    def step(model, direction, x):
        graph, params = nnx.split(model)
        grads = nnx.grad(mean_square)(model, x)
        slope = jax.grad(lambda params: mean_square(nnx.merge(graph, params), x))
        return grads, jax.jvp(slope, (params,), (nnx.state(direction),))[1]

    reference = nnx.jit(step)(Net(), Net(), X)
    with MESH:
        model, direction = born(Net, PLACEMENT), born(Net, PLACEMENT)
        run = mm.jit(step)
        transfers = run.program(model, direction, X).transfers
        assert_same(run(model, direction, X), reference)
    # Values and gradients, and the tangents of both; some twice, for two gradients are taken.
    assert {t.shape for t in transfers} == {(4, WIDTH)} and len(transfers) <= 7 * (STAGES - 1)


class Growing(nnx.Module):
    """Each layer has more features than the one before."""

    def __init__(self):
        widths = range(WIDTH, WIDTH + 2 * STAGES + 1, 2)
        self.layers = nnx.List(nnx.Linear(a, b, rngs=nnx.Rngs(a)) for a, b in itertools.pairwise(widths))

    def __call__(self, x):
        for linear in self.layers:
            x = jnp.sin(linear(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 2])
def test_curvature_along_a_random_direction(size):
    """What stochastic second-order optimizers estimate (Hutchinson's trace; Sophia, Liu et al. 2023). The
    direction is made where it is read, and what is made of it stays with its layer.
    """

    def step(model, key, x):
        graph, params = nnx.split(model)
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        signs = [jax.random.rademacher(k, w.shape, w.dtype) for k, w in zip(keys, leaves)]
        direction = jax.tree.unflatten(structure, signs)

        def products(params, x):
            slope = jax.grad(lambda params: mean_square(nnx.merge(graph, params), x))
            return jax.jvp(slope, (params,), (direction,))

        if size is not None:
            products = mm.microbatch(products, 0, size, argnum=1, reduce="mean")
        grads, hessian = products(params, x)
        return grads, hessian, sum(jnp.vdot(h, s) for h, s in zip(jax.tree.leaves(hessian), signs))

    key = jax.random.key(0)
    reference = nnx.jit(step)(Growing(), key, X)
    with MESH:
        model = born(Growing, PLACEMENT)
        run = mm.jit(step)
        transfers = [t for t in run.program(model, key, X).transfers if t.shape]
        assert_same(run(model, key, X), reference)
    # Values, gradients, and the tangents of both, of which the first is made anew on the second mesh.
    rows, count = (4, 1) if size is None else (size, 4 // size)
    assert {t.shape[-2:] for t in transfers} == {(rows, WIDTH + 2), (rows, WIDTH + 4)}
    assert len(transfers) == 7 * count


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 1])
def test_a_step_of_each_of_several_tasks(size):
    """MAML, with `jax.vmap` over tasks: the weights of each task stay where their layer is."""

    def loss_fn(model, tasks):
        return jax.vmap(lambda x: after_a_step(model, x))(tasks).mean()

    grad_fn = nnx.value_and_grad(loss_fn)
    if size is not None:
        grad_fn = mm.microbatch(grad_fn, 0, size, argnum=1, reduce="mean")
    tasks = X.reshape(2, 2, WIDTH)
    reference = nnx.jit(grad_fn)(Net(), tasks)
    with MESH:
        model = born(Net, PLACEMENT)
        run = mm.jit(grad_fn)
        transfers = run.program(model, tasks).transfers
        assert_same(run(model, tasks), reference)
    assert max(np.prod(t.shape[-2:]) for t in transfers) < WIDTH**2


class EnergyFirst(Net):
    """A layer that goes down an energy of the layer before, and then others."""

    def __call__(self, x):
        x = jnp.sin(self.layers[0](x))
        x = self.layers[1](jax.grad(lambda x: (x**3).sum())(x))
        return self.layers[2](jnp.sin(x))


class WithPositions(EnergyFirst):
    """What is added to an activation is as large as a microbatch of two rows."""

    def __init__(self):
        super().__init__()
        self.layers[1].positions = nnx.Param(jnp.ones((2, WIDTH)))

    def __call__(self, x):
        x = jnp.sin(self.layers[0](x))
        x = self.layers[1](jax.grad(lambda x: (x**3).sum())(x)) + self.layers[1].positions[...]
        return self.layers[2](jnp.sin(x))


@pytest.mark.parametrize("make, rows", [(EnergyFirst, 1), (WithPositions, 2)])
def test_an_activation_as_large_as_state_is_no_new_value_of_it(make, rows):
    """The next layer reads it, and its weights stay at home."""

    def step(model, optimizer, x):
        grad_fn = nnx.value_and_grad(mean_square)
        loss, grads = mm.microbatch(grad_fn, 0, rows, argnum=1, reduce="mean", schedule="1f1b")(model, x)
        optimizer.update(model, grads)
        return loss

    assert {t.shape for t in check(make, step).transfers} == {(rows, WIDTH)}
