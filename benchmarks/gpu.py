"""What does it cost to partition a train step into programs of one device? A language model on one GPU:

- **nnx.jit**: the step as one XLA program, gradients accumulated over the microbatches by `lax.scan`;
- **mm.jit**: the same step, its model divided into four tasks whose meshes are all of that same device, with
  the schedule that mm.jit chooses;
- **sequential**: the same, but each microbatch goes through all tasks, forward and backward, before the next
  one begins, which needs the least memory.

Nothing runs side by side here, so the tasks can gain nothing: what is measured is what they lose. In a round
steps follow each other without a wait, as in training, so that dispatch can hide behind the device. Peak
memory is measured first, in a process for each; how long the GPU works, last, under `jax.profiler`. Anything
with a device will do: on a CPU, or with `--size tiny`, it is a test of the script alone.

    python benchmarks/gpu.py
"""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import flax
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from contenders import problem as problems
from contenders.contender import Contender, compare
from contenders.mm_jit import mm_jit
from contenders.nnx_jit import nnx_jit
from contenders.problem import Problem

import mmnnx as mm
from mmnnx.modules.lm import LMConfig

NAMES = ("nnx.jit", "mm.jit", "sequential")
TASKS = 4
STEPS = 3
"""Steps whose losses are compared, and after which peak memory is read."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Time a language model's training step on one device: in four tasks, and whole."""

    size: Literal["tiny", "small", "full"] | None = None
    """Full: 0.9 billion parameters, 33,000 tokens a step, which fills a GPU. Small: 36 million parameters,
    4,096 tokens, which does not. Default: full on a GPU, tiny on a CPU."""
    attention: Literal["xla", "cudnn"] = "xla"
    """How attention is computed: cudnn is flash attention on GPUs, in bfloat16."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What to compute in. Weights, gradients and optimizer state are float32."""
    rounds: int = 10
    """How often each takes its turn."""
    steps: int = 5
    """Steps of a turn."""
    out: Path | None = None
    """A file for the results as JSON."""
    peaks: bool = True
    """Measure peak memory, in a process for each."""
    peak_of: Literal["nnx.jit", "mm.jit", "sequential"] | None = None
    """Print the peak memory of this one in bytes, and nothing else."""

    def __post_init__(self):
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name} {getattr(self, name)} is less than 1")


def make_problem(options: Options) -> Problem:
    size = options.size or ("tiny" if jax.default_backend() == "cpu" else "full")
    how: dict[str, Any] = dict(dtype=jnp.dtype(options.dtype), attention=options.attention)
    if size == "tiny":
        config = LMConfig(layers=4, width=32, mlp=64, **how)
        return problems.lm("tiny", TASKS, 4, rows=2, length=32, config=config)
    if size == "small":
        config = LMConfig(vocab=8192, layers=8, width=512, heads=8, kv_heads=8, mlp=1536, **how)
        return problems.lm("small", TASKS, 8, rows=2, length=256, config=config)
    config = LMConfig(vocab=32_000, layers=16, width=2048, heads=16, kv_heads=8, mlp=5632, **how)
    return problems.lm("full", TASKS, 8, rows=2, length=2048, config=config)


def tasks() -> list[mm.Task]:
    """Four tasks on the first device. Meshes of one shape there are one mesh to mmnnx; these differ in it."""
    meshes = [mm.TaskMesh(devices=[0], axis_sizes=(1,) * n) for n in range(1, TASKS + 1)]
    return [mm.Task(f"stage{n}", mesh=mesh) for n, mesh in enumerate(meshes)]


def make(name: str, problem: Problem) -> Contender:
    if name == "nnx.jit":
        return nnx_jit(problem, name, jax.devices()[:1])
    contender, program = mm_jit(problem, tasks(), schedule="sequential" if name == "sequential" else None)
    contender.name = name
    print(f"{name}: {str(program(problem.batch)[0]).splitlines()[0]}", file=sys.stderr)
    return contender


def peak(name: str, problem: Problem) -> int | None:
    """Bytes that the device held at most while a contender was made and took a few steps, if it says so."""
    contender = make(name, problem)
    for _ in range(STEPS):
        jax.block_until_ready((contender.step(problem.batch), contender.state()))
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def peak_apart(name: str) -> int | None:
    """The same in a process of its own, as the device cannot forget its peak."""
    command = [sys.executable, *sys.argv, "--peak-of", name]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return json.loads(run.stdout.splitlines()[-1])


def check(contenders: list[Contender], problem: Problem) -> None:
    """All agree on the first gradients and losses, as far as what they compute in allows."""
    tolerance = 1e-4 if problem.make().config.dtype == jnp.float32 else 0.1
    expected: Any = None
    for contender in contenders:
        losses = [float(contender.step(problem.batch))]
        gradients = jax.device_get(contender.moment())
        losses += [float(contender.step(problem.batch)) for _ in range(STEPS - 1)]
        expected = expected or (losses, gradients)
        np.testing.assert_allclose(losses, expected[0], rtol=tolerance, err_msg=f"losses of {contender.name}")
        compare(contender.name, gradients, expected[1], tolerance)


