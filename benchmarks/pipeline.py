"""What does `mm.jit` cost? One training step, timed three ways in one process:

- **one device**: the step under `nnx.jit`, gradients accumulated over the microbatches by `lax.scan`;
- **by hand**: a 1F1B pipeline written out over jitted stage functions, as fast as we know how to write it;
- **mm.jit**: the ordinary NNX train step, its state placed by `TaskSharding`.

All three train the same network on the same batch and must agree on losses and gradients. A round is one
step of each, in an order that changes from round to round: what one leaves in the caches helps the next.

    python benchmarks/pipeline.py --stages 4 --microbatches 16
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

import mmnnx as mm

Batch = tuple[np.ndarray, np.ndarray]


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


# The network and its loss, shared by all three.


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Network(nnx.Module):
    def __init__(self, blocks: list[Block]):
        self.blocks = nnx.List(blocks)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def make_network(options: Options) -> Network:
    rngs = nnx.Rngs(0)
    return Network([Block(options.width, rngs=rngs) for _ in range(options.layers)])


def make_batch(options: Options) -> Batch:
    shape = (options.microbatches * options.rows, options.width)
    return tuple(np.random.default_rng(seed).standard_normal(shape, np.float32) for seed in (1, 2))


def make_loss(options: Options) -> Callable[[jax.Array, jax.Array], jax.Array]:
    elements = options.microbatches * options.rows * options.width
    return lambda output, target: jnp.sum((output - target) ** 2) / elements


OPTIMIZER = optax.adamw(1e-3)


@dataclasses.dataclass
class Contender:
    """One way to run the step."""

    name: str
    step: Callable[[Batch], jax.Array]  # starts one step, returns its loss
    state: Callable[[], Any]  # what the step wrote: model and optimizer
    momentum: Callable[[], list[Any]]  # Adam's first moment, one tree for each block


def one_device(options: Options) -> Contender:
    loss_of = make_loss(options)
    model = make_network(options)
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, batch):
        graphdef, params = nnx.split(model)

        def accumulate(total, microbatch):
            inputs, targets = microbatch
            loss = lambda params: loss_of(nnx.merge(graphdef, params)(inputs), targets)
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params)), None

        slices = jax.tree.map(lambda x: x.reshape(options.microbatches, options.rows, -1), batch)
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (loss, gradients), _ = jax.lax.scan(accumulate, zeros, slices)
        optimizer.update(model, gradients)
        return loss

    return Contender(
        "one device",
        lambda batch: train_step(model, optimizer, batch),
        lambda: nnx.state((model, optimizer)),
        lambda: list(optimizer.opt_state[0].mu["blocks"].values()),
    )


class Stage:
    """A run of blocks on one device, and the four programs it takes to train them.

    `forward` returns its output and what `backward` needs of it, parameters left out; `backward` adds
    into the gradients it was given, in place. The last stage does both at once; the first has no use for
    the gradient of its input. Parameters travel as flat lists, which cost the least to pass.
    """

    def __init__(self, network: Network, device: jax.Device, loss_of, first: bool):
        graphdef, state = nnx.split(network)
        params, treedef = jax.tree.flatten(state)
        self.device = device
        self.treedef = treedef
        self.params = jax.device_put(params, device)
        self.moments = jax.device_put(OPTIMIZER.init(self.params), device)
        pullback = None

        def apply(params, x):
            return nnx.merge(graphdef, treedef.unflatten(params))(x)

        @jax.jit
        def forward(params, x):
            nonlocal pullback
            y, vjp = jax.vjp(lambda p: apply(p, x), params) if first else jax.vjp(apply, params, x)
            leaves, structure = jax.tree.flatten(vjp)
            position = {id(param): i for i, param in enumerate(params)}
            pullback = structure, [position.get(id(leaf)) for leaf in leaves]
            return y, [leaf for leaf in leaves if id(leaf) not in position]

        def add(gradients, more):
            return more if gradients is None else jax.tree.map(jnp.add, gradients, more)

        def backward(params, residuals, dy, gradients):
            structure, positions = pullback
            rest = iter(residuals)
            leaves = [next(rest) if i is None else params[i] for i in positions]
            more, *dx = structure.unflatten(leaves)(dy)
            return dx, add(gradients, more)

        def both(params, x, target, total):
            loss = lambda params, x: loss_of(apply(params, x), target)
            loss, (gradients, *dx) = jax.value_and_grad(loss, argnums=(0,) if first else (0, 1))(params, x)
            return dx, add(total, (loss, gradients))

        def update(params, moments, gradients):
            updates, moments = OPTIMIZER.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments

        self.forward = forward
        self.backward = jax.jit(backward, donate_argnums=3)
        self.both = jax.jit(both, donate_argnums=3)
        self.update = jax.jit(update, donate_argnums=(0, 1))


def one_f_one_b(stages: int, microbatches: int) -> Iterator[tuple[int, str, int]]:
    """Yields (stage, "forward" | "backward", microbatch) in an order that can be dispatched as it is."""
    queues = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        forwards = [(stage, "forward", i) for i in range(microbatches)]
        backwards = [(stage, "backward", i) for i in range(microbatches)]
        steady = [job for pair in zip(backwards, forwards[ahead:]) for job in pair]
        queues.append(collections.deque(forwards[:ahead] + steady + backwards[microbatches - ahead :]))
    done = set()
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            _, phase, i = queue[0]
            if phase == "forward":
                ready = stage == 0 or (stage - 1, "forward", i) in done
            else:
                ready = stage == stages - 1 or (stage + 1, "backward", i) in done
            if ready:
                done.add(queue[0])
                yield queue.popleft()


def by_hand(options: Options) -> Contender:
    devices = jax.devices()[: options.stages]
    blocks = list(make_network(options).blocks)
    depth = options.layers // options.stages
    stages = [
        Stage(Network(blocks[i * depth : (i + 1) * depth]), device, make_loss(options), first=i == 0)
        for i, device in enumerate(devices)
    ]
    order = list(one_f_one_b(options.stages, options.microbatches))
    last = options.stages - 1

    def step(batch):
        inputs, targets = (np.split(part, options.microbatches) for part in batch)
        activations = {(0, i): x for i, x in enumerate(inputs)}
        cotangents, residuals = {}, {}
        totals = [None] * options.stages
        for s, phase, i in order:
            stage = stages[s]
            if s == last:
                if phase == "backward":
                    x = activations.pop((s, i))
                    dx, totals[s] = stage.both(stage.params, x, targets[i], totals[s])
            elif phase == "forward":
                y, residuals[s, i] = stage.forward(stage.params, activations.pop((s, i)))
                activations[s + 1, i] = jax.device_put(y, stages[s + 1].device)
            else:
                dx, totals[s] = stage.backward(
                    stage.params, residuals.pop((s, i)), cotangents.pop((s, i)), totals[s]
                )
            if phase == "backward" and s > 0:
                cotangents[s - 1, i] = jax.device_put(dx[0], stages[s - 1].device)
        loss, totals[last] = totals[last]
        for stage, gradients in zip(stages, totals):
            stage.params, stage.moments = stage.update(stage.params, stage.moments, gradients)
        return loss

    def momentum():
        trees = [stage.treedef.unflatten(stage.moments[0].mu) for stage in stages]
        return [block for tree in trees for block in tree["blocks"].values()]

    return Contender("by hand", step, lambda: [(s.params, s.moments) for s in stages], momentum)


def through_mm_jit(options: Options) -> Contender:
    mesh = mm.MultiMesh(
        axis_sizes=(options.stages,), axis_names=("stage",), devices=jax.devices()[: options.stages]
    )
    tasks = [mm.Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(options.stages)]
    depth = options.layers // options.stages
    placement = mm.TaskSharding(
        {mm.path("blocks", range(i * depth, (i + 1) * depth)): (task, None) for i, task in enumerate(tasks)}
    )
    loss_of = make_loss(options)

    @mm.jit(donate_argnums=(0, 1), mesh=mesh)
    def train_step(model, optimizer, batch):
        def loss_fn(model, batch):
            inputs, targets = batch
            return loss_of(model(inputs), targets)

        grad_fn = nnx.value_and_grad(loss_fn)
        loss, gradients = mm.microbatch(grad_fn, dim=0, size=options.rows, argnum=1, schedule="1f1b")(
            model, batch
        )
        optimizer.update(model, gradients)
        return loss

    with mesh:
        model = mm.jit(lambda: make_network(options), out_shardings=placement)()
        optimizer = mm.jit(lambda model: nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param))(model)
    return Contender(
        "mm.jit",
        lambda batch: train_step(model, optimizer, batch),
        lambda: nnx.state((model, optimizer)),
        lambda: list(optimizer.opt_state[0].mu["blocks"].values()),
    )


# Timing and checking.


@dataclasses.dataclass
class Timing:
    """Seconds of each timed step; losses of every step."""

    total: list[float] = dataclasses.field(default_factory=list)
    dispatch: list[float] = dataclasses.field(default_factory=list)  # until the call returned
    host: list[float] = dataclasses.field(default_factory=list)  # of the dispatching thread's CPU until then
    busy: list[float] = dataclasses.field(default_factory=list)  # of all cores together
    losses: list[float] = dataclasses.field(default_factory=list)
    programs: int = 0  # compiled by XLA for the step
    first: float = 0.0  # the first step: tracing and compiling too


UNTIMED = 3


def measure(contenders: list[Contender], batch: Batch, rounds: int) -> list[Timing]:
    timings = [Timing() for _ in contenders]
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            compiled.append(event) if event.endswith("backend_compile_duration") else None
        )
    )
    orders = itertools.cycle(itertools.permutations(zip(contenders, timings)))
    for turn, order in zip(range(UNTIMED + rounds), orders):
        for contender, timing in order:
            before, busy, host = len(compiled), time.process_time(), time.thread_time()
            start = time.perf_counter()
            loss = contender.step(batch)
            returned, host = time.perf_counter(), time.thread_time() - host
            jax.block_until_ready((loss, contender.state()))
            end, busy = time.perf_counter(), time.process_time() - busy
            timing.losses.append(float(loss))
            if turn == 0:
                timing.first = end - start
            timing.programs += len(compiled) - before
            if turn >= UNTIMED:
                timing.total.append(end - start)
                timing.dispatch.append(returned - start)
                timing.host.append(host)
                timing.busy.append(busy)
        if turn == 0:
            compare_gradients(contenders)
    for contender, timing in zip(contenders, timings):
        np.testing.assert_allclose(
            timing.losses[:UNTIMED],
            timings[0].losses[:UNTIMED],
            rtol=1e-4,
            err_msg=f"losses of {contender.name}",
        )
    return timings


def compare_gradients(contenders: list[Contender]) -> None:
    """After one step Adam's first moment is a multiple of the gradient: the contenders must have the same."""
    first, *others = [jax.tree.leaves(jax.device_get(contender.momentum())) for contender in contenders]
    for contender, leaves in zip(contenders[1:], others):
        for expected, found in zip(first, leaves, strict=True):
            np.testing.assert_allclose(
                found,
                expected,
                rtol=1e-5,
                atol=1e-5 * np.abs(expected).max(),
                err_msg=f"gradients of {contender.name}",
            )


