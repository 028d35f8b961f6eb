"""Calls of several functions in turn, one process slower than the other; saves what they compute."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mmnnx as mm

COORDINATOR, COUNT, NUMBER, OUT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
mm.initialize(COORDINATOR if COUNT > 1 else None, COUNT, NUMBER, timeout=60)
first, second = (
    mm.Task(f"stage{n}", mesh=mm.TaskMesh(devices=[2 * n, 2 * n + 1], axis_names=("model",)))
    for n in range(2)
)
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
values: dict[str, np.ndarray] = {}


def keep(**found):
    values.update({f"{name} {len(values)}": value for name, value in mm.fetch(found).items()})


class Model(nnx.Module):
    """Two layers in different processes. What the first has is sent, too; the mask is weakly typed."""

    def __init__(self, key):
        rngs = nnx.Rngs(key)
        self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.mask = nnx.BatchStat(jnp.zeros((4, 8)))

    def __call__(self, x):
        x = self.second(jnp.tanh(self.first(x)))
        self.mask.set_value(jnp.where(x > 0, 1.0, 0.0))
        return x @ self.first.kernel


place = mm.TaskSharding({mm.path("first"): first, mm.path(): second})
make = mm.jit(Model, out_shardings=place)
model, average = make(jax.random.key(0)), make(jax.random.key(1))
tx = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2)
optimizer = mm.jit(lambda m: nnx.Optimizer(m, tx, wrt=nnx.Param))(model)


@mm.jit
def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


@mm.jit(donate_argnums=0)
def follow(average, model):
    """Uses up what `evaluate` has sent before."""
    new = jax.tree.map(
        lambda a, b: 0.5 * a + 0.5 * b, nnx.state(average, nnx.Param), nnx.state(model, nnx.Param)
    )
    nnx.update(average, new)


@mm.jit
def evaluate(model, x):
    return jnp.mean(model(x) ** 2)


for _ in range(5):
    if NUMBER == 1:
        time.sleep(0.2)  # the other process has made the next calls before this one fetches a thing
    loss = train(model, optimizer, X)
    before = evaluate(average, X)
    follow(average, model)
    keep(loss=loss, before=before)
keep(**{str(path): v.get_value() for path, v in nnx.to_flat_state(nnx.state((model, optimizer, average)))})
assert model.mask.get_value().weak_type

# A result that is weakly typed, and an array without elements, in another function.
mask = mm.jit(lambda m, x: jnp.where(m(x) > 0, 1.0, 0.0))(model, X)
keep(masked=mm.jit(lambda m, k: (m.first.bias[...] * k.sum() + m.second.bias[...]).sum())(model, mask))
empty = mm.task(lambda x: x[:0] * 2, task=first)
joined = mm.task(lambda e, x: jnp.concatenate([e, x + 1]), task=second)
keep(joined=mm.jit(lambda x: joined(empty(x), x))(X))

# A random key is fetched as its words.
draw = mm.task(lambda key: jax.random.split(key)[0], task=second)
keep(key=mm.jit(draw)(jax.random.key(3)))

# What is placed nowhere each process computes itself.
metric = nnx.metrics.Average()
mm.jit(lambda metric: metric.update(values=X))(metric)
values["metric"] = np.asarray(metric.compute())

# What is on JAX's default device each process has itself.
keep(rate=optax.linear_schedule(1e-2, 0.0, 100)(jnp.asarray(3)), loss=loss)

# On one device there is no place for state of several processes; for what is placed nowhere there is.
for on_one_device in (mm.ignore_transforms, jax.disable_jit):
    with on_one_device():
        values[on_one_device.__name__] = np.asarray(mm.jit(jnp.sin)(X))
        if COUNT > 1:
            with pytest.raises(
                ValueError, match=r"mm.jit\(evaluate\) is given an array .* of other processes"
            ):
                evaluate(model, X)
np.savez(f"{OUT}.{NUMBER}", **values)
