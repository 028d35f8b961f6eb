"""Layers stacked in one Variable, divided evenly and unevenly between processes; saved, restored, fetched."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mmnnx as mm
from mmnnx.train.checkpoint import Checkpoints

COORDINATOR, COUNT, NUMBER, OUT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
mm.initialize(COORDINATOR if COUNT > 1 else None, COUNT, NUMBER, timeout=60)
mesh = mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "model"))
tasks = [mm.Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(2)]
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
values: dict[str, np.ndarray] = {}


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))
        self.even, self.uneven, self.head = (
            make(rngs.split(4)),
            make(rngs.split(3)),
            nnx.Linear(8, 2, rngs=rngs),
        )

    def __call__(self, x):
        run = nnx.scan(lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(run(self.uneven, run(self.even, x)))


@mm.jit(donate_argnums=(0, 1))
def step(model, optimizer, x):
    grad_fn = nnx.value_and_grad(lambda model, x: jnp.mean((model(x) - 1) ** 2))
    loss, grads = mm.microbatch(grad_fn, dim=0, size=2, argnum=1, reduce="mean")(model, x)
    optimizer.update(model, grads)
    return loss, optax.global_norm(grads)


with mesh:
    # Of two stacks over the same stages the second comes to a mesh again: no pipeline, but a program.
    stacks = {mm.path(name): tasks for name in ("even", "uneven")}
    placement = mm.TaskSharding(stacks | {mm.path("head"): tasks[1]})
    model = mm.jit(Model, out_shardings=placement)()
    optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
    assert isinstance(model.uneven.kernel.get_value(), mm.DividedArray)
    for n in range(2):
        loss, norm = step(model, optimizer, X)
        values |= {f"loss {n}": mm.fetch(loss), f"norm {n}": mm.fetch(norm)}
    with Checkpoints(OUT + ".checkpoints" + str(COUNT)) as checkpoints:
        checkpoints.save(2, {"model": model, "optimizer": optimizer})
        checkpoints.wait()
        found = nnx.eval_shape(lambda: (m := Model(), nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param)))
        checkpoints.restore({"model": found[0], "optimizer": found[1]}, 2, sharding=placement)
    for name, pair in (("trained", (model, optimizer)), ("restored", found)):
        state = [(path, v.get_value()) for path, v in nnx.to_flat_state(nnx.state(pair))]
        values |= {f"{name} {path}": mm.fetch(x) for path, x in state}
    loss, _ = step(*found, X)
    values["loss 2"] = mm.fetch(loss)
np.savez(f"{OUT}.{NUMBER}.npz", **values)
jax.effects_barrier()
