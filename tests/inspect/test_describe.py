"""``mm.describe`` names the home of each array, and the rule that put it there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mmnnx as mm

P = jax.P
OWN = "its own sharding"


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
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param))(model)
        placed = {piece.path: piece.placed for piece in mm.describe(model).pieces}
        assert placed["first", "kernel"].why == "rule 0: path('first')"
        assert placed["second", "bias"].why == "rule 1: ..."
        assert placed["count",].why == "a scalar without a rule: on every mesh"
        reasons = {piece.path[-2:]: piece.placed.why for piece in mm.describe(optimizer).pieces}
        assert reasons["first", "kernel"] == "its parameter's rule 0: path('first')"
        within = {piece.path: piece.placed for piece in mm.describe(nnx.List([model])).pieces}
        assert within[0, "first", "bias"].why == "rule 0: path('first'), as first.bias"
        elsewhere = jax.device_put(model.first.kernel, jax.devices()[3])
        assert mm.describe(nnx.Dict(first=nnx.Dict(kernel=nnx.Param(elsewhere)))).pieces[0].placed.why == OWN
        own = mm.describe(model.second.kernel)
        text = str(own)
        assert own.pieces[0].placed.why == OWN
        assert all(part in text for part in ("float32[4,4]", "stage1", "2-3", "P(model)", "32 B"))
        assert "to see the rule" in " ".join(text.split())
        assert "to see the rule" not in " ".join(str(mm.describe(model)).split())


def test_an_abstract_mesh_is_no_place():
    abstract = jax.sharding.NamedSharding(jax.sharding.AbstractMesh((2,), ("x",)), P("x"))
    x = jax.ShapeDtypeStruct((4, 4), "float32", sharding=abstract)
    assert "not placed" in str(mm.describe(x))
    assert "float32[4,4]" in str(mm.tabulate(nnx.Dict(w=nnx.Param(x))))


def test_what_nobody_placed():
    text = str(mm.describe(jnp.ones((2, 3))))
    assert "float32[2,3]" in text and "nobody placed it" in text
    assert "not placed" in str(mm.describe(nnx.eval_shape(Model)))
    with pytest.raises(TypeError, match="an NNX object, a Variable or an array is needed, not"):
        mm.describe("model")
