"""What does a pipeline over processes gain, and what does `mm.jit` cost there? One step, in several ways:

- **one core**: the step under `nnx.jit` in one process, gradients accumulated over the microbatches;
- **by hand**: a 1F1B pipeline with a stage in each process, written out over jitted stage functions and
  `jax.experimental.transfer`, as fast as we know how to write it;
- **mm.jit**: the ordinary NNX train step after `mm.initialize`, its state placed by `mm.pipeline_sharding`;
- with `--spmd` also **data parallel**, `nnx.jit` over the devices of all processes, and **SPMD pipeline**,
  stacked stages in one program, a scan over ticks, `ppermute` between them.

Every process is pinned to a core of its own. All take the same step on the same batch and must agree on
losses and gradients. A round is one timed step of each, in an order that changes from round to round, right
after another step of the same one.

    python benchmarks/processes.py --processes 2 4
"""

from __future__ import annotations

import dataclasses
import json
import platform
import random
import time
from typing import Any, Literal

import flax
import jax
import numpy as np
import tyro
from across import by_hand_across, data_parallel, pipeline_in_one_program
from contenders import problem as problems
from contenders.contender import Contender, compare
from contenders.mm_jit import mm_jit
from contenders.nnx_jit import nnx_jit
from contenders.problem import Problem
from contenders.timing import UNTIMED, cores, processor
from pinned import Pinned, ProcessError
from side_by_side import make_problem

import mmnnx as mm


@dataclasses.dataclass(frozen=True)
class Options:
    """Time one training step over processes pinned to cores: on one, written by hand, and through mm.jit."""

    processes: tuple[int, ...] = (2, 4)
    """How many processes, a core and a pipeline stage each; one table for each number."""
    model: Literal["MLP", "LM", "MoE LM"] = "MLP"
    """The model, as in side_by_side.py."""
    size: Literal["tiny", "small", "medium", "large"] | None = None
    """Its size there. Default: an MLP of the numbers below, or another model's "medium"."""
    microbatches: int = 16
    """Slices of the batch in one step."""
    layers: int = 32
    """Residual blocks of the MLP; a multiple of the processes."""
    width: int = 128
    """Features of its residual stream; a block's hidden layer has four times as many."""
    rows: int = 128
    """Rows of one microbatch."""
    spmd: bool = False
    """Time the SPMD programs as well."""
    rounds: int = 18
    """Timed steps of each contender, after the untimed ones whose results are compared."""
    timeout: float = 120.0
    """Seconds that the processes have for their start and for each step; then all are ended."""
    json: bool = False
    """Print one JSON object in place of the tables."""

    def __post_init__(self):
        for name in ("microbatches", "layers", "width", "rows", "rounds"):
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name} {getattr(self, name)} is less than 1")
        for count in self.processes:
            if count < 2:
                raise SystemExit(f"--processes {count}: a pipeline has at least 2")
            if self.layers % count:
                raise SystemExit(f"--layers {self.layers} is not a multiple of --processes {count}")

    def problem(self, count: int) -> Problem:
        """What so many processes train, a stage each."""
        if self.model == "MLP" and self.size is None:
            name = f"MLP of {self.layers} blocks of width {self.width}, {self.rows} rows a microbatch"
            return problems.mlp(name, count, self.microbatches, self.rows, self.layers, self.width)
        return dataclasses.replace(make_problem(self.model, self.size or "medium"), stages=count)


ALONE = "one core"  # the contender of process 0, while the others wait


@dataclasses.dataclass
class Held:
    """What each process holds."""

    batch: Any
    contenders: dict[str, Contender]


def make(options: Options) -> Held:
    problem = options.problem(jax.process_count())
    mesh = mm.MultiMesh(axis_sizes=(problem.stages,), axis_names=("stage",), devices=jax.devices())
    contenders = [by_hand_across(problem), mm_jit(problem, problem.stages, mesh, schedule="1f1b")[0]]
    if options.spmd:
        contenders += [data_parallel(problem), pipeline_in_one_program(problem)]
    if jax.process_index() == 0:
        contenders.append(nnx_jit(problem, ALONE, jax.local_devices()))
    return Held(problem.batch, {contender.name: contender for contender in contenders})


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds that one process took for its part of a step, from when all began."""

    total: float  # until everything it writes is ready
    dispatch: float  # until the call returned
    host: float  # of the dispatching thread's CPU until then
    busy: float  # of its core
    loss: float | None  # where it is


def step(held: Held, name: str, start: float) -> Step | None:
    """Takes one step at a time on the clock that all processes of a machine share."""
    contender = held.contenders.get(name)
    if contender is None:
        return None
    while time.perf_counter() < start:
        pass
    busy, host = time.process_time(), time.thread_time()
    loss = contender.step(held.batch)
    returned, host = time.perf_counter(), time.thread_time() - host
    jax.block_until_ready((loss, contender.state()))
    end, busy = time.perf_counter(), time.process_time() - busy
    here = loss is not None and loss.addressable_shards
    return Step(end - start, returned - start, host, busy, float(loss) if here else None)


def gradients(held: Held, name: str) -> dict[str, np.ndarray]:
    """After one step Adam's first moment, a multiple of the gradient, of each parameter in this process."""
    contender = held.contenders.get(name)
    moment = contender.moment() if contender else {}
    return {path: np.asarray(x) for path, x in moment.items() if x.addressable_shards}


