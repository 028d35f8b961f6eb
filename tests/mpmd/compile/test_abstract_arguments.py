"""Abstract arguments are compiled for as arrays are; devices may be abstract, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.compile import executables, lower
from mmnnx.mpmd.distributed import processes
from mmnnx.mpmd.runtime import as_is, prepare
from tests.mpmd.parity import pipeline

MESH, TASKS = pipeline(4, 2)
RULES = mm.TaskSharding({mm.path("layers", n): (t, P(None, "model")) for n, t in enumerate(TASKS)})


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in TASKS)

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def make():
    model = Model()
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def step(model, optimizer, x):
    grad_fn = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())
    loss, grads = mm.microbatch(grad_fn, 0, 2, argnum=1, reduce="mean", schedule="1f1b")(model, x)
    optimizer.update(model, grads)
    return loss


def like(tree):
    """Abstract arrays in the place of arrays, where they live."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None), tree
    )


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """From what compiles something to its donations, as they are dumped."""

    def dumped(compile_it):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        monkeypatch.setenv("MMNNX_DUMP", str(root))
        with MESH:
            compile_it()
        monkeypatch.delenv("MMNNX_DUMP")
        (file,) = root.glob("*-step/9-compile.txt")
        return file.read_text().partition("donations:")[2].partition("executables:")[0]

    return dumped


@pytest.mark.slow
def test_donations(compiled):
    """Abstract arguments stand for the state of a later step, which is where in_shardings say."""
    with MESH:
        model, optimizer = mm.jit(make, out_shardings=RULES)()
    abstract, batch = nnx.eval_shape(make), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    run = mm.jit(step, donate_argnums=(0, 1))
    placed = mm.jit(step, donate_argnums=(0, 1), in_shardings=(RULES, RULES, None))
    as_they_are = compiled(lambda: run.lower(like(model), like(optimizer), batch).compile())
    by_rules = compiled(lambda: placed.lower(*abstract, batch).compile())
    kept = compiled(lambda: mm.jit(step).lower(like(model), like(optimizer), batch).compile())
    real = compiled(lambda: run(model, optimizer, np.ones((4, 8), np.float32)))
    assert real.count(" to result ") > kept.count(" to result ")
    assert by_rules == as_they_are == real


@pytest.fixture
def described(monkeypatch):
    """The devices of the last three stages are taken for such as are only described."""
    here = set(MESH.mesh.devices[0].flat)
    processes.holders.cache_clear()
    for module in (processes, executables, lower, as_is, prepare):
        monkeypatch.setattr(module, "is_described", lambda device: device not in here)
    yield
    processes.holders.cache_clear()


def test_devices_that_are_only_described(described):
    """A program can be looked at, analysed and compiled; a call is refused before it is."""
    model, optimizer = nnx.eval_shape(make)
    batch = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    f = mm.jit(step, in_shardings=(RULES, RULES, None))
    with MESH:
        program = f.program(model, optimizer, batch)
        program.verify()
        assert len(program.fragments) == 16
        batch, refused = (
            np.ones((4, 8), np.float32),
            r"step is placed on devices that are only described \(cpu",
        )
        with pytest.raises(ValueError, match=refused):
            f(*make(), batch)
        arguments = (*make(), batch)
        compiled = f.lower(*arguments).compile()
        assert len(compiled.fragments) >= 8
        with pytest.raises(ValueError, match=refused):
            compiled(*arguments)


def test_real_devices_are_not_described():
    assert not any(map(processes.is_described, jax.devices()))
