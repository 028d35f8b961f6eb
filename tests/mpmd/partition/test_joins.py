"""Where branches of a graph meet."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

import mmnnx as mm
from tests import models
from tests.models import make
from tests.mpmd.parity import born, pipeline, place


class Encoders(nnx.Module):
    """Two encoders of one batch, whose product is summed to a quarter of its size for a decoder."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.one, self.other = (nnx.Linear(8, 16, rngs=rngs) for _ in range(2))
        self.decoder = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        both = jnp.tanh(self.one(x)) * jnp.tanh(self.other(x))
        return self.decoder(both.reshape(-1, 4, 4).sum(axis=2))


def test_an_encoder_does_not_wait_for_the_one_beside_it():
    """The join is made on the mesh of the second, but not in its forward."""
    mesh, tasks = pipeline(3)
    with mesh:
        model = born(make(Encoders), place(tasks, ["one"], ["other"], ["decoder"]))
        grad_fn = mm.microbatch(nnx.value_and_grad(models.squared_error), 0, 2, argnum=1, schedule="1f1b")
        program = mm.jit(lambda model, batch: grad_fn(model, batch)).program(model, models.vectors())
    way = ("stage0", "stage1")
    sent = {s for t in program.transfers if (t.source, t.target) == way for s in t.outputs}
    readers = {c.name for c in program.calls if sent & {*c.inputs}}
    assert sent and "stage1 forward" not in readers