def measure(options: Options, count: int) -> dict[str, Any]:
    names = [ALONE, "by hand", "mm.jit", *(("data parallel", "SPMD pipeline") if options.spmd else ())]
    steps: dict[str, list[list[Step]]] = {name: [] for name in names}  # name -> rounds -> processes
    with Pinned(count, make, options, timeout=options.timeout) as processes:

        def take(name: str) -> list[Step]:
            parts = processes.ask(step, name, time.perf_counter() + 0.005)
            return [part for part in parts if part is not None]

        expected: dict[str, np.ndarray] = {}
        losses: list[float] = []
        for name in names:
            mine = [loss_of(take(name))]
            found = {path: x for part in processes.ask(gradients, name) for path, x in part.items()}
            expected = expected or found
            compare(name, found, expected, tolerance=1e-4)
            mine += [loss_of(take(name)) for _ in range(UNTIMED - 1)]
            losses = losses or mine
            np.testing.assert_allclose(mine, losses, rtol=1e-4, err_msg=f"losses of {name}")
        for turn in range(options.rounds):
            for name in random.Random(turn).sample(names, len(names)):
                take(name)  # what the next one finds in the caches, this one left there
                steps[name].append(take(name))
    return summarize(options.problem(count), steps)


def loss_of(parts: list[Step]) -> float:
    """The loss of a step, from a process that has it."""
    return next(part.loss for part in parts if part.loss is not None)


def summarize(problem: Problem, steps: dict[str, list[list[Step]]]) -> dict[str, Any]:
    """Times in milliseconds; ratios are medians over the rounds of the ratio within a round."""
    bound = problem.microbatches * problem.stages / (problem.microbatches + problem.stages - 1)
    totals = {
        name: np.array([max(part.total for part in parts) for parts in rounds])
        for name, rounds in steps.items()
    }
    rows = {}
    for name, rounds in steps.items():
        speedup = float(np.median(totals[ALONE] / totals[name]))
        busy = [sum(part.busy for part in parts) for parts in rounds]
        rows[name] = {
            "median_ms": 1e3 * float(np.median(totals[name])),
            "min_ms": 1e3 * float(totals[name].min()),
            "dispatch_ms": 1e3 * float(np.median([max(p.dispatch for p in parts) for parts in rounds])),
            "host_cpu_ms": 1e3 * float(np.median([max(p.host for p in parts) for parts in rounds])),
            "cores_busy": float(np.median(busy / totals[name])),
            "cpu_ms": 1e3 * float(np.median(busy)),
            "speedup": speedup,
            "share_of_bound": speedup / bound,
        }
    by_hand, mm_jit = totals["by hand"], totals["mm.jit"]
    return {
        "problem": problem.name,
        "microbatches": problem.microbatches,
        "processes": problem.stages,
        "schedule_bound": bound,
        "by_hand_over_mm_jit": float(np.median(by_hand / mm_jit)),
        "by_hand_over_mm_jit_of_minima": float(by_hand.min() / mm_jit.min()),
        "contenders": rows,
    }


def render(summary: dict[str, Any]) -> str:
    lines = [f"{summary['machine']}; {summary['versions']}; {summary['options']['rounds']} rounds"]
    for result in summary["results"]:
        lines += [
            "",
            f"{result['problem']}; {result['processes']} processes of one core, "
            f"{result['microbatches']} microbatches: schedule bound {result['schedule_bound']:.2f}x",
            f"{'':14}{'median':>10}{'min':>10}{'dispatch':>10}{'host CPU':>10}{'all CPU':>10}{'cores':>7}"
            f"{'speed-up':>10}{'of bound':>10}",
        ]
        for name, row in result["contenders"].items():
            share = "" if name == ALONE else f"{row['share_of_bound']:.0%}"
            lines.append(
                f"{name:14}{row['median_ms']:>7.1f} ms{row['min_ms']:>7.1f} ms{row['dispatch_ms']:>7.1f} ms"
                f"{row['host_cpu_ms']:>7.1f} ms{row['cpu_ms']:>7.1f} ms{row['cores_busy']:>7.2f}"
                f"{row['speedup']:>9.2f}x{share:>10}"
            )
        lines.append(
            f"speed of mm.jit over by hand: {result['by_hand_over_mm_jit']:.3f} (median of the rounds), "
            f"{result['by_hand_over_mm_jit_of_minima']:.3f} (of the minima)"
        )
    return "\n".join([*lines, "", "losses and gradients agree"])


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    try:
        results = [measure(options, count) for count in options.processes]
    except ProcessError as error:
        raise SystemExit(str(error)) from None
    summary = {
        "options": dataclasses.asdict(options),
        "machine": f"{processor()}, {cores()} cores",
        "versions": f"Python {platform.python_version()}, jax {jax.__version__}, flax {flax.__version__}",
        "results": results,
    }
    print(json.dumps(summary) if options.json else render(summary))


if __name__ == "__main__":
    main()
