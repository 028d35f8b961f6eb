"""How do programs grow? Traces, places, partitions and verifies pipelines of more and more layers, stages and
microbatches; compiles and runs nothing.

python benchmarks/growth.py --schedule zero-bubble-h1
python benchmarks/growth.py --model lm --sizes 24 4 16 48 4 16 96 4 16 96 16 64
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import tyro
from contenders.problem import OPTIMIZER, Problem, lm, mlp
from flax import nnx

import mmnnx as mm
from mmnnx.modules.lm import LMConfig
from mmnnx.mpmd import pipeline
from mmnnx.mpmd.emit import emit
from mmnnx.mpmd.partition import partition

PASSES = ("inline", "place", "hoist", "partition", "emit", "verify")
COLUMNS = ("trace", *PASSES, "rest")


@dataclasses.dataclass(frozen=True)
class Options:
    """Trace, place, partition and verify pipelines of more and more layers, stages and microbatches."""

    model: Literal["mlp", "lm"] = "mlp"
    """Blocks of two layers, or the language model of `make train`."""
    schedule: str | None = None
    """Name of a schedule. Default: the shortest, which has all of them simulated first."""
    sizes: tuple[tuple[int, int, int], ...] = (
        *((4, 4, 8), (8, 8, 32), (16, 16, 64), (32, 32, 128), (64, 64, 256), (64, 64, 512)),
        *((128, 4, 16), (256, 4, 16)),
    )
    """Blocks, stages and microbatches of each pipeline."""


def problem(model: str, layers: int, stages: int, microbatches: int) -> Problem:
    """The smallest of its kind: sizes of arrays make no difference here."""
    if model == "mlp":
        return mlp("mlp", stages, microbatches, rows=1, layers=layers, width=4)
    config = LMConfig(vocab=16, layers=layers, width=8, heads=2, kv_heads=1, mlp=8)
    return lm("lm", stages, microbatches, rows=1, length=8, config=config)


@contextlib.contextmanager
def timed_passes(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the CPU seconds that this thread spends in each stage."""
    owners: dict[str, tuple[Any, str]] = {
        "inline": (pipeline, "inline"),
        "place": (pipeline, "place"),
        "hoist": (pipeline, "hoist"),
        "partition": (partition, "plan_fragments"),
        "emit": (emit, "build_program"),
        "verify": (mm.Program, "verify"),
    }
    originals = {name: getattr(*owner) for name, owner in owners.items()}

    def timed(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return originals[name](*args, **kwargs)
            finally:
                seconds[name] += time.thread_time() - start

        return run

    for name, owner in owners.items():
        setattr(*owner, timed(name))
    try:
        yield
    finally:
        for name, owner in owners.items():
            setattr(*owner, originals[name])


def placed(what: Problem, mesh: mm.MultiMesh) -> tuple[Any, Any]:
    """The model and its optimizer on the stages of a mesh. Made op by op, without a program."""
    model = what.make()
    with mesh:
        placement = mm.pipeline_sharding(model, what.stages)
        for path, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Param):
                match = placement.lookup(path, variable)
                variable.set_value(jax.device_put(variable.get_value(), match.sharding))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def measure(model: str, layers: int, stages: int, microbatches: int, schedule: str | None) -> str:
    """One line of the table."""
    what = problem(model, layers, stages, microbatches)
    mesh = mm.MultiMesh(axis_sizes=(stages,), axis_names=("stage",), devices=jax.devices()[:stages])
    state = placed(what, mesh)

    @mm.jit(mesh=mesh)
    def step(model, optimizer, batch):
        grad_fn = nnx.value_and_grad(what.loss)
        loss, grads = mm.microbatch(grad_fn, dim=0, size=1, argnum=1, schedule=schedule)(model, batch)
        optimizer.update(model, grads)
        return loss

    start = time.thread_time()
    traced = step.trace(*state, what.batch)
    seconds = dict.fromkeys(COLUMNS, 0.0) | {"trace": time.thread_time() - start}
    with timed_passes(seconds):
        start = time.thread_time()
        made = traced.split().program
    seconds["rest"] = time.thread_time() - start - sum(seconds[name] for name in PASSES)
    size = len(made.instructions)
    equations = sum(len(f.jaxpr.eqns) for f in made.fragments)
    total = sum(seconds.values()) - seconds["trace"]
    return (
        f"{layers:6}{stages:7}{microbatches:13}{made.loops[0].schedule:>24}{equations:10,}{size:13,}"
        + "".join(f"{seconds[name]:10.2f}" for name in COLUMNS)
        + f"{1e6 * total / (size + equations):9.0f}{made.simulate().bubble:9.1%}"
    )


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(stages for _, stages, _ in options.sizes))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{options.model}; {cores} cores, jax {jax.__version__}; CPU seconds of the thread that traces")
    print(
        f"{'blocks':>6}{'stages':>7}{'microbatches':>13}{'schedule':>24}{'equations':>10}{'instructions':>13}"
        + "".join(f"{name:>10}" for name in COLUMNS)
        + f"{'us each':>9}{'bubble':>9}"
    )
    for layers, stages, microbatches in options.sizes:
        print(measure(options.model, layers, stages, microbatches, options.schedule), flush=True)


if __name__ == "__main__":
    main()
