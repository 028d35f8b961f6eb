"""Does a plan tell the truth? Its bytes and its step time, beside those of the run: two stages, a core each.

For language models, dense and with experts, with remat and with scanned blocks:

- bytes: the most bytes of arrays on any device, as `mm.plan` counts them, over those of the run;
- time: the step, simulated with the times of its fragments, over the measured step. The fragments are
  measured by `program.profile` in a process with one core; the step in two processes with a core each, since
  XLA spreads the work of a CPU device over all cores of its process.

    python benchmarks/plan.py
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from pinned import CONTEXT, Pinned, free_cores

import mmnnx as mm
from mmnnx.mpmd.runtime import prepare
from mmnnx.mpmd.runtime.profile import measurer
from mmnnx.plan.language_models import TrainingJob

UNTIMED = 2  # steps of a round before those that are timed


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare plans with runs."""

    batch: int = 16
    """Sequences in a step."""
    rows: int = 4
    """Sequences in a microbatch."""
    sequence: int = 512
    """Tokens in a sequence."""
    steps: int = 5
    """Timed steps of each; the median counts."""


def main(options: Options) -> None:
    sizes: dict[str, Any] = dict(stages=2, batch=options.batch, rows=options.rows, sequence=options.sequence)
    jobs = {
        "LM": TrainingJob("tiny", "cpu", **sizes),
        "LM, remat": TrainingJob("tiny", "cpu", remat=True, **sizes),
        "LM, scanned": TrainingJob("tiny", "cpu", scan=True, **sizes),
        "MoE LM": TrainingJob("tiny-moe", "cpu", **sizes),
    }
    core = free_cores()[0]
    print(f"{os.cpu_count()} cores, jax {jax.__version__}")
    print(f"{'':<12} {'bytes, planned':>14} {'time, simulated':>16} {'measured':>10}")
    print(f"{'':<12} {'over measured':>14} {'over measured':>16} {'step':>10}")
    for name, job in jobs.items():
        with ProcessPoolExecutor(1, CONTEXT, os.sched_setaffinity, (0, {core})) as alone:
            nbytes, simulated = alone.submit(profiled, job).result()
        with Pinned(2, Step, job) as processes:
            seconds = max(processes.ask(timed, options.steps))
        print(f"{name:<12} {nbytes:14.3f} {simulated / seconds:16.3f} {seconds * 1e3:7.1f} ms", flush=True)


class Step:
    """A train step and its arguments, on the devices of all processes."""

    def __init__(self, job: TrainingJob):
        self.tokens = np.ones((job.batch, job.sequence + 1), np.int32)
        self.mesh = job.mesh(jax.devices())
        with self.mesh:
            self.model, self.optimizer = job.make()
            self.call = job.train_step(self.model)
            self()  # then state is where it lives

    def __call__(self) -> jax.Array:
        with self.mesh:
            return self.call(self.model, self.optimizer, self.tokens)


def timed(step: Step, count: int) -> float:
    """The median seconds of a step, one after the other."""
    taken = []
    for _ in range(UNTIMED + count):
        began = time.perf_counter()
        step()
        jax.block_until_ready([a for a in jax.tree.leaves(nnx.state(step.model)) if a.is_fully_addressable])
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[UNTIMED:])


def profiled(job: TrainingJob) -> tuple[float, float]:
    """(planned over measured bytes, simulated seconds of a step), in a process of its own."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    with job.mesh(jax.devices()):
        abstract = nnx.eval_shape(job.make)
        tokens = jax.ShapeDtypeStruct((job.batch, job.sequence + 1), jnp.int32)
        plan = mm.plan(job.train_step(abstract[0]), *abstract, tokens)
    step = Step(job)
    args = step.model, step.optimizer, step.tokens
    as_it_runs = lambda bound, bindings, compiled, options: measurer(compiled)
    with step.mesh, mock.patch.object(prepare, "_measured", as_it_runs):
        profile = step.call.program(*args).profile(*args)
    planned = max(memory.arrays for memory in plan.memory)
    return planned / max(profile.peak_bytes.values()), profile.timeline.period


if __name__ == "__main__":
    main(tyro.cli(Options))
