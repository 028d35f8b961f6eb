"""Trains a small model on eight devices, in one process or in several, and saves what came of it."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm

COORDINATOR, COUNT, NUMBER, OUT, *CONFIGS = sys.argv[1:]


class Model(nnx.Module):
    """Embedding, four blocks with dropout, a batch norm, and the embedding again as the output layer.

    A gate is made of the embedding and read by every block: it crosses beside what the blocks make.
    """

    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.blocks = nnx.List(nnx.Linear(16, 16, rngs=rngs) for _ in range(4))
        self.gate = nnx.Linear(16, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        gate = jnp.tanh(self.gate(x))
        for block in self.blocks:
            x = x + gate * self.dropout(jnp.tanh(block(x)))
        return self.embed.attend(self.norm(x))


def loss_fn(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def placed(stages, per_stage):
    """The mesh and the sharding of the model: blocks over stages, kernels over the devices of each."""
    mesh = mm.MultiMesh(axis_sizes=(stages, per_stage), axis_names=("stage", "model"))
    tasks = [mm.Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(stages)]
    used = [tasks[i * stages // 4] for i in range(4)]
    rules = {mm.path("embed"): (used[0], P(None, "model")), mm.path("norm"): (used[-1], P("model"))}
    rules[mm.path("gate")] = (used[0], P())
    for i, task in enumerate(used):
        rules[mm.path("blocks", i, "kernel")] = (task, P(None, "model"))
        rules[mm.path("blocks", i)] = (task, P("model"))
    return mesh, mm.TaskSharding(rules)


def train(config):
    """Losses and state after four steps on a grid of stages x devices under a schedule: "4x2 1f1b"."""
    grid, schedule = config.split()
    mesh, sharding = placed(*map(int, grid.split("x")))
    with mesh:
        model = mm.jit(lambda: Model(nnx.Rngs(0)), out_shardings=sharding)()
        clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, clipped, wrt=nnx.Param))(model)
        grad_fn = mm.microbatch(
            nnx.value_and_grad(loss_fn), dim=0, size=2, argnum=1, schedule=schedule, reduce="mean"
        )

        @mm.jit(donate_argnums=(0, 1))
        def step(model, optimizer, tokens):
            loss, grads = grad_fn(model, tokens)
            optimizer.update(model, grads)
            return loss

        tokens = np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)
        sent = step.program(model, optimizer, tokens).transfers
        norms = [t for t in sent if t.microbatch is None and len(t.shape) == 1 and t.source is not t.target]
        assert grid == "8x1" or norms, "the norms of a stage's gradients cross as a vector"
        losses = [mm.fetch(step(model, optimizer, tokens)) for _ in range(4)]
        state = nnx.to_flat_state(nnx.state((model, optimizer), nnx.Not(nnx.RngKey)))
        values = {"/".join(map(str, path)): mm.fetch(v.get_raw_value()) for path, v in state}
        here = sum(bool(v.get_raw_value().addressable_shards) for _, v in state)
        if int(COUNT) > 1 and grid != "2x4":
            assert 0 < here < len(state), "each process has some of the state, and none has all"
    return {f"{config} {name}": value for name, value in {**values, "losses": np.array(losses)}.items()}


if int(COUNT) > 1:
    mm.initialize(COORDINATOR, int(COUNT), int(NUMBER))
assert len(jax.devices()) == 8 and len(jax.local_devices()) == 8 // int(COUNT)
results = {}
for config in CONFIGS:
    results |= train(config)
np.savez(f"{OUT}.{NUMBER}", **results)
