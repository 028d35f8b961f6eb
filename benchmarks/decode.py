"""Decoding over stages: tokens a second of requests that follow each other through them, beside one request
at a time, all in one batch, and one core. A stage is a process, pinned to a core of its own.

    python benchmarks/decode.py --processes 2 --width 256 --rows 32

A token needs all stages one after the other, so one request keeps one core busy. With as many in flight as
stages, all could be: that many times the tokens a second is the bound.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time

import jax
import numpy as np
import tyro
from contenders.timing import cores
from flax import nnx
from pinned import Pinned, ProcessError

import mmnnx as mm
from mmnnx.modules import LM, LMConfig


@dataclasses.dataclass(frozen=True)
class Options:
    """Time the tokens that a language model makes, a stage in each of some processes."""

    processes: int = 2
    """How many, with a core each; there are as many requests."""
    layers: int = 8
    """Blocks of the model; a multiple of the processes."""
    width: int = 256
    """Their features."""
    rows: int = 32
    """Of each request."""
    prompt: int = 8
    """Tokens that are read."""
    tokens: int = 32
    """Tokens that are made."""
    rounds: int = 5
    """Timed runs of each."""


@dataclasses.dataclass
class Held:
    """What each process holds."""

    options: Options
    mesh: mm.MultiMesh
    model: LM
    prompts: np.ndarray


ALONE = "one core"
NAMES = ("one at a time", "in one batch", "in flight")


def make(options: Options) -> Held:
    heads = max(1, options.width // 32)
    config = LMConfig(layers=options.layers, width=options.width, heads=heads, kv_heads=heads)
    make_model = lambda: LM(config, rngs=nnx.Rngs(0))
    stages = jax.process_count()
    mesh = mm.MultiMesh(axis_sizes=(stages,), axis_names=("stage",), devices=jax.devices())
    with mesh:
        model = mm.jit(make_model, out_shardings=mm.pipeline_sharding(nnx.eval_shape(make_model), stages))()
    shape = options.processes * options.rows, options.prompt
    prompts = np.random.default_rng(0).integers(0, config.vocab, shape)
    return Held(options, mesh, model, prompts)


def run(held: Held, name: str, start: float) -> tuple[float, np.ndarray | None]:
    """The seconds that it takes to make all tokens, and the tokens in the process that has them."""
    requests, new = held.options.processes, held.options.tokens
    parts = np.split(held.prompts, requests) if name == "one at a time" else [held.prompts]
    while time.perf_counter() < start:
        pass
    with held.mesh:
        found = []
        for part in parts:
            groups = requests if name == "in flight" else 1
            found.append(mm.generate(held.model, part, new, in_flight=groups))
            jax.block_until_ready(found[-1])
    seconds = time.perf_counter() - start
    here = found[0].addressable_shards
    return seconds, np.concatenate([np.asarray(x) for x in found]) if here else None


def take(processes: Pinned, name: str) -> tuple[float, np.ndarray]:
    """The seconds until all processes are done, and the tokens."""
    parts = processes.ask(run, name, time.perf_counter() + 0.005)
    return max(seconds for seconds, _ in parts), next(x for _, x in parts if x is not None)


def main(options: Options) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in (ALONE, *NAMES)}
    try:
        with Pinned(1, make, options) as one:
            expected = take(one, ALONE)[1]
            seconds[ALONE] = [take(one, ALONE)[0] for _ in range(options.rounds)]
        with Pinned(options.processes, make, options) as processes:
            for name in NAMES:
                np.testing.assert_array_equal(take(processes, name)[1], expected, err_msg=name)
            for turn in range(options.rounds):
                for name in random.Random(turn).sample(NAMES, len(NAMES)):
                    seconds[name].append(take(processes, name)[0])
    except ProcessError as error:
        raise SystemExit(str(error)) from None
    count = options.processes * options.rows * options.tokens
    print(
        f"{options.layers} layers of width {options.width}; {options.processes} processes of a core each, and"
    )
    print("as many requests, each of", end=" ")
    print(f"{options.rows} rows, {options.prompt} tokens read and {options.tokens} made")
    print(f"{'':14}  tokens/s  over one at a time  ({cores()} cores in all)")
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["one at a time"], times))
        print(f"{name:14} {count / statistics.median(times):9.0f} {ratio:10.2f}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
