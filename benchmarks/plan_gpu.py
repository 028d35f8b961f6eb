"""Does a plan tell the truth of a GPU? Language models in four tasks that share one, planned and measured:

- of each fragment, all its runs in a step: the planned time, and how long its kernels took, as
  `jax.profiler` saw it;
- the step: planned, and the mean of steps that follow each other without a wait;
- memory: planned, and the peak that the device's allocator reports.

A plan can be made where no GPU is, and be compared on one:

    python benchmarks/plan_gpu.py --target h100:1x1 --write plans.json
    python benchmarks/plan_gpu.py --planned plans.json
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from gpu import gpu_events, tasks

import mmnnx as mm
from mmnnx.modules.build import build
from mmnnx.modules.lm import LMConfig
from mmnnx.modules.moe_lm import MoELMConfig

MICROBATCHES = 8
UNTIMED = 2  # steps before those that are timed

SIZES: dict[str, Any] = dict(vocab=32_000, width=2048, heads=16, kv_heads=8, dtype=jnp.bfloat16)
DENSE = LMConfig(**SIZES, layers=8, mlp=5632, attention="cudnn")
EXPERTS = MoELMConfig(**SIZES, layers=4, mlp=2816, attention="cudnn", experts=8, capacity_factor=1.25)
# Models, the rows of a microbatch, and tokens in a row.
MODELS: dict[str, tuple[LMConfig, int, int]] = {
    "dense": (DENSE, 2, 2048),
    "dense, all scores": (dataclasses.replace(DENSE, attention="xla"), 2, 2048),
    "dense, remat": (dataclasses.replace(DENSE, remat=True), 2, 2048),
    "dense, float32": (dataclasses.replace(DENSE, dtype=jnp.float32, attention="xla"), 2, 2048),
    "wide": (dataclasses.replace(DENSE, layers=4, width=4096, heads=32, mlp=14_336), 1, 4096),
    "experts": (EXPERTS, 2, 2048),
    "experts, no capacity": (dataclasses.replace(EXPERTS, capacity_factor=None), 2, 2048),
    "small": (dataclasses.replace(DENSE, vocab=8192, width=512, heads=8, mlp=1536), 2, 256),
    "tiny": (LMConfig(vocab=512, layers=4, width=64, heads=4, kv_heads=2, mlp=128), 2, 32),
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
    planned: Path | None = None
    """What `--target` wrote: compare with these plans, not with those made here."""
    write: Path | None = None
    """A file for the figures, as JSON."""


def main(options: Options) -> None:
    planned = {} if options.planned is None else json.loads(options.planned.read_text())
    found = {}
    for name in options.models:
        # The device cannot forget its peak: each model has a process of its own.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            plan = planned.get(name, {}).get("plan")
            found[name] = alone.submit(figures_of, name, options, plan).result()
        if options.target is None:
            print(table(name, found[name]), flush=True)
        if options.write is not None:
            options.write.write_text(json.dumps(found, indent=1) + "\n")


def figures_of(name: str, options: Options, plan: dict[str, Any] | None) -> dict[str, Any]:
    """The plan of a model as data, and what was measured of it if it was run."""
    config, rows, length = MODELS[name]
    shape = MICROBATCHES * rows, length + 1
    if options.target is not None:
        with mm.MultiMesh(devices=mm.target(options.target), axis_sizes=(1,), axis_names=("stage",)):
            model = nnx.eval_shape(lambda: build(config))
            arguments = model, nnx.eval_shape(optimizer_of, model), jax.ShapeDtypeStruct(shape, jnp.int32)
            return {"plan": mm.plan(train_step(model, rows), *arguments).to_json()}
    placement = mm.pipeline_sharding(nnx.eval_shape(lambda: build(config)), tasks())
    model = mm.jit(lambda: build(config), out_shardings=placement)()
    optimizer = mm.jit(optimizer_of)(model)
    step = train_step(model, rows)
    tokens = np.random.default_rng(0).integers(0, config.vocab, shape, np.int32)
    ready = lambda: jax.block_until_ready(jax.tree.leaves(nnx.state((model, optimizer))))

    def steps(count: int) -> float:
        """Seconds of each of so many in a row."""
        ready()
        began = time.perf_counter()
        for _ in range(count):
            step(model, optimizer, tokens)
        ready()
        return (time.perf_counter() - began) / count

    steps(UNTIMED)
    seconds = steps(options.steps)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            steps(UNTIMED)
        kernels = kernel_seconds(Path(folder))
    return {
        "plan": plan or mm.plan(step, model, optimizer, tokens).to_json(),
        "device": jax.devices()[0].device_kind,
        "step": seconds,
        "peak": peak,
        "kernels": {module: total / UNTIMED for module, total in kernels.items()},
    }


def optimizer_of(model: Any) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def train_step(model: Any, rows: int) -> Any:
    """The step, with its state where it is in every step but the first."""
    placement = mm.pipeline_sharding(model, tasks())

    @mm.jit(in_shardings=(placement, placement, None), donate_argnums=(0, 1))
    def step(model, optimizer, tokens):
        grad_fn = nnx.value_and_grad(lambda model, tokens: model.loss(tokens))
        loss, grads = mm.microbatch(grad_fn, dim=0, size=rows, argnum=1, reduce="mean")(model, tokens)
        optimizer.update(model, grads)
        return loss

    return step


def kernel_seconds(folder: Path) -> Counter[str]:
    """How long the kernels of each XLA module ran on the GPU, in a trace of `jax.profiler`."""
    found: Counter[str] = Counter()
    for event in gpu_events(folder):
        found[str(dict(event.stats).get("hlo_module", ""))] += event.duration_ns / 1e9
    return found


def module_of(fragment: str) -> str:
    """The name of a fragment's XLA module; "stage0" and "stage0 (2)" have the same."""
    name = fragment.partition(" (")[0]
    return "jit_" + "".join(c if c.isalnum() else "_" for c in name)


def table(name: str, figures: dict[str, Any]) -> str:
    plan = figures["plan"]
    lines = [f"{name}, on {figures['device']}", f"{'':<52}{'planned':>14}{'measured':>14}{'ratio':>8}"]
    planned, named = Counter[str](), {}
    for f in plan["fragments"]:
        waits = f["iterations_on_values"] * plan["chip"]["loop_wait"] if plan["chip"] else 0.0
        planned[module_of(f["name"])] += f["runs"] * (f.get("seconds", 0) - waits)
        named.setdefault(module_of(f["name"]), f["name"])
    for module, seconds in planned.items():
        lines.append(_line(named[module], seconds, figures["kernels"].get(module), 1e3, "ms"))
    lines.append(_line("step", plan["seconds"], figures["step"], 1e3, "ms"))
    peak = max((m["total"] for m in plan["memory"]), default=None)
    lines.append(_line("peak memory", peak, figures["peak"], 2**-20, "MiB"))
    return "\n".join([*lines, *plan["notes"], ""])


def _line(name: str, planned: float | None, measured: float | None, unit: float, of: str) -> str:
    shown = [f"{x * unit:,.1f} {of}" if x else "" for x in (planned, measured)]
    ratio = f"{planned / measured:.2f}" if planned and measured else ""
    return f"{name:<52}{shown[0]:>14}{shown[1]:>14}{ratio:>8}"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
