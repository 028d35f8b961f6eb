"""What is read of state on another mesh, and what of it is sent there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import assert_same, born, pipeline, place


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


class Decoder(nnx.Module):
    """Layers of several stages that read caches up to a length, which the first stage has."""

    def __init__(self):
        self.layers = nnx.List(nnx.Linear(8, 8, rngs=nnx.Rngs(n)) for n in range(3))
        self.caches = nnx.List(nnx.Cache(jnp.zeros((4, 64, 8))) for _ in range(3))
        self.length = nnx.Cache(jnp.arange(4))

    def __call__(self, x):
        length = self.length[...]
        for layer, cache in zip(self.layers, self.caches):
            cache[...] = cache[...].at[jnp.arange(4), length].set(layer(x))
            seen = jnp.arange(64) <= length[:, None]
            x = x + jnp.where(seen[..., None], cache[...], 0).sum(1)
        self.length[...] = length + 1
        return x


def test_masks_and_indices_are_made_where_they_are_read():
    """The length is sent once to each stage, not the masks and indices that are made of it."""
    mesh, tasks = pipeline(3)
    x, whole = jnp.linspace(-1, 1, 32).reshape(4, 8), Decoder()
    run = lambda model, x: model(x)
    with mesh:
        owned = [[("layers", n), ("caches", n)] for n in range(3)]
        model = born(Decoder, place(tasks, [*owned[0], "length"], *owned[1:]))
        split = mm.jit(run)
        sent = [(t.source, t.target, t.shape) for t in split.program(model, x).transfers]
        assert_same(split(model, x), nnx.jit(run)(whole, x))
    assert_same(nnx.state(model), nnx.state(whole))
    lengths = [("stage0", "stage1", (4,)), ("stage0", "stage2", (4,))]
    assert sorted(sent) == sorted([*lengths, ("stage0", "stage1", (4, 8)), ("stage1", "stage2", (4, 8))])
