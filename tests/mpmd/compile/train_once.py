"""Trains a pipeline of four devices; prints its losses, and what the compilation cache was asked for.

JAX_NUM_CPU_DEVICES=4 python tests/mpmd/compile/train_once.py
"""

import collections
import json

import jax
import numpy as np
import optax
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import born, pipeline


class Chain(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(nnx.Linear(4, 4, rngs=rngs) for _ in range(4))

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return x


def main():
    counts = collections.Counter()

    def count(event, *_, **__):
        counts[event.rsplit("/", 1)[-1]] += 1

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(count)
    mesh, tasks = pipeline(4)
    with mesh:
        model = born(
            Chain, mm.TaskSharding({mm.path("layers", n): (task, None) for n, task in enumerate(tasks)})
        )
        optimizer = mm.jit(lambda model: nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param))(model)

        @mm.jit
        def step(model, optimizer, x):
            grad_fn = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())
            loss, grads = mm.microbatch(grad_fn, dim=0, size=1, argnum=1)(model, x)
            optimizer.update(model, grads)
            return loss

        losses = [float(step(model, optimizer, np.ones((4, 4), np.float32))) for _ in range(2)]
    events = {"programs": "backend_compile_duration", "hits": "cache_hits", "misses": "cache_misses"}
    print(json.dumps({"losses": losses} | {name: counts[event] for name, event in events.items()}))


if __name__ == "__main__":
    main()
