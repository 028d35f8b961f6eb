"""Layers that are stacked, in whatever pieces, are restored into each other and into lists of layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.modules.stack import Stack
from mmnnx.train.checkpoint import Checkpoints
from mmnnx.train.checkpoint.nnx_state import arrays_of
from tests.mpmd.parity import pipeline

MESHES = {
    "even": (0, 1, 2),
    "uneven": (0, 1, 2, 3),
    "round": (0, 1, 0, 1),
    "segments": (0, 1),
    "list": (0, 1),
}


def make(kind):
    rngs = nnx.Rngs(0)
    layer = lambda rngs: nnx.Dict(linear=nnx.Linear(4, 4, rngs=rngs), dropout=nnx.Dropout(0.1, rngs=rngs))
    if kind == "list":
        layers = nnx.List(layer(nnx.Rngs(n)) for n in range(6))
    else:
        layers = Stack(layer, 6, segments=2 if kind == "segments" else 1, rngs=rngs)
    model = nnx.Dict(blocks=layers)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def placed(kind):
    """A model with other values than it was made with, and the rules that place it."""
    mesh, _ = pipeline(4)
    with mesh:
        tasks = [mm.Task(f"t{n}", mesh_slice={"stage": i}) for n, i in enumerate(MESHES[kind])]
        rules = mm.pipeline_sharding(nnx.eval_shape(lambda: make(kind)[0]), tasks)
        model, optimizer = mm.jit(lambda: make(kind), out_shardings=(rules, rules))()

        @mm.jit
        def change(model, optimizer):
            state = nnx.state((model, optimizer), nnx.Not(nnx.RngState))
            nnx.update((model, optimizer), jax_map(lambda x: x + jnp.arange(x.size).reshape(x.shape), state))

        change(model, optimizer)
    return mesh, rules, {"model": model, "optimizer": optimizer}


def jax_map(fun, tree):
    return jax.tree.map(lambda x: fun(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def rows(nodes):
    """Every layer's values, whatever they are stacked in, by path without what tells stacks from lists."""
    found = {}
    for path, x in arrays_of(nodes).items():
        value = np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        if "blocks" not in path:
            continue
        at = path.index("blocks") + 1
        if path[at] != "segments":
            found[(*path[:at], *path[at + 1 :], int(path[at]))] = value
            continue
        first = 3 * int(path[at + 1])
        for n, row in enumerate(value):
            found[(*path[:at], *path[at + 3 :], first + n)] = row
    return found


@pytest.fixture(scope="module")
def models():
    return {kind: placed(kind) for kind in MESHES}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES)
def test_from_one_into_all(kind, models, tmp_path):
    mesh, _, nodes = models[kind]
    with mesh, Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, nodes)
        checkpoints.wait()
    expected = rows(nodes)
    assert len(expected) > 40
    for other, (mesh, rules, like) in models.items():
        abstract = dict(zip(("model", "optimizer"), nnx.eval_shape(lambda other=other: make(other))))
        with mesh, Checkpoints(tmp_path / "checkpoints") as checkpoints:
            checkpoints.restore(abstract, 1, sharding=rules)
        found = rows(abstract)
        assert found.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_array_equal(found[path], value, err_msg=f"{kind} to {other}: {path}")
        for (path, x), y in zip(arrays_of(abstract).items(), arrays_of(like).values()):
            assert "blocks" not in path or (type(x) is type(y) and x.sharding == y.sharding), path
