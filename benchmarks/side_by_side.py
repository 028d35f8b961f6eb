"""What should a user pick? One training step, taken in six ways by devices of one process:

- **mm.jit**: the ordinary NNX train step, its state placed by `mm.pipeline_sharding`;
- **by hand**: a 1F1B pipeline written out over jitted stage functions;
- **one device**: the step under `nnx.jit`, gradients accumulated over the microbatches by `lax.scan`;
- **data parallel**, **tensor parallel**: the step under `nnx.jit`, over the same devices as the pipelines;
- **SPMD pipeline**: stacked stages in one program, a scan over ticks, `ppermute` between them.

The models are a stack of residual blocks, the language model of `make train` and one with experts, each in
sizes from those where dispatch is what takes time to those where arithmetic is. All six must agree on losses
and gradients. A table (Markdown and JSON) and a picture are written to `--out`.

    python benchmarks/side_by_side.py
"""

from __future__ import annotations

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any, Literal

import flax
import jax
import tyro
from contenders import problem as problems
from contenders.by_hand import by_hand
from contenders.mm_jit import mm_jit
from contenders.nnx_jit import nnx_jit
from contenders.problem import Problem
from contenders.report import draw, markdown
from contenders.spmd_pipeline import spmd_pipeline
from contenders.timing import cores, measure, processor

import mmnnx as mm
from mmnnx.modules.lm import LMConfig
from mmnnx.modules.moe_lm import MoELMConfig

STAGES, MICROBATCHES = 4, 16


@dataclasses.dataclass(frozen=True)
class Options:
    """Time one training step: mm.jit beside what a user could pick instead."""

    models: tuple[Literal["MLP", "LM", "MoE LM"], ...] = ("MLP", "LM", "MoE LM")
    """Which models."""
    sizes: tuple[Literal["tiny", "small", "medium", "large"], ...] = ("small", "medium", "large")
    """Of each model. Tiny is for a test of the benchmark; the medium LM is that of `make train`."""
    rounds: int = 10
    """Timed steps of each contender, after the untimed ones whose results are compared."""
    out: Path = Path(__file__).parent / "results"
    """Folder for side_by_side.md, .json and .png."""

    def __post_init__(self):
        if self.rounds < 1:
            raise SystemExit(f"--rounds {self.rounds} is less than 1")


def make_problem(model: str, size: str) -> Problem:
    name = f"{model}, {size}"
    if model == "MLP":
        rows, layers, width = {
            "tiny": (2, 4, 8),
            "small": (8, 32, 32),
            "medium": (32, 32, 128),
            "large": (64, 16, 384),
        }[size]
        return problems.mlp(name, STAGES, MICROBATCHES, rows, layers, width)
    layers, length, width, mlp, expert = {
        "tiny": (4, 8, 16, 32, 16),
        "small": (8, 32, 48, 128, 48),
        "medium": (8, 128, 96, 256, 64),
        "large": (8, 128, 256, 704, 176),
    }[size]
    if model == "LM":
        config = LMConfig(layers=layers, width=width, mlp=mlp)
        return problems.lm(name, STAGES, MICROBATCHES, rows=1, length=length, config=config)
    config = MoELMConfig(layers=layers, width=width, mlp=expert)
    return problems.moe_lm(name, STAGES, MICROBATCHES, rows=1, length=length, config=config)


def run(problem: Problem, rounds: int) -> dict[str, Any]:
    """The rows of the table for one problem. Times are in milliseconds, medians over the rounds."""
    devices = jax.devices()[: problem.stages]
    mesh = mm.MultiMesh(axis_sizes=(problem.stages,), axis_names=("stage",), devices=devices)
    through_mm, program_of = mm_jit(problem, problem.stages, mesh, schedule="1f1b", per_call="auto")
    contenders = [
        through_mm,
        by_hand(problem, devices),
        nnx_jit(problem, "one device", devices[:1]),
        nnx_jit(problem, "data parallel", devices),
        nnx_jit(problem, "tensor parallel", devices, over="tensor"),
        spmd_pipeline(problem, devices),
    ]
    timings = dict(zip([c.name for c in contenders], measure(contenders, problem.batch, rounds)))
    rows = {
        name: {
            "median_ms": t.median("total"),
            "min_ms": 1e3 * min(t.total),
            "over_mm_jit": t.over(timings["mm.jit"]),
            "speedup": 1 / t.over(timings["one device"]),
            "dispatch_ms": t.median("dispatch"),
            "host_cpu_ms": t.median("host"),
            "cpu_ms": t.median("busy"),
            "cores_busy": t.cores,
            "xla_programs": t.programs,
            "first_step_s": t.first,
        }
        for name, t in timings.items()
    }
    program, arguments = program_of(problem.batch)
    costs = program.profile(*arguments).costs
    # Each was waited for, dispatch included, which in a step goes on while devices compute.
    bare = {name: max(0.0, seconds - costs.dispatch) for name, seconds in costs.calls.items()}
    latency = max(0.0, costs.latency - costs.dispatch)
    simulated = program.simulate(dataclasses.replace(costs, calls=bare, latency=latency, dispatch=0.0))
    first = jax.tree.leaves(problem.batch)[0]
    tokens = first.dtype.kind == "i"  # [rows, length + 1] of them; else rows of features
    return {
        "items": len(first) * (first.shape[1] - 1 if tokens else 1),
        "unit": "tokens" if tokens else "rows",
        "rows": rows,
        "program": {
            "fragments": len(program.fragments),
            "instructions": len(program.instructions),
            "transfers": len(program.transfers),
            "transferred_kib": sum(t.nbytes for t in program.transfers) / 2**10,
            "simulated_ms": 1e3 * simulated.makespan,
            "bubble": simulated.bubble,
            "schedule_bubble": program.simulate().bubble,
        },
    }


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    summary: dict[str, Any] = {
        "machine": f"{processor()}, {cores()} cores",
        "cores": cores(),
        "versions": f"Python {platform.python_version()}, jax {jax.__version__}, flax {flax.__version__}",
        "stages": STAGES,
        "microbatches": MICROBATCHES,
        "rounds": options.rounds,
        "problems": {},
    }
    for model in options.models:
        for size in options.sizes:
            problem = make_problem(model, size)
            summary["problems"][problem.name] = run(problem, options.rounds)
            jax.clear_caches()
            print(markdown({**summary, "problems": dict([list(summary["problems"].items())[-1]])}))
    options.out.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".md", markdown(summary)), (".json", json.dumps(summary, indent=1))):
        (options.out / f"side_by_side{suffix}").write_text(text + "\n")
    draw(summary).savefig(options.out / "side_by_side.png")
    print(f"written to {options.out}/side_by_side.md, .json and .png")


if __name__ == "__main__":
    main()