def turn(contender: Contender, problem: Problem, steps: int) -> tuple[float, float, float]:
    """Seconds for each of `steps` steps in a row: in all, until the call returned, of the thread's CPU."""
    jax.block_until_ready((contender.step(problem.batch), contender.state()))
    host, start = time.thread_time(), time.perf_counter()
    for _ in range(steps):
        loss = contender.step(problem.batch)
    returned, host = time.perf_counter(), time.thread_time() - host
    jax.block_until_ready((loss, contender.state()))
    return tuple(x / steps for x in (time.perf_counter() - start, returned - start, host))


def busy(contender: Contender, problem: Problem, steps: int) -> float | None:
    """Seconds of a step in which the GPU computes or copies, as `jax.profiler` saw it; None without a GPU."""
    jax.block_until_ready((contender.step(problem.batch), contender.state()))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                loss = contender.step(problem.batch)
            jax.block_until_ready((loss, contender.state()))
        spans = sorted((e.start_ns, e.start_ns + e.duration_ns) for e in gpu_events(Path(folder)))
    total, end = 0.0, 0.0
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / steps / 1e9 if spans else None


def gpu_events(folder: Path) -> Iterator[Any]:
    """The kernels and copies of GPUs in a trace of `jax.profiler`."""
    (file,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    for line in (line for plane in planes if "/device:GPU" in plane.name for line in plane.lines):
        if line.name.startswith("Stream"):
            yield from line.events


def summarize(
    options: Options,
    problem: Problem,
    turns: dict[str, Any],
    peaks: dict[str, Any],
    busy_seconds: dict[str, float | None],
) -> dict[str, Any]:
    """Times of a step in milliseconds, medians over the rounds; bytes in MiB."""
    model = jax.eval_shape(problem.make)
    parameters = sum(x.size for x in jax.tree.leaves(model))
    tokens = problem.batch.shape[0] * (problem.batch.shape[1] - 1)
    rows = {}
    for name, seconds in turns.items():
        total, returned, host = (float(np.median(x)) for x in zip(*seconds))
        rows[name] = {
            "step_ms": 1e3 * total,
            "returned_ms": 1e3 * returned,
            "host_cpu_ms": 1e3 * host,
            "tflops": 6 * parameters * tokens / total / 1e12,
            "busy_ms": None if (seconds := busy_seconds[name]) is None else 1e3 * seconds,
            "peak_mib": None if peaks[name] is None else peaks[name] / 2**20,
        }
    over = lambda name: [mine[0] / whole[0] for mine, whole in zip(turns[name], turns["nnx.jit"])]
    return {
        "device": f"{jax.devices()[0].device_kind} ({jax.default_backend()})",
        "versions": f"Python {platform.python_version()}, jax {jax.__version__}, flax {flax.__version__}",
        "size": problem.name,
        "dtype": options.dtype,
        "attention": options.attention,
        "parameters": parameters,
        "tokens": tokens,
        "microbatches": problem.microbatches,
        "rounds": options.rounds,
        "steps": options.steps,
        "over_nnx_jit": {name: float(np.median(over(name))) for name in NAMES[1:]},
        "rows": rows,
    }


def render(summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['device']}; {summary['versions']}",
        f"{summary['size']}: {summary['parameters']:,} parameters, {summary['tokens']:,} tokens a step in "
        f"{summary['microbatches']} microbatches, {summary['dtype']}, attention by {summary['attention']}; "
        f"{summary['rounds']} rounds of {summary['steps']} steps",
        "",
        f"{'':10}{'step':>12}{'GPU busy':>14}{'returned':>12}{'host CPU':>12}{'TFLOP/s':>10}"
        f"{'peak memory':>16}",
    ]
    for name, row in summary["rows"].items():
        memory = "not reported" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f} MiB"
        works = "not reported" if row["busy_ms"] is None else f"{row['busy_ms']:,.1f} ms"
        lines.append(
            f"{name:10}{row['step_ms']:>9.1f} ms{works:>14}{row['returned_ms']:>9.1f} ms"
            f"{row['host_cpu_ms']:>9.1f} ms{row['tflops']:>10.2f}{memory:>16}"
        )
    ratios = [f"{name} / nnx.jit: {ratio:.3f}" for name, ratio in summary["over_nnx_jit"].items()]
    return "\n".join([*lines, "", *ratios])


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.peak_of:
        print(json.dumps(peak(options.peak_of, make_problem(options))))
        return
    peaks = {name: peak_apart(name) if options.peaks else None for name in NAMES}
    problem = make_problem(options)
    contenders = [make(name, problem) for name in NAMES]
    check(contenders, problem)
    turns: dict[str, list[Any]] = {name: [] for name in NAMES}
    for n in range(options.rounds):
        for contender in contenders if n % 2 else contenders[::-1]:
            turns[contender.name].append(turn(contender, problem, options.steps))
    busy_seconds = {contender.name: busy(contender, problem, options.steps) for contender in contenders}
    summary = summarize(options, problem, turns, peaks, busy_seconds)
    print(render(summary))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
