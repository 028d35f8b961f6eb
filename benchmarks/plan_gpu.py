"""Does a plan tell the truth of a GPU? Language models in four tasks that share one, planned and measured:

- **planned**: by `mm.plan`, each fragment, the step, and the bytes that the device holds at most;
- **measured**: each fragment alone, by `program.profile`; steps that follow each other without a wait; and the
  peak that the device's allocator reports.

A plan can be made where no GPU is, and be compared on one:

    python benchmarks/plan_gpu.py --target h100:1x1 --write plans.json
    python benchmarks/plan_gpu.py --planned plans.json
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import tyro
from contenders import problem as problems
from contenders.problem import Problem
from flax import nnx
from gpu import tasks

import mmnnx as mm
from mmnnx.modules.lm import LMConfig
from mmnnx.modules.moe_lm import MoELMConfig
from mmnnx.mpmd.runtime import prepare
from mmnnx.mpmd.runtime.profile import measurer

ROWS, LENGTH, MICROBATCHES, STAGES = 2, 2048, 8, 4
UNTIMED = 2  # steps before those that are timed

BFLOAT16: dict[str, Any] = dict(vocab=32_000, width=2048, heads=16, kv_heads=8, dtype=jnp.bfloat16)
DENSE = BFLOAT16 | dict(layers=8, mlp=5632)
EXPERTS = BFLOAT16 | dict(layers=4, mlp=2816, experts=8, top_k=2)
TINY: dict[str, Any] = dict(vocab=512, layers=4, width=64, heads=4, kv_heads=2, mlp=128)
MODELS: dict[str, LMConfig] = {
    "dense": LMConfig(**DENSE),
    "dense, cudnn": LMConfig(**DENSE, attention="cudnn"),
    "dense, remat": LMConfig(**DENSE, attention="cudnn", remat=True),
    "dense, scanned": LMConfig(**DENSE, attention="cudnn", scan=True),
    "experts": MoELMConfig(**EXPERTS, attention="cudnn", capacity_factor=1.25),
    "experts, no capacity": MoELMConfig(**EXPERTS, attention="cudnn"),
    "tiny": LMConfig(**TINY),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare plans with runs on one device."""

    models: tuple[str, ...] = tuple(name for name in MODELS if name != "tiny")
    """Which; "tiny" is for a test of this script on a CPU."""
    steps: int = 5
    """Timed steps of each."""
    target: str | None = None
    """Plan for this machine, as `mm.target` names it, and run nothing."""
    write: Path | None = None
    """A file for the figures, as JSON."""
    planned: Path | None = None
    """What `--target` wrote: compare with these plans, not with those made here."""


def main(options: Options) -> None:
    planned = {} if options.planned is None else json.loads(options.planned.read_text())
    found = {}
    for name in options.models:
        # The device cannot forget its peak: each model has a process of its own.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            figures = alone.submit(figures_of, name, options, planned.get(name, {}).get("plan")).result()
        found[name] = figures
        if options.target is None:
            print(table(name, figures), flush=True)
        if options.write is not None:
            options.write.write_text(json.dumps(found, indent=1) + "\n")


def figures_of(name: str, options: Options, planned: dict[str, Any] | None) -> dict[str, Any]:
    """The plan of a model as data, and what was measured of it if a device is here."""
    config = MODELS[name]
    make = problems.moe_lm if isinstance(config, MoELMConfig) else problems.lm
    rows, length = (2, 32) if name == "tiny" else (ROWS, LENGTH)
    problem = make(name, STAGES, MICROBATCHES, rows=rows, length=length, config=config)
    if options.target is not None:
        with mm.MultiMesh(devices=mm.target(options.target), axis_sizes=(1,), axis_names=("stage",)):
            model, optimizer = nnx.eval_shape(lambda: born(problem))
            batch = jax.ShapeDtypeStruct(problem.batch.shape, problem.batch.dtype)
            return {"plan": mm.plan(train_step(problem, model), model, optimizer, batch).to_json()}
    step = train_step(problem, nnx.eval_shape(problem.make))
    model = mm.jit(problem.make, out_shardings=mm.pipeline_sharding(nnx.eval_shape(problem.make), tasks()))()
    optimizer = mm.jit(lambda model: nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param))(model)
    for n in range(UNTIMED + options.steps):
        if n == UNTIMED:
            jax.block_until_ready(jax.tree.leaves(nnx.state((model, optimizer))))
            began = time.perf_counter()
        step(model, optimizer, problem.batch)
    jax.block_until_ready(jax.tree.leaves(nnx.state((model, optimizer))))
    seconds = (time.perf_counter() - began) / options.steps
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    arguments = model, optimizer, problem.batch
    if planned is None:
        planned = mm.plan(step, *arguments).to_json()
    as_it_runs = lambda bound, bindings, compiled, options: measurer(compiled)
    with mock.patch.object(prepare, "_measured", as_it_runs):
        profile = step.program(*arguments).profile(*arguments)
    return {
        "plan": planned,
        "device": jax.devices()[0].device_kind,
        "step": seconds,
        "peak": peak,
        "calls": dict(profile.costs.calls),
        "latency": profile.costs.latency,
        "bandwidth": profile.costs.bandwidth,
    }


def born(problem: Problem) -> tuple[Any, nnx.Optimizer]:
    model = problem.make()
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def train_step(problem: Problem, model: Any) -> Any:
    """The step of `problem`, its state where it is in every step but the first."""
    placement = mm.pipeline_sharding(model, tasks())

    @mm.jit(in_shardings=(placement, placement, None), donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        grad_fn = nnx.value_and_grad(problem.loss)
        loss, gradients = mm.microbatch(grad_fn, dim=0, size=problem.rows, argnum=1, reduce="mean")(
            model, batch
        )
        optimizer.update(model, gradients)
        return loss

    return step


def table(name: str, figures: dict[str, Any]) -> str:
    plan, calls = figures["plan"], figures["calls"]
    lines = [f"{name}, on {figures['device']}", f"{'':<28}{'runs':>6}{'planned':>12}{'measured':>12}{'ratio':>8}"]
    for f in plan["fragments"]:
        mine = calls.get(f["name"])
        lines.append(_line(f["name"], f["runs"], f.get("seconds"), mine, 1e3, "ms"))
    lines.append(_line("step", 1, plan["seconds"], figures["step"], 1e3, "ms"))
    peak = max((m["total"] for m in plan["memory"]), default=None)
    lines.append(_line("peak memory", 1, peak, figures["peak"], 2**-20, "MiB"))
    return "\n".join([*lines, ""])


def _line(name: str, runs: int, planned: float | None, measured: float | None, unit: float, of: str) -> str:
    shown = [f"{x * unit:,.2f} {of}" if x is not None else "" for x in (planned, measured)]
    ratio = f"{planned / measured:.2f}" if planned and measured else ""
    return f"{name:<28}{runs:>6}{shown[0]:>12}{shown[1]:>12}{ratio:>8}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
    sys.stdout.flush()