def summarize(options: Options, contenders: list[Contender], timings: list[Timing]) -> dict[str, Any]:
    """Times in milliseconds; ratios are medians over the rounds of the ratio within a round."""
    bound = options.microbatches * options.stages / (options.microbatches + options.stages - 1)
    alone, by_hand, mm_jit = (np.array(timing.total) for timing in timings)
    rows = {}
    for contender, timing in zip(contenders, timings):
        speedup = float(np.median(alone / timing.total))
        rows[contender.name] = {
            "median_ms": 1e3 * float(np.median(timing.total)),
            "min_ms": 1e3 * min(timing.total),
            "dispatch_ms": 1e3 * float(np.median(timing.dispatch)),
            "host_cpu_ms": 1e3 * float(np.median(timing.host)),
            "cores_busy": float(np.median(np.array(timing.busy) / timing.total)),
            "speedup": speedup,
            "share_of_bound": speedup / bound,
            "xla_programs": timing.programs,
            "first_step_s": timing.first,
        }
    return {
        "options": dataclasses.asdict(options),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "schedule_bound": bound,
        "mm_jit_over_by_hand": float(np.median(mm_jit / by_hand)),
        "mm_jit_over_by_hand_of_minima": float(mm_jit.min() / by_hand.min()),
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
    contenders = [one_device(options), by_hand(options), through_mm_jit(options)]
    summary = summarize(options, contenders, measure(contenders, make_batch(options), options.rounds))
    print(json.dumps(summary) if options.json else render(summary))


if __name__ == "__main__":
    main()
