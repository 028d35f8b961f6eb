"""Would mm.jit gain from running a microbatch loop of small stages as ONE SPMD program?

That program would take what the SPMD pipeline takes, less its optimizer. But state on TaskMeshes is one
array for each Variable, on the mesh of its stage. So a step would still walk through the model, put the
weights of all stages together into arrays over all devices, take the gradients apart again, and call an
optimizer for each stage. Each of these is timed by itself, in turn with whole steps of mm.jit and of the
SPMD pipeline. Such a step would take at least their sum, which leaves out writing the new state back.

    python benchmarks/spmd_loop.py
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from contenders.contender import replicate_others
from contenders.mm_jit import mm_jit
from contenders.problem import OPTIMIZER, Problem
from contenders.spmd_pipeline import spmd_pipeline
from contenders.timing import cores, processor
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from side_by_side import STAGES, make_problem

import mmnnx as mm

PARTS = ("the loop", "walk", "assemble", "take apart", "optimizers")


@dataclasses.dataclass(frozen=True)
class Options:
    """Time what a step with the loop as one SPMD program would be made of, beside steps as they are."""

    models: tuple[Literal["MLP", "LM"], ...] = ("MLP", "LM")
    """Which models of side_by_side.py."""
    size: Literal["tiny", "small"] = "small"
    """Of each model."""
    rounds: int = 40
    """Timed steps of each kind; medians count."""


@jax.jit
def copy(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.array(x, copy=True) for x in arrays]


def update(gradients: Any, moments: Any, weights: Any) -> tuple[Any, Any]:
    updates, moments = OPTIMIZER.update(gradients, moments, weights)
    return optax.apply_updates(weights, updates), moments


class Parts:
    """The work beside the loop, on arrays like those of a problem's blocks.

    Attributes:
      each: arrays in a stage.
    """

    def __init__(self, problem: Problem, devices: list[jax.Device]):
        mesh = jax.make_mesh((len(devices),), ("stage",), axis_types=(AxisType.Auto,), devices=devices)
        self.sharding, self.devices = NamedSharding(mesh, PartitionSpec("stage")), devices
        blocks = list(problem.make().blocks)
        depth = len(blocks) // len(devices)
        stages = [
            [
                np.asarray(x)
                for block in blocks[n * depth :][:depth]
                for x in jax.tree.leaves(nnx.state(block))
            ]
            for n in range(len(devices))
        ]
        self.each = len(stages[0])
        self.rows = [[jax.device_put(x[None], d) for x in own] for own, d in zip(stages, devices)]
        self.update = jax.jit(update, donate_argnums=(1, 2))
        self.by_stage = [self.trained(jax.device_put(own, d)) for own, d in zip(stages, devices)]
        self.together = self.trained(copy(self.assemble()), mesh)  # rows stay

    def trained(self, weights: Any, mesh: Mesh | None = None) -> list[Any]:
        """Gradients, moments and weights."""
        moments = OPTIMIZER.init(weights)
        return [copy(weights), moments if mesh is None else replicate_others(moments, mesh), weights]

    def assemble(self) -> list[jax.Array]:
        """The weights of all stages as arrays over all devices."""
        shards = zip(*self.rows)
        make = jax.make_array_from_single_device_arrays
        return [make((len(own), *own[0].shape[1:]), self.sharding, list(own)) for own in shards]

    def take_apart(self, arrays: list[jax.Array]) -> list[list[jax.Array]]:
        return [[shard.data for shard in x.addressable_shards] for x in arrays]

    def step(self, trained: list[Any]) -> None:
        """One update, in place."""
        trained[2], trained[1] = self.update(*trained)


def measure(problem: Problem, rounds: int) -> dict[str, float]:
    """Medians in milliseconds."""
    devices = jax.devices()[: problem.stages]
    mesh = mm.MultiMesh(axis_sizes=(problem.stages,), axis_names=("stage",), devices=devices)
    through_mm, program_of = mm_jit(problem, problem.stages, mesh, schedule="1f1b", per_call="auto")
    spmd, parts = spmd_pipeline(problem, devices), Parts(problem, devices)
    fresh: list[jax.Array] = []
    first_weight = mm.jit(lambda model, _: jax.tree.leaves(nnx.state(model, nnx.Param))[0].sum(), mesh=mesh)

    for contender in (through_mm, spmd):
        for _ in range(3):
            jax.block_until_ready((contender.step(problem.batch), contender.state()))
    _, (model, optimizer, _) = program_of(problem.batch)

    def waited(contender: Any) -> Callable[[], Any]:
        return lambda: jax.block_until_ready((contender.step(problem.batch), contender.state()))

    def optimizers() -> None:
        for stage in parts.by_stage:
            parts.step(stage)
        jax.block_until_ready(parts.by_stage)

    def one_optimizer() -> None:
        parts.step(parts.together)
        jax.block_until_ready(parts.together)

    jobs: dict[str, Callable[[], Any]] = {
        "mm.jit": waited(through_mm),
        "SPMD pipeline": waited(spmd),
        "walk": lambda: jax.block_until_ready(first_weight(model, optimizer)),
        "assemble": parts.assemble,
        "take apart": lambda: parts.take_apart(fresh),
        "optimizers": optimizers,
        "one optimizer": one_optimizer,
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(3 + rounds):
        for name in random.sample([*jobs], len(jobs)):
            fresh = jax.block_until_ready(copy(parts.assemble()))  # whose shards JAX has not made yet
            start = time.perf_counter()
            jobs[name]()
            seconds[name] += [time.perf_counter() - start] if number >= 3 else []
    found = {name: 1e3 * float(np.median(taken)) for name, taken in seconds.items()}
    found["the loop"] = found["SPMD pipeline"] - found.pop("one optimizer")
    return found | {"sum": sum(found[name] for name in PARTS), "arrays": parts.each}


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    print(f"{processor()}, {cores()} cores, jax {jax.__version__}; ms, medians of {options.rounds}")
    columns = ("arrays", "mm.jit", "SPMD pipeline", *PARTS, "sum")
    print("".join(f"{name:>15}" for name in ("model", *columns)))
    for model in options.models:
        found = measure(make_problem(model, options.size), options.rounds)
        numbers = [f"{found[name]:15.2f}" if name != "arrays" else f"{found[name]:15}" for name in columns]
        print(f"{model + ', ' + options.size:>15}" + "".join(numbers), flush=True)


if __name__ == "__main__":
    main()
