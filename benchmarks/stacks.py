"""Layers stacked in one Variable and scanned, divided between four stages, beside the same layers in a list:
the first call, and steps in turn. And both on one device under `nnx.jit`, where a scan costs what it does in
a stage.

python benchmarks/stacks.py --layers 48 --width 64
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from typing import Any

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import mmnnx as mm
from mmnnx.modules import LM, LMConfig


@dataclasses.dataclass(frozen=True)
class Options:
    """Time an LM whose blocks are scanned, and one whose blocks are a list."""

    layers: int = 48
    """Its blocks."""
    width: int = 64
    """Their features."""
    rows: int = 16
    """Sequences in a batch, in eight microbatches."""
    length: int = 32
    """Tokens in each."""
    remat: bool = False
    """Activations inside a block are computed again for its backward, as large models do."""
    rounds: int = 5
    """Steps of each that are timed."""


def main(options: Options) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    tokens = np.random.default_rng(0).integers(0, 256, (options.rows, options.length + 1))
    with mm.MultiMesh(axis_sizes=(4,), axis_names=("stage",)):
        steps = {(how, scan): first_step(options, how, scan, tokens) for scan in (True, False) for how in HOW}
        times: dict[Any, list[float]] = {key: [] for key in steps}
        for n in range(options.rounds):
            for key in list(steps)[:: 1 if n % 2 else -1]:
                times[key].append(seconds(steps[key][0]))
    print(f"{options.layers} layers of width {options.width}, {os.cpu_count()} cores")
    print("               first call: scan     list  ratio     step: scan     list  list/scan")
    for how in HOW:
        first = [steps[how, scan][1] for scan in (True, False)]
        scan, whole = (statistics.median(times[how, scan]) for scan in (True, False))
        ratio = statistics.median(b / a for a, b in zip(times[how, True], times[how, False]))
        line = f"{how:12} {first[0]:16.1f} s {first[1]:6.1f} s {first[0] / first[1]:6.2f}"
        print(f"{line} {scan * 1e3:11.1f} ms {whole * 1e3:5.1f} ms {ratio:6.2f}")


HOW = ("four stages", "one device")


def first_step(options: Options, how: str, scan: bool, tokens: np.ndarray) -> tuple[Any, float]:
    """What takes a step, and how long the first one took."""
    sizes: dict[str, Any] = dict(width=options.width, heads=4, kv_heads=4, mlp=2 * options.width)
    config = LMConfig(layers=options.layers, scan=scan, remat=options.remat, **sizes)
    jit: Any = mm.jit if how == "four stages" else nnx.jit
    make = lambda: LM(config, rngs=nnx.Rngs(0))
    placed = {"out_shardings": mm.pipeline_sharding(nnx.eval_shape(make), 4)} if jit is mm.jit else {}
    model = jit(make, **placed)()
    optimizer = jit(lambda model: nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param))(model)
    grad_fn = nnx.value_and_grad(lambda model, tokens: model.loss(tokens))

    @jit(donate_argnums=(0, 1))
    def step(model, optimizer, tokens):
        loop = mm.microbatch(grad_fn, dim=0, size=options.rows // 8, argnum=1, schedule="1f1b", reduce="mean")
        loss, grads = loop(model, tokens)
        optimizer.update(model, grads)
        return loss

    def run():
        loss = step(model, optimizer, tokens)
        jax.block_until_ready((loss, nnx.state((model, optimizer))))

    return run, seconds(run)


def seconds(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(tyro.cli(Options))
