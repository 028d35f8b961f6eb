"""How long does the first step take? The same train step traced and compiled whole under `nnx.jit`, on one
device, as a pipeline by `mm.jit`, and as a pipeline written by hand, whose functions JAX compiles as it meets
them; each time in a process of its own, in turn. Besides, how long it takes to make the model, compiled too.

python benchmarks/compile.py --model lm --layers 8 --tensor 2
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any, Literal

import jax
import tyro
from contenders.by_hand import by_hand
from contenders.contender import Contender
from contenders.problem import OPTIMIZER, Problem, lm, mlp
from flax import nnx

import mmnnx as mm
from mmnnx.modules.lm import LMConfig


@dataclasses.dataclass(frozen=True)
class Options:
    """Time the first step of training, traced and compiled whole and as a pipeline."""

    model: Literal["mlp", "lm"] = "lm"
    """Residual blocks of two layers, or the language model of `make train`."""
    layers: int = 8
    """Its blocks."""
    stages: int = 4
    """Pipeline stages."""
    tensor: int = 1
    """Devices in a stage, over which its weights are split."""
    microbatches: tuple[int, ...] = (16,)
    """Slices of the batch in one step."""
    rounds: int = 3
    """Processes of each kind."""
    cache: bool = False
    """Start each pipeline a second time, with JAX's persistent compilation cache."""
    run: Literal["nnx.jit", "mm.jit", "by hand"] | None = None
    """Take one first step in this process, and print its times as JSON."""


def problem(options: Options) -> Problem:
    (microbatches,) = options.microbatches
    if options.model == "mlp":
        return mlp("mlp", options.stages, microbatches, rows=32, layers=options.layers, width=128)
    config = LMConfig(vocab=256, layers=options.layers, width=96, heads=4, kv_heads=2, mlp=256)
    return lm("lm", options.stages, microbatches, rows=2, length=128, config=config)


def first_step(options: Options) -> dict[str, float]:
    """Seconds of a first step: to trace it, to lower it, to compile it, and in all."""
    what = problem(options)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.stages * options.tensor)
    counts: Counter[str] = Counter()

    def count(event: str, *_: float, **__: Any) -> None:
        counts[event.rsplit("/", 1)[-1]] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    jax.monitoring.register_event_listener(count)

    def train_step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        grad_fn = nnx.value_and_grad(what.loss)
        loss, grads = mm.microbatch(grad_fn, dim=0, size=what.rows, argnum=1, reduce="mean", schedule="1f1b")(
            model, batch
        )
        optimizer.update(model, grads)
        return loss

    def make_optimizer(model: Any) -> nnx.Optimizer:
        return nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    if options.run == "by hand":
        contender = by_hand(what, jax.devices())
        jax.block_until_ready(contender.state())
        counts.clear()
        (total, cpu), (run, run_cpu) = (measured(contender, what.batch) for _ in range(2))
        return {"total": total - run, "CPU": cpu - run_cpu, **compiled(counts)}

    mesh = mm.MultiMesh(axis_sizes=(options.stages, options.tensor), axis_names=("stage", "model"))
    start = time.perf_counter()
    if options.run == "nnx.jit":
        model = jax.block_until_ready(nnx.jit(what.make)())
        making = time.perf_counter() - start
        state = model, nnx.jit(make_optimizer)(model)
        step = nnx.jit(train_step, donate_argnums=(0, 1))
    else:
        rules = mm.logical_rules("tensor")
        with mesh:
            placement = mm.pipeline_sharding(nnx.eval_shape(what.make), options.stages, rules=rules)
            model = jax.block_until_ready(mm.jit(what.make, out_shardings=placement)())
            making = time.perf_counter() - start
            state = model, mm.jit(make_optimizer)(model)
        step = mm.jit(train_step, donate_argnums=(0, 1), mesh=mesh)
    jax.block_until_ready(nnx.state(state))
    counts.clear()
    marks = [(time.perf_counter(), time.process_time())]

    def mark() -> None:
        marks.append((time.perf_counter(), time.process_time()))

    traced = step.trace(*state, what.batch)
    mark()
    lowered = traced.lower()
    mark()
    lowered.compile()
    mark()
    (start, cpu), *_, (end, cpu_end) = marks
    names = ("trace", "lower", "compile")
    walls = {name: b[0] - a[0] for name, a, b in zip(names, marks, marks[1:])}
    used = {f"{name} CPU": b[1] - a[1] for name, a, b in zip(names, marks, marks[1:])}
    return {"total": end - start, "CPU": cpu_end - cpu, "making": making, **walls, **used, **compiled(counts)}


