"""One XLA program under `nnx.jit`: on one device, or over several by data or by tensor parallelism.

XLA divides the work (GSPMD): all that is said is how the arrays that enter are sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from contenders.contender import Contender, arrays_of, by_path, replicate_others
from contenders.problem import OPTIMIZER, Problem


def nnx_jit(
    problem: Problem, name: str, devices: Sequence[jax.Device], over: Literal["data", "tensor"] = "data"
) -> Contender:
    """The train step, all microbatches at once (on one device: one after the other).

    Args:
      problem: what to train.
      name: of the contender.
      devices: where.
      over: with "data", each device takes some of the microbatches; with "tensor", a part of each weight.
    """
    mesh = jax.make_mesh((len(devices),), (over,), axis_types=(AxisType.Auto,), devices=devices)
    sharding = lambda spec: NamedSharding(mesh, spec)
    model = problem.make()
    weights = nnx.state(model)
    specs = weight_specs(weights) if over == "tensor" else jax.tree.map(lambda _: P(), weights)
    nnx.update(model, jax.device_put(weights, jax.tree.map(sharding, specs)))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    nnx.update(optimizer, replicate_others(nnx.state(optimizer), mesh))
    shardings = jax.tree.map(lambda x: x.sharding, nnx.state((model, optimizer)))
    rows = sharding(P("data") if over == "data" else P())
    mean_loss = one_by_one if len(devices) == 1 else at_once

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, batch):
        loss, gradients = mean_loss(problem, model, problem.slices(batch))
        optimizer.update(model, gradients)
        state = nnx.state(
            (model, optimizer)
        )  # it stays where it is, or the next step would be compiled again
        nnx.update((model, optimizer), jax.lax.with_sharding_constraint(state, shardings))
        return loss

    return Contender(
        name,
        lambda batch: train_step(model, optimizer, jax.device_put(batch, rows)),
        arrays_of(model, optimizer),
        lambda: by_path(nnx.to_flat_state(optimizer.opt_state[0].mu)),
    )


# Logical axes of weights that are split (Megatron-LM, arXiv:1909.08053); an expert stays whole. The few key
# and value heads of grouped-query attention are computed on every device.
SPLIT = ("expert", "mlp", "heads", "vocab")


def weight_specs(weights: nnx.State) -> Any:
    """For each weight, which of its dimensions is split over the mesh axis "tensor"."""

    def spec(names):
        first = next((n for n, name in enumerate(names) if name in SPLIT), None)
        return P(*("tensor" if n == first else None for n in range(len(names))))

    return jax.tree.map(spec, nnx.get_partition_spec(weights), is_leaf=lambda x: isinstance(x, P))


def at_once(problem: Problem, model: Any, slices: Any) -> Any:
    """Mean loss over the microbatches, and its gradient."""

    def loss_fn(model, slices):
        return jnp.mean(jax.vmap(lambda slice: problem.loss(model, slice))(slices))

    return nnx.value_and_grad(loss_fn)(model, slices)


def one_by_one(problem: Problem, model: Any, slices: Any) -> Any:
    """The same, accumulated: with activations of one microbatch alone, a cache may hold them."""
    graphdef, params = nnx.split(model)
    loss_fn = lambda params, slice: problem.loss(nnx.merge(graphdef, params), slice)

    def add(total, slice):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, slice)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(add, zeros, slices)
    return jax.tree.map(lambda x: x / problem.microbatches, total)
