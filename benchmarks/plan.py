"""Does a plan tell the truth? Its bytes and its step time, beside those of the run, on two CPU devices.

For a language model, one with experts and one with scanned blocks, two stages of one device each:

- bytes: the most bytes of arrays on any device, as `mm.plan` counts them, over those of the run;
- time: the step, simulated with the measured times of its fragments, over the measured step.

Each device computes with one thread, as a machine has a device for each stage: it needs two free cores.

python benchmarks/plan.py
"""

from __future__ import annotations

import dataclasses
import os
import statistics

THREADS = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=2"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {THREADS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tyro  # noqa: E402
from flax import nnx  # noqa: E402

import mmnnx as mm  # noqa: E402
from mmnnx.plan.language_models import TrainingJob  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare plans with runs."""

    batch: int = 16
    """Sequences in a step."""
    rows: int = 2
    """Sequences in a microbatch."""
    sequence: int = 512
    """Tokens in a sequence."""
    rounds: int = 5
    """Runs of each; the median counts."""


def main(options: Options) -> None:
    sizes = dict(stages=2, batch=options.batch, rows=options.rows, sequence=options.sequence)
    jobs = {
        "LM": TrainingJob("tiny", "cpu", **sizes),
        "LM, remat": TrainingJob("tiny", "cpu", remat=True, **sizes),
        "LM, scanned": TrainingJob("tiny", "cpu", scan=True, **sizes),
        "MoE LM": TrainingJob("tiny-moe", "cpu", **sizes),
    }
    print(f"{os.cpu_count()} cores, jax {jax.__version__}; planned over measured")
    print(f"{'model':<12} {'bytes':>6} {'time':>6} {'step':>9}")
    for name, job in jobs.items():
        nbytes, time, seconds = compare(job, options.rounds)
        print(f"{name:<12} {nbytes:6.3f} {time:6.3f} {seconds * 1e3:6.1f} ms", flush=True)


def compare(job: TrainingJob, rounds: int) -> tuple[float, float, float]:
    """(planned over measured bytes, simulated over measured seconds, measured seconds)."""
    with job.mesh(jax.devices()):
        abstract = nnx.eval_shape(job.make)
        tokens = jax.ShapeDtypeStruct((job.batch, job.sequence + 1), jnp.int32)
        plan = mm.plan(job.train_step(abstract[0]), *abstract, tokens)
        model, optimizer = job.make()
        step, batch = job.train_step(model), np.ones(tokens.shape, np.int32)
        step(model, optimizer, batch)  # then state is where it lives
        profiles = [
            step.program(model, optimizer, batch).profile(model, optimizer, batch) for _ in range(rounds)
        ]
    planned = max(memory.arrays for memory in plan.memory)
    measured = max(profiles[-1].peak_bytes.values())
    seconds = statistics.median(p.seconds for p in profiles)
    simulated = statistics.median(p.timeline.makespan for p in profiles)
    return planned / measured, simulated / seconds, seconds


if __name__ == "__main__":
    main(tyro.cli(Options))
