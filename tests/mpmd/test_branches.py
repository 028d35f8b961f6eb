"""`cond` and `while`: in one task whatever they are handed, and refused where several tasks are in them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mmnnx as mm
from tests.mpmd.parity import born, pipeline, place


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
IN_TWO = {
    "cond": lambda m, x: nnx.cond(x.sum() > 0, lambda m, x: m.a(x), lambda m, x: m.b(x), m, x),
    "while": lambda m, x: nnx.while_loop(
        lambda c: c[1] < 3, lambda c: (c[0], c[1] + 1, c[0].b(c[0].a(c[2]))), (m, 0, x)
    )[2],
}


def placed():
    mesh, tasks = pipeline(2)
    with mesh:
        return mesh, born(Model, place(tasks, ["a", "count"], ["b"]))


@pytest.mark.parametrize("kind", IN_ONE_TASK)
@pytest.mark.parametrize("sign", [1, -1])
def test_in_one_task(kind, sign):
    """The rest of a module that is an operand, and what nothing reads, does not count."""
    x = sign * np.ones((2, 4), np.float32)
    whole = Model()
    expected = nnx.jit(lambda m, x: m.b(IN_ONE_TASK[kind](m, x)))(whole, x)
    mesh, model = placed()
    with mesh:
        run = mm.jit(lambda m, x: m.b(IN_ONE_TASK[kind](m, x)))
        np.testing.assert_allclose(run(model, x), expected, rtol=1e-6)
        np.testing.assert_array_equal(model.count[...], whole.count[...])
        assert {t.shape for t in run.program(model, x).transfers} == {(2, 4)}


@pytest.mark.parametrize("kind", IN_TWO)
def test_in_two_tasks(kind):
    mesh, model = placed()
    with mesh, pytest.raises(ValueError, match=f"{kind}.* contains computation of 2 tasks: stage0.*stage1"):
        mm.jit(IN_TWO[kind])(model, jnp.ones((2, 4)))
    assert isinstance(jax.device_get(model.a.kernel[...]), np.ndarray)
