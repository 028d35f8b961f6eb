"""Stages on four, two and one devices, with sharded weights and activations; saves what they compute."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm

COORDINATOR, COUNT, NUMBER, OUT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
mm.initialize(COORDINATOR if COUNT > 1 else None, COUNT, NUMBER)
DEVICES = ((0, 1, 2, 3), (4, 5), (6,))
tasks = [
    mm.Task(f"stage{n}", mesh=mm.TaskMesh(devices=devices, axis_names=("model",)))
    for n, devices in enumerate(DEVICES)
]


class Model(nnx.Module):
    """Three layers; the first one's weight is used again at the end."""

    def __init__(self, rngs):
        self.layers = nnx.List(nnx.Linear(16, 16, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        for layer, task in zip(self.layers, tasks):
            x = jnp.tanh(layer(x))
            constrain = mm.task(lambda x: mm.with_sharding_constraint(x, P(None, "model")), task=task)
            x = constrain(x)
        return x @ self.layers[0].kernel


rules = {}
for n, task in enumerate(tasks):
    rules[mm.path("layers", n, "kernel")] = (task, P(None, "model"))
    rules[mm.path("layers", n)] = (task, P("model"))


def loss_fn(model, x):
    return (model(x) ** 2).mean()


model = mm.jit(lambda: Model(nnx.Rngs(0)), out_shardings=mm.TaskSharding(rules))()
step = mm.jit(mm.microbatch(nnx.value_and_grad(loss_fn), dim=0, size=2, argnum=1, schedule="1f1b"))
x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
loss, grads = step(model, x)
values = {"loss": loss} | {"/".join(map(str, p)): v.get_value() for p, v in nnx.to_flat_state(grads)}

# An array that is sharded over four devices goes to two, to one, and to the mesh of all that overlaps it.
sharded = values["layers/0/kernel"]
for n, task in enumerate(tasks[1:], 1):
    target = NamedSharding(task.to_mesh(), P("model"))
    moved = mm.jit(lambda a: a * 2, in_shardings=target, out_shardings=target)(sharded)
    assert moved.sharding.device_set == set(np.array(jax.devices())[list(DEVICES[n])])
    values[f"moved to {n}"] = moved
np.savez(f"{OUT}.{NUMBER}", **mm.fetch(values))
