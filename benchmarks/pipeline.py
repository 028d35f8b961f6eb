"""What does `mm.jit` cost? One training step, timed three ways in one process:

- **one device**: the step under `nnx.jit`, gradients accumulated over the microbatches by `lax.scan`;
- **by hand**: a 1F1B pipeline written out over jitted stage functions, as fast as we know how to write it;
- **mm.jit**: the ordinary NNX train step, its state placed by `TaskSharding`.

All three train the same network on the same batch and must agree on losses and gradients. A round is one
timed step of each, right after an untimed one, in an order that changes from round to round.

    python benchmarks/pipeline.py --stages 4 --microbatches 16
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import flax
import jax
import tyro
from contenders.by_hand import by_hand
from contenders.mm_jit import mm_jit
from contenders.nnx_jit import nnx_jit
from contenders.problem import Problem, mlp
from contenders.timing import Timing, cores, measure

import mmnnx as mm


@dataclasses.dataclass(frozen=True)
class Options:
    """Time one pipelined training step: on one device, written by hand, and through mm.jit."""

    stages: int = 4
    """Pipeline stages, one device each."""
    microbatches: int = 16
    """Slices of the batch in one step."""
    layers: int = 32
    """Residual blocks in the network; a multiple of the stages."""
    width: int = 128
    """Features of the residual stream; a block's hidden layer has four times as many."""
    rows: int = 32
    """Rows of one microbatch. A CPU spreads larger products than these over several cores."""
    rounds: int = 18
    """Timed steps of each contender, after the untimed ones whose results are compared."""
    json: bool = False
    """Print one JSON object in place of the table."""

    def __post_init__(self):
        for name in ("stages", "microbatches", "layers", "width", "rows", "rounds"):
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name} {getattr(self, name)} is less than 1")
        if self.layers % self.stages:
            raise SystemExit(f"--layers {self.layers} is not a multiple of --stages {self.stages}")

    def problem(self) -> Problem:
        """What all train."""
        return mlp("MLP", self.stages, self.microbatches, self.rows, self.layers, self.width)


def summarize(options: Options, timings: dict[str, Timing]) -> dict[str, Any]:
    """Times in milliseconds; ratios are medians over the rounds of the ratio within a round."""
    bound = options.microbatches * options.stages / (options.microbatches + options.stages - 1)
    by_hand, mm_jit = timings["by hand"], timings["mm.jit"]
    rows = {}
    for name, timing in timings.items():
        speedup = 1 / timing.over(timings["one device"])
        rows[name] = {
            "median_ms": timing.median("total"),
            "min_ms": 1e3 * min(timing.total),
            "dispatch_ms": timing.median("dispatch"),
            "host_cpu_ms": timing.median("host"),
            "cores_busy": timing.cores,
            "speedup": speedup,
            "share_of_bound": speedup / bound,
            "xla_programs": timing.programs,
            "first_step_s": timing.first,
        }
    return {
        "options": dataclasses.asdict(options),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "cores": cores(),
        "schedule_bound": bound,
        "mm_jit_over_by_hand": mm_jit.over(by_hand),
        "mm_jit_over_by_hand_of_minima": min(mm_jit.total) / min(by_hand.total),
        "contenders": rows,
    }


def render(summary: dict[str, Any]) -> str:
    o = summary["options"]
    lines = [
        f"{o['stages']} one-device stages, {o['microbatches']} microbatches of {o['rows']} rows, "
        f"{o['layers']} blocks of width {o['width']}; {o['rounds']} rounds",
        f"{summary['cores']} cores, jax {summary['jax']}, flax {summary['flax']}",
        "",
        f"{'':12}{'median':>10}{'min':>10}{'dispatch':>10}{'host CPU':>10}{'cores':>7}{'speed-up':>10}"
        f"{'of bound':>10}{'XLA programs':>14}{'first step':>12}",
    ]
    for name, row in summary["contenders"].items():
        share = "" if name == "one device" else f"{row['share_of_bound']:.0%}"
        lines.append(
            f"{name:12}{row['median_ms']:>7.1f} ms{row['min_ms']:>7.1f} ms{row['dispatch_ms']:>7.1f} ms"
            f"{row['host_cpu_ms']:>7.1f} ms{row['cores_busy']:>7.2f}{row['speedup']:>9.2f}x{share:>10}"
            f"{row['xla_programs']:>14}{row['first_step_s']:>10.1f} s"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"schedule bound {summary['schedule_bound']:.2f}x",
            f"mm.jit / by hand: {summary['mm_jit_over_by_hand']:.3f} (median of the rounds), "
            f"{summary['mm_jit_over_by_hand_of_minima']:.3f} (of the minima)",
            "losses and gradients of the three agree",
        ]
    )


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(8, options.stages))
    problem, devices = options.problem(), jax.devices()[: options.stages]
    mesh = mm.MultiMesh(axis_sizes=(options.stages,), axis_names=("stage",), devices=devices)
    contenders = [
        nnx_jit(problem, "one device", devices[:1]),
        by_hand(problem, devices),
        mm_jit(problem, problem.stages, mesh, schedule="1f1b")[0],
    ]
    timings = measure(contenders, problem.batch, options.rounds)
    summary = summarize(options, dict(zip([c.name for c in contenders], timings)))
    print(json.dumps(summary) if options.json else render(summary))


if __name__ == "__main__":
    main()
