"""Whiles over tasks of several processes, one of them slow; saves what they compute."""

import sys
import time

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import mmnnx as mm

COORDINATOR, COUNT, NUMBER, OUT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
mm.initialize(COORDINATOR if COUNT > 1 else None, COUNT, NUMBER, timeout=60)
DEVICES = [0], [1], [2, 3], [4], [5]  # of two processes the first has 0 to 2: one mesh is of both
tasks = [
    mm.Task(f"task{n}", mesh=mm.TaskMesh(devices=devices, axis_names=("model",)))
    for n, devices in enumerate(DEVICES)
]
X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
values: dict[str, np.ndarray] = {}


class Model(nnx.Module):
    """A layer for each task; whoever has the last one decides when a loop ends."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in DEVICES])
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, last=None):
        for layer in self.layers[:last]:
            x = jnp.tanh(layer(x))
        return x


rules = {mm.path("layers", n): (task, P()) for n, task in enumerate(tasks)} | {
    mm.path("count"): (tasks[-1], P())
}
model = mm.jit(Model, out_shardings=mm.TaskSharding(rules))()


@mm.jit
def counted(model, x, n):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, model(c[1])), (0, x))


@mm.jit
def decided_by_the_last(model, x, n):
    def body(c):
        model, x = c
        model.count[...] += 1.0
        return model, model(x)

    return nnx.while_loop(lambda c: (jnp.abs(c[1]).sum() > 0.1) & (c[0].count[...] < n), body, (model, x))[1]


@mm.jit
def in_each_other(model, x, n):
    def body(c):
        i, x = c
        return i + 1, lax.while_loop(lambda x: x.sum() < i, lambda x: x + 1 + jnp.abs(model(x)), model(x))

    return lax.while_loop(lambda c: c[0] < n, body, (0, x))


@mm.jit
def of_one_process(model, x, n):
    """The other process has no part in the loop, and one in what comes after."""
    loop = lambda c: (c[0] + 1, model(c[1], 2))
    return model.layers[-1](lax.while_loop(lambda c: c[0] < n, loop, (0, x))[1])


for function in (counted, decided_by_the_last, in_each_other, of_one_process):
    for n in (0, 3):
        if NUMBER == 1:
            time.sleep(0.1)
        found = mm.fetch(function(model, X, n))
        flat = found if isinstance(found, tuple) else (found,)
        values |= {f"{function.__name__} {n} {i}": np.asarray(v) for i, v in enumerate(flat)}
values["count"] = np.asarray(mm.fetch(model.count.get_value()))
np.savez(f"{OUT}.{NUMBER}", **values)
