"""How do programs grow? Builds, verifies and simulates pipelines of more and more stages; runs nothing.

python benchmarks/growth.py --schedule zero-bubble-h1
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

import mmnnx as mm


@dataclasses.dataclass(frozen=True)
class Options:
    """Build, verify and simulate pipelines of more and more stages and microbatches."""

    schedule: str | None = None
    """Name of a schedule. Default: the shortest, which has all of them simulated first."""
    sizes: tuple[tuple[int, int], ...] = ((4, 8), (8, 32), (16, 64), (32, 128), (64, 256), (64, 512))
    """Stages and microbatches of each pipeline."""


class Chain(nnx.Module):
    """One small layer for each stage."""

    def __init__(self, stages: int, *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(stages)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def loss_fn(model: Chain, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def timed(fun: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = fun()
    return time.perf_counter() - start, result


def measure(stages: int, microbatches: int, schedule: str | None) -> str:
    """One line of the table."""
    mesh = mm.MultiMesh(axis_sizes=(stages,), axis_names=("stage",), devices=jax.devices()[:stages])
    placement = mm.TaskSharding(
        {mm.path("layers", n): (mm.Task(f"stage{n}", mesh_slice={"stage": n}), None) for n in range(stages)}
    )
    with mesh:
        model = mm.jit(lambda: Chain(stages, rngs=nnx.Rngs(0)), out_shardings=placement)()

        @mm.jit
        def step(model, batch):
            grad_fn = nnx.value_and_grad(loss_fn)
            return mm.microbatch(grad_fn, dim=0, size=1, argnum=1, schedule=schedule)(model, batch)

        build, program = timed(lambda: step.program(model, np.ones((microbatches, 4), np.float32)))
    verify, _ = timed(program.verify)
    simulate, timeline = timed(program.simulate)
    size = len(program.instructions)
    return (
        f"{stages:6}{microbatches:14}{program.loops[0].schedule:>25}{size:14,}{build:9.2f} s{verify:9.2f} s"
        f"{simulate:9.2f} s{1e6 * (build + verify + simulate) / size:16.0f}{timeline.bubble:9.1%}"
    )


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(stages for stages, _ in options.sizes))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{cores} cores, jax {jax.__version__}")
    print(
        f"{'stages':>6}{'microbatches':>14}{'schedule':>25}{'instructions':>14}{'build':>11}{'verify':>11}"
        f"{'simulate':>11}{'us/instruction':>16}{'bubble':>9}"
    )
    for stages, microbatches in options.sizes:
        print(measure(stages, microbatches, options.schedule), flush=True)


if __name__ == "__main__":
    main()
