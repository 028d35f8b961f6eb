"""What is read of state on another mesh, and what of it is sent there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import born, pipeline, place


class Table(nnx.Module):
    def __init__(self):
        self.rows = nnx.Param(jnp.linspace(0, 1, 24).reshape(8, 3))
        self.weight = nnx.Param(jnp.ones((3, 3)))


@pytest.mark.parametrize("loop, sent", [(False, (2, 3)), (True, (8, 3))], ids=["once", "in a loop"])
def test_a_slice_of_state_is_sent_alone_where_it_is_read_once(loop, sent):
    """A loop reads it again and again, and is sent the state once, before it begins."""
    mesh, tasks = pipeline(2)
    x = jnp.linspace(-1, 1, 12).reshape(4, 3)

    def loss(model, x):
        """The second stage reads two rows of what the first one has."""
        read = mm.task(lambda x, w, rows: jnp.tanh(x @ w) @ rows.T, task=tasks[1])
        return read(x, model.weight[...], model.rows[2:4]).sum()

    def run(model, x):
        return mm.microbatch(loss, dim=0, size=1, argnum=1)(model, x) if loop else loss(model, x)

    with mesh:
        model = born(Table, place(tasks, ["rows"], ["weight"]))
        program = mm.jit(run).program(model, x)
        assert [t.shape for t in program.transfers if t.source == "stage0"] == [sent]
        with mm.ignore_transforms():
            expected = jax.jit(lambda x: run(Table(), x))(x)
        np.testing.assert_allclose(mm.jit(run)(model, x), expected, rtol=1e-6)
