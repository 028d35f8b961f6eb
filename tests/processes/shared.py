"""Meshes that share devices and span processes, on two cores; saves losses and parameters."""

import os
import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

if hasattr(os, "sched_setaffinity"):  # as few threads as XLA has on the smallest of machines
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])

import mmnnx as mm

COORDINATOR, COUNT, NUMBER, OUT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
mm.initialize(COORDINATOR if COUNT > 1 else None, COUNT, NUMBER, timeout=60)
tasks = [
    mm.Task(f"on{n}", mesh=mm.TaskMesh(devices=devices, axis_names=("model",)))
    for n, devices in enumerate([[0, 1, 2, 3], [2], [2, 1], [3, 0]])
]
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(n)) for n in range(6)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


rules = {}
for n, task in enumerate([*tasks, *tasks[:2]]):
    rules[mm.path("layers", n, "kernel")] = (task, P(None, "model"))
    rules[mm.path("layers", n)] = (task, P())
model = mm.jit(Model, out_shardings=mm.TaskSharding(rules))()
optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
values = {}
for schedule in (None, "wavefront"):

    @mm.jit
    def train(model, optimizer, x, schedule=schedule):
        grad_fn = nnx.value_and_grad(lambda model, x: jnp.mean((model(x) - 1) ** 2))
        if schedule is not None:
            grad_fn = mm.microbatch(grad_fn, 0, 2, argnum=1, reduce="mean", schedule=schedule)
        loss, grads = grad_fn(model, x)
        optimizer.update(model, grads)
        return loss

    for step in range(5):
        values[f"{schedule} {step}"] = mm.fetch(train(model, optimizer, X))
for n, layer in enumerate(model.layers):
    values[f"kernel {n}"] = mm.fetch(layer.kernel[...])
np.savez(f"{OUT}.{NUMBER}.npz", **values)
