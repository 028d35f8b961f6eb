"""mm.jit inside of mm.jit: part of what is around it, whatever its arguments are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import pipeline
from tests.slow import few

MESH, TASKS = pipeline(2)


def over_both(x):
    return mm.task(lambda y: y * 2, task=TASKS[1])(mm.task(lambda y: y + 1, task=TASKS[0])(x))


@few(1)
@pytest.mark.parametrize(
    "argument", [2.0, np.ones(2, np.float32), jnp.ones(2)], ids=["float", "NumPy", "jax"]
)
def test_an_argument_that_is_not_traced(argument):
    inner = mm.jit(over_both)
    with MESH:
        inner(argument)  # a call like it is known
        found = mm.jit(lambda x: x + inner(argument))(jnp.ones(2))
    np.testing.assert_array_equal(found, 1 + 2 * (argument + np.ones(2)))


def test_a_value_of_the_function_around_it():
    f = lambda jit: lambda x: jax.lax.scan(lambda c, _: (jit(lambda: c * 2)(), None), x, None, length=3)[0]
    np.testing.assert_array_equal(mm.jit(f(mm.jit))(jnp.ones(2)), nnx.jit(f(nnx.jit))(jnp.ones(2)))


def test_callbacks_happen_with_each_call_of_what_is_around_it():
    count = iter(range(10))

    def number():
        return io_callback(lambda: np.float32(next(count)), jax.ShapeDtypeStruct((), jnp.float32))

    inner = mm.jit(lambda: over_both(number()))
    outer = mm.jit(lambda x: x + inner())
    with MESH:
        jax.eval_shape(outer, jnp.float32(0))
        assert [float(outer(jnp.float32(0))) for _ in range(2)] == [2.0, 4.0]


@pytest.mark.parametrize("name", ["in_shardings", "out_shardings"])
def test_shardings_that_do_nothing_there(name):
    with MESH:
        inner = mm.jit(lambda x: x + 1, **{name: NamedSharding(TASKS[0].to_mesh(), P())})
        with pytest.warns(UserWarning, match=f"{name}= of mm.jit.* does nothing inside another"):
            mm.jit(lambda x: inner(x))(jnp.ones(2))
