"""A pipeline in one SPMD program, in the way of Praxis and MaxText (GSPMD, arXiv:2105.04663, section 3.3).

The weights of the stages are stacked and sharded along the stages. In each tick of a scan every device runs
its stage on the microbatch that it holds and passes the result on to the next. The backward is that of the
scan: all forwards come first, as in GPipe, and every stage computes in every tick, also where it has no
microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from contenders.contender import Contender, by_path, replicate_others
from contenders.problem import OPTIMIZER, Problem


def spmd_pipeline(problem: Problem, devices: Sequence[jax.Device]) -> Contender:
    mesh = jax.make_mesh((problem.stages,), ("stage",), axis_types=(AxisType.Auto,), devices=devices)
    sharding = lambda *spec: NamedSharding(mesh, P(*spec))
    over_stages = lambda tree: jax.lax.with_sharding_constraint(tree, sharding("stage"))
    model = problem.make()
    blocks = list(model.blocks)
    depth = len(blocks) // problem.stages
    # The n-th blocks of all stages, stacked; and what lies beside the blocks, which every device has.
    graphdef, _ = nnx.split(blocks[0])
    states = [nnx.to_pure_dict(nnx.state(block)) for block in blocks]
    stacked = [jax.tree.map(lambda *xs: jnp.stack(xs), *states[n::depth]) for n in range(depth)]
    beside = nnx.split(Beside(model, problem.before + problem.after))
    params = {
        "blocks": jax.device_put(stacked, sharding("stage")),
        "beside": jax.device_put(nnx.to_pure_dict(beside[1]), sharding()),
    }
    moments = replicate_others(OPTIMIZER.init(params), mesh)

    def stage(states, x):
        for state in states:
            x = problem.block(nnx.merge(graphdef, state), x)
        return x

    drain = problem.stages - 1  # ticks after the last microbatch entered, until it leaves
    ring = [(s, s + 1) for s in range(drain)]

    def pipeline(states, entering):
        """On each device: its own states [1, ...], and what enters the first stage, [microbatches, ...]."""
        states, is_first = jax.tree.map(lambda x: x[0], states), jax.lax.axis_index("stage") == 0

        def tick(received, enters):
            x = jax.tree.map(lambda new, old: jnp.where(is_first, new, old), enters, received)
            y = stage(states, x)
            return jax.lax.ppermute(y, "stage", ring), y

        empty = jax.tree.map(lambda x: jnp.zeros_like(x[0]), entering)
        fill = lambda x: jnp.concatenate([x, jnp.zeros((drain, *x.shape[1:]), x.dtype)])
        _, made = jax.lax.scan(tick, empty, jax.tree.map(fill, entering))
        return jax.tree.map(lambda x: x[None, drain:], made)

    def loss_fn(params, slices):
        around = nnx.merge(beside[0], params["beside"])
        # What comes before and after the blocks is computed for some of the microbatches on each device.
        entering = over_stages(jax.vmap(lambda slice: problem.first(around, slice))(slices))
        made = jax.shard_map(
            pipeline, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P("stage"), check_vma=False
        )(params["blocks"], entering)
        leaving = over_stages(jax.tree.map(lambda x: x[-1], made))
        return jnp.mean(jax.vmap(lambda x, slice: problem.last(around, x, slice))(leaving, slices))

    def step(params, moments, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, problem.slices(batch))
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return loss, optax.apply_updates(params, updates), moments

    train_step = jax.jit(step, donate_argnums=(0, 1))

    def run(batch):
        nonlocal params, moments
        loss, params, moments = train_step(params, moments, jax.device_put(batch, sharding("stage")))
        return loss

    def moment():
        mu = jax.device_get(moments[0].mu)
        found = by_path(nnx.to_flat_state(nnx.State(mu["beside"])))
        for n, state in enumerate(mu["blocks"]):
            for s in range(problem.stages):
                own = nnx.State({"blocks": {0: jax.tree.map(lambda x: x[s], state)}})  # noqa: B023
                found.update(by_path(nnx.to_flat_state(own), shift=s * depth + n))
        return found

    return Contender("SPMD pipeline", run, lambda: jax.tree.leaves((params, moments)), moment)


class Beside(nnx.Module):
    """What of a model lies beside its blocks."""

    def __init__(self, model: Any, attributes: Sequence[str]):
        for name in attributes:
            setattr(self, name, getattr(model, name))
