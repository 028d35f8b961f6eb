"""No two results share a buffer, and none shares that of an argument it is not the state of.

What a later call donates takes nothing else along.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from tests import models
from tests.mpmd.parity import pipeline, place
from tests.slow import grid

X = models.vectors()["x"]


def step(model, average, x):
    """One update of a model and of the average of its parameters, as for a teacher or a target network."""
    params, mean = nnx.state(model, nnx.Param), nnx.state(average, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p: 0.9 * p, params))
    nnx.update(average, jax.tree.map(lambda a, p: 0.5 * a + 0.5 * p, mean, nnx.state(model, nnx.Param)))
    return model(x).sum()


def both():
    model = models.MLP(rngs=nnx.Rngs(0))
    return model, nnx.clone(model)


def clone_afterwards(model):
    return nnx.clone(model)


@functools.cache
def on_one_device():
    """Three results, the model and its average."""
    model, average = both()
    jitted = nnx.jit(step)
    return [float(jitted(model, average, X)) for _ in range(3)], model, average


@pytest.mark.parametrize("stages", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("donate, born", grid([0, 1, (0, 1)], ["together", "cloned", "copied over"], step=3))
def test_an_average_of_a_donated_model(stages, born, donate):
    mesh, tasks = pipeline(2)
    rules = place(tasks, [("layers", range(0, 2))], [("layers", range(2, 4))])
    placement = rules if stages == 2 else mm.TaskSharding({...: tasks[0]})
    with mesh:
        model, average = mm.jit(both, out_shardings=placement)()
        if born == "cloned":
            average = mm.jit(clone_afterwards)(model)
        elif born == "copied over":
            mm.jit(lambda model, average: nnx.update(average, nnx.state(model)))(model, average)
        jitted = mm.jit(step, donate_argnums=donate)
        got = [float(jitted(model, average, X)) for _ in range(3)]
    expected, *nodes = on_one_device()
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for one, other in zip((model, average), nodes):
        for a, b in zip(jax.tree.leaves(nnx.state(one)), jax.tree.leaves(nnx.state(other))):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_one_array_as_two_arguments():
    """Donating one of them is refused before anything runs, by the names of both; nothing is lost."""
    mesh, tasks = pipeline(2)
    rules = place(tasks, [("layers", range(0, 2))], [("layers", range(2, 4))])
    with mesh:
        model, average = mm.jit(both, out_shardings=rules)()
        average.layers[1].kernel.set_value(model.layers[1].kernel.get_value())
        with pytest.raises(ValueError, match=r"0\.layers\.1\.kernel and 1\.layers\.1\.kernel are one array"):
            mm.jit(step, donate_argnums=0)(model, average, X)
        assert np.isfinite(float(mm.jit(step)(model, average, X)))


def test_a_constant_result_can_be_donated_every_time():
    mesh, tasks = pipeline(2)
    with mesh:
        make = mm.jit(lambda: nnx.Param(jnp.float32(3)), out_shardings=mm.TaskSharding({...: tasks[0]}))
        double = mm.jit(lambda p: p[...] * 2, donate_argnums=0)
        assert [float(double(make())) for _ in range(3)] == [6, 6, 6]
