"""``mm.describe`` names the home of each array, and the rule that put it there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mmnnx as mm

P = jax.P


class Model(nnx.Module):
    def __init__(self):
        self.first, self.second = (nnx.Linear(4, 4, rngs=nnx.Rngs(n)) for n in range(2))
        self.count = nnx.Variable(jnp.zeros(()))


def test_where_and_why():
    with mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "model"), devices=jax.devices()[:4]):
        tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(2)]
        placement = mm.TaskSharding({mm.path("first"): (tasks[0], P()), ...: (tasks[1], P("model"))})
        abstract = nnx.eval_shape(Model)
        found = {piece.path: piece.placed for piece in mm.describe(abstract, sharding=placement).pieces}
        assert found["first", "kernel"].why == "rule 0: path('first')"
        assert found["second", "bias"].why == "rule 1: ..." and found["second", "bias"].spec == "P(model)"
        assert found["first", "bias"].home.devices == (0, 1)
        model = mm.jit(Model, out_shardings=placement)()
        own = mm.describe(model.second.kernel)
        text = str(own)
        assert own.pieces[0].placed.why == "its own sharding"
        assert all(part in text for part in ("float32[4,4]", "stage1", "2-3", "P(model)", "32 B"))


def test_what_nobody_placed():
    text = str(mm.describe(jnp.ones((2, 3))))
    assert "float32[2,3]" in text and "nobody placed it" in text
    assert "not placed" in str(mm.describe(nnx.eval_shape(Model)))
    with pytest.raises(TypeError, match="an NNX object, a Variable or an array is needed, not"):
        mm.describe("model")