def compiled(counts: Counter[str]) -> dict[str, int]:
    return {"programs": counts["backend_compile_duration"], "hits": counts["cache_hits"]}


def measured(contender: Contender, batch: Any) -> tuple[float, float]:
    """Seconds and CPU seconds of one step, until all of it is done."""
    start, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready((contender.step(batch), contender.state()))
    return time.perf_counter() - start, time.process_time() - cpu


def started(options: Options, run: str, microbatches: int, folder: str | None = None) -> dict[str, float]:
    """A first step in a process of its own."""
    command = [sys.executable, __file__, "--run", run]
    for name in ("model", "layers", "stages", "tensor"):
        command += [f"--{name}", str(getattr(options, name))]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": folder or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    ran = subprocess.run(
        [*command, "--microbatches", str(microbatches)],
        env=os.environ | (cache if folder else {}),
        check=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(ran.stdout)


PARTS = ("trace", "lower", "compile", "trace CPU", "lower CPU", "compile CPU")


def ratio(runs: list[dict[str, float]], whole: list[dict[str, float]], key: str) -> str:
    """The median over the rounds; nothing where it was not measured."""
    if key not in runs[0]:
        return ""
    return f"{statistics.median(each[key] / one[key] for each, one in zip(runs, whole)):.2f}"


def row(name: str, microbatches: int, runs: list[dict[str, float]], total: str = "", making: str = "") -> str:
    best = {key: min(run[key] for run in runs) for key in runs[0]}
    return (
        f"{name:16}{microbatches:13}{best['total']:9.2f}{best['CPU']:9.2f}"
        + "".join(f"{best[key]:9.2f}" if key in best else " " * 9 for key in PARTS)
        + f"{best['programs']:10.0f}{best['hits']:6.0f}{total:>9}"
        + (f"{best['making']:9.2f}{making:>9}" if "making" in best else "")
    )


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.run is not None:
        print(json.dumps(first_step(options)))
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"{options.model} of {options.layers} blocks; {options.stages} stages of {options.tensor} devices; "
        f"{cores} cores, jax {jax.__version__}; least seconds of {options.rounds}, wall and CPU\n"
        f"{'':16}{'microbatches':>13}{'total':>9}{'CPU':>9}"
        + "".join(f"{name:>9}" for name in ("trace", "lower", "compile"))
        + "".join(f"{name:>9}" for name in ("CPU", "CPU", "CPU"))
        + f"{'programs':>10}{'hits':>6}{'ratio':>9}{'model':>9}{'ratio':>9}"
    )
    for microbatches in options.microbatches:
        runs: dict[str, list[dict[str, float]]] = {"nnx.jit": [], "mm.jit": []}
        if options.tensor == 1:
            runs["by hand"] = []
        for _ in range(options.rounds):
            for run, found in runs.items():
                found.append(started(options, run, microbatches))
        for name, found in runs.items():
            ratios = [ratio(found, runs["nnx.jit"], key) for key in ("total", "making")]
            print(row(name, microbatches, found, *ratios), flush=True)
        if options.cache:
            for name in ("nnx.jit", "mm.jit"):
                with tempfile.TemporaryDirectory() as folder:
                    started(options, name, microbatches, folder)
                    again = [started(options, name, microbatches, folder)]
                print(row(f"{name}, again", microbatches, again), flush=True)
    print("model: seconds to make it; ratio: of the totals and of these to nnx.jit's, median over the rounds")


if __name__ == "__main__":
    main()
