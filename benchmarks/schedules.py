"""What does each schedule buy? One training step under each, timed in one process, against simulation.

Every schedule trains the network of `pipeline.py` on one-device stages; those with virtual stages get two of
half the blocks on each device. All must agree on loss and gradients. A round is one step of each, in an order
that changes from round to round. Then each program is profiled, and the measured costs of its fragments are
simulated: that is the step on devices that do not disturb each other.

    python benchmarks/schedules.py --stages 4 --microbatches 16
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tyro
from contenders.problem import OPTIMIZER, Network
from flax import nnx
from pipeline import Options

import mmnnx as mm
from mmnnx.mpmd.schedule import get_schedule, schedule_names

V_SHAPED = ("zbv", "dualpipe-v")


@dataclasses.dataclass(frozen=True)
class ScheduleOptions(Options):
    """Time one training step under each schedule, and compare with simulation."""

    schedules: tuple[str, ...] = tuple(schedule_names())
    """Names of schedules."""


@dataclasses.dataclass
class Contender:
    """The training step under one schedule."""

    name: str
    step: Callable[[], jax.Array]  # starts one step, returns its loss
    state: Callable[[], Any]  # what the step wrote: model and optimizer
    momentum: Callable[[], list[jax.Array]]  # Adam's first moment, in the order of the blocks
    program: Callable[[], mm.Program]
    profile: Callable[[], mm.Profile]
    seconds: list[float] = dataclasses.field(default_factory=list)


class Pieces(nnx.Module):
    """The blocks of a network in pieces, each of a task of its own."""

    def __init__(self, network: Network, tasks: list[mm.Task]):
        depth = len(network.blocks) // len(tasks)
        self.pieces = nnx.List(
            [Network(list(network.blocks[i * depth : (i + 1) * depth])) for i in range(len(tasks))]
        )
        self.tasks = tuple(tasks)

    def __call__(self, x: jax.Array) -> jax.Array:
        for piece, task in zip(self.pieces, self.tasks):
            x = mm.task(piece.__call__, task=task)(x)
        return x


def contender(name: str, options: ScheduleOptions) -> Contender:
    devices = jax.devices()[: options.stages]
    mesh = mm.MultiMesh(axis_sizes=(options.stages,), axis_names=("stage",), devices=devices)
    order = list(range(options.stages))
    if name in V_SHAPED:
        order += order[::-1]
    elif "interleave" in get_schedule(name).options:
        order += order
    tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": stage}) for n, stage in enumerate(order)]
    placement = mm.TaskSharding({mm.path("pieces", n): (task, None) for n, task in enumerate(tasks)})
    problem = options.problem()

    @mm.jit(mesh=mesh, donate_argnums=(0, 1))
    def train_step(model, optimizer, batch):
        grad_fn = nnx.value_and_grad(problem.loss)
        grad_fn = mm.microbatch(grad_fn, dim=0, size=options.rows, argnum=1, reduce="mean", schedule=name)
        loss, gradients = grad_fn(model, batch)
        optimizer.update(model, gradients)
        return loss

    with mesh:
        model = mm.jit(lambda: Pieces(problem.make(), tasks), out_shardings=placement)()
        optimizer = mm.jit(lambda model: nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param))(model)
    args = (model, optimizer, problem.batch)
    return Contender(
        name,
        lambda: train_step(*args),
        lambda: nnx.state((model, optimizer)),
        lambda: in_order(optimizer.opt_state[0].mu["pieces"]),
        lambda: train_step.program(*args),
        lambda: train_step.program(*args).profile(*args),
    )


def measure(contenders: list[Contender], rounds: int) -> None:
    """Times the steps of all contenders; checks that all do the same.

    A step is timed right after another of the same: what one finds in the caches, it left there itself.
    """
    expected = None
    for c in contenders:
        # After one step Adam's first moment is a multiple of the gradient.
        found = jax.device_get([c.step(), *c.momentum()])
        expected = found if expected is None else expected
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(
                a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max(), err_msg=f"step under {c.name}"
            )
    for turn in range(rounds):
        for c in random.Random(turn).sample(contenders, len(contenders)):
            for timed in (False, True):
                start = time.perf_counter()
                jax.block_until_ready((c.step(), c.state()))
                if timed:
                    c.seconds.append(time.perf_counter() - start)


def in_order(pieces: Any) -> list[jax.Array]:
    """The arrays of all blocks, in order, however they are in pieces."""
    blocks = [piece["blocks"][b] for _, piece in sorted(pieces.items()) for b in sorted(piece["blocks"])]
    return jax.tree.leaves(blocks)


def crowding(options: ScheduleOptions, calls: int = 20, repeats: int = 7) -> float:
    """How much longer a stage's forward and backward take when all devices compute at once."""
    blocks = list(options.problem().make().blocks)[: options.layers // options.stages]
    graphdef, params = nnx.split(Network(blocks))
    x = np.ones((options.rows, options.width), np.float32)

    @jax.jit
    def both(params, x):
        y, backward = jax.vjp(lambda params, x: nnx.merge(graphdef, params)(x), params, x)
        return backward(y)

    args = [jax.device_put((params, x), d) for d in jax.devices()[: options.stages]]
    jax.block_until_ready([both(*a) for a in args])

    def seconds(some: list[Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready([both(*a) for _ in range(calls) for a in some])
        return time.perf_counter() - start

    return float(np.median([seconds(args) / seconds(args[:1]) for _ in range(repeats)]))


def summarize(options: ScheduleOptions, contenders: list[Contender]) -> dict[str, Any]:
    """Times in milliseconds, bytes in MiB; one list entry per device."""
    rows = {}
    crowded = crowding(options)
    for c in contenders:
        program, profile = c.program(), c.profile()
        simulated, measured = profile.timeline.makespan, float(np.median(c.seconds))
        counted = program.simulate()
        rows[c.name] = {
            "median_ms": 1e3 * measured,
            "min_ms": 1e3 * min(c.seconds),
            "simulated_ms": 1e3 * simulated,
            "measured_over_simulated": measured / simulated,
            "measured_over_crowded": measured / (simulated * crowded),
            "bubble": counted.bubble,
            "bubble_with_measured_costs": profile.timeline.bubble,
            "in_flight": list(counted.in_flight().values()),
            "residuals_counted_mib": [n / 2**20 for n in counted.residual_bytes.values()],
            "residuals_measured_mib": [n / 2**20 for n in profile.residual_bytes.values()],
            "peak_counted_mib": max(counted.peak_bytes.values()) / 2**20,
            "peak_measured_mib": max(profile.peak_bytes.values()) / 2**20,
        }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "options": dataclasses.asdict(options),
        "cores": cores,
        "jax": jax.__version__,
        "crowding": crowded,
        "rows": rows,
    }


def render(summary: dict[str, Any]) -> str:
    o, rows = summary["options"], summary["rows"]
    width = max(map(len, rows))
    lines = [
        f"{o['stages']} devices, {o['microbatches']} microbatches of {o['rows']} rows, {o['layers']} blocks "
        f"of width {o['width']}; {o['rounds']} rounds; {summary['cores']} cores, jax {summary['jax']}",
        "",
        f"{'':{width}}{'median':>10}{'min':>10}{'simulated':>11}{'measured/':>11}{'the same':>10}"
        f"{'bubble':>9}{'with costs':>12}",
        f"{'':{width}}{'ms':>10}{'ms':>10}{'ms':>11}{'simulated':>11}{'crowded':>10}{'':>9}{'measured':>12}",
    ]
    for name, r in rows.items():
        lines.append(
            f"{name:{width}}{r['median_ms']:>10.1f}{r['min_ms']:>10.1f}{r['simulated_ms']:>11.1f}"
            f"{r['measured_over_simulated']:>11.2f}{r['measured_over_crowded']:>10.2f}{r['bubble']:>9.1%}"
            f"{r['bubble_with_measured_costs']:>12.1%}"
        )
    lines += [
        "",
        f"crowded: a stage takes {summary['crowding']:.2f} times as long when all devices compute at once",
        "",
        "Saved activations, the peak of each device, and the peak memory of a device (counted: on the",
        "program; measured: on the arrays of a run); MiB",
        "",
        f"{'':{width}}  {'microbatches in flight':<24}{'counted':<26}{'measured':<26}all, counted / measured",
    ]
    for name, r in rows.items():
        counted, measured = (
            " ".join(f"{x:.2f}" for x in r[f"residuals_{how}_mib"]) for how in ("counted", "measured")
        )
        flight = " ".join(map(str, r["in_flight"]))
        whole = f"{r['peak_counted_mib']:.2f} / {r['peak_measured_mib']:.2f}"
        lines.append(f"{name:{width}}  {flight:<24}{counted:<26}{measured:<26}{whole}")
    return "\n".join([*lines, "", "losses and gradients of all agree"])


def main() -> None:
    options = tyro.cli(ScheduleOptions, description=__doc__)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(8, options.stages))
    contenders = [contender(name, options) for name in options.schedules]
    measure(contenders, options.rounds)
    summary = summarize(options, contenders)
    print(json.dumps(summary) if options.json else render(summary))


if __name__ == "__main__":
    main()
