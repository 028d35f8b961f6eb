"""State to save and restore: a small model on grids of devices, and what its arrays hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.train.checkpoint.nnx_state import arrays_of

GRIDS = ("1x1", "4x2", "2x4", "8x1")


class Net(nnx.Module):
    """Blocks, dropout and a batch norm: parameters, statistics, keys and counters."""

    def __init__(self, seed: int):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(32, 8, rngs=rngs)
        self.blocks = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(4))
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.embed.attend(self.norm(self.dropout(x)))


def adam() -> optax.GradientTransformation:
    return optax.adamw(1e-2)


def placed(grid: str) -> tuple[mm.MultiMesh, mm.TaskSharding]:
    """Stages x devices of each, "4x2"; blocks over the stages, kernels over the devices of a stage."""
    stages, per_stage = map(int, grid.split("x"))
    mesh = mm.MultiMesh(axis_sizes=(stages, per_stage), axis_names=("stage", "model"))
    tasks = [mm.Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(stages)]
    rules: dict[Any, Any] = {mm.path("embed"): (tasks[0], P(None, "model"))}
    rules[mm.path("norm")] = (tasks[-1], P("model"))
    for i in range(4):
        rules[mm.path("blocks", i, "kernel")] = (tasks[i * stages // 4], P(None, "model"))
        rules[mm.path("blocks", i)] = (tasks[i * stages // 4], P("model"))
    return mesh, mm.TaskSharding(rules)


def born(grid: str, seed: int = 0) -> tuple[mm.MultiMesh, dict[str, Any]]:
    mesh, sharding = placed(grid)
    with mesh:
        model = mm.jit(lambda: Net(seed), out_shardings=sharding)()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, adam(), wrt=nnx.Param))(model)
    return mesh, {"model": model, "optimizer": optimizer}


def loss_fn(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


@mm.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def losses(mesh: mm.MultiMesh, nodes: dict[str, Any], steps: int = 2) -> list[float]:
    tokens = np.random.default_rng(0).integers(0, 32, (4, 9)).astype(np.int32)
    with mesh:
        return [float(mm.fetch(train_step(nodes["model"], nodes["optimizer"], tokens))) for _ in range(steps)]


def values(nodes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Copies of all arrays by path, PRNG keys as words."""
    found = {}
    for path, x in arrays_of(nodes).items():
        if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        found["/".join(path)] = np.array(x)
    return found


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """To the last bit, NaNs and types included."""
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert (x.shape, x.dtype) == (b[name].shape, b[name].dtype), name
        assert x.tobytes() == b[name].tobytes(), name
