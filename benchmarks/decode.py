"""Decoding over four stages: tokens a second of requests that follow each other through them, beside one
request at a time, all in one batch, and one device.

A request is a few rows. What a stage does for it is the bound: `in flight` can be four times `one at a time`,
where each stage has a core or more of its own. On two cores it can be twice that at most, and less where
XLA uses both for one operation.

    python benchmarks/decode.py --width 128 --rows 4
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
import tyro
from contenders.timing import cores
from flax import nnx

import mmnnx as mm
from mmnnx.modules import LM, LMConfig

STAGES = 4


@dataclasses.dataclass(frozen=True)
class Options:
    """Time the tokens that a language model makes over four stages."""

    layers: int = 8
    """Its blocks."""
    width: int = 128
    """Their features."""
    requests: int = 4
    """How many there are."""
    rows: int = 8
    """Of each request."""
    prompt: int = 64
    """Tokens that are read."""
    tokens: int = 32
    """Tokens that are made."""
    rounds: int = 5
    """Timed runs of each."""


def main(options: Options) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    heads = max(1, options.width // 32)
    config = LMConfig(layers=options.layers, width=options.width, heads=heads, kv_heads=heads)
    make = lambda: LM(config, rngs=nnx.Rngs(0))
    shape = options.requests * options.rows, options.prompt
    prompts = np.random.default_rng(0).integers(0, config.vocab, shape)
    whole = make()
    with mm.MultiMesh(axis_sizes=(STAGES,), axis_names=("stage",), devices=jax.devices()[:STAGES]):
        placed = mm.jit(make, out_shardings=mm.pipeline_sharding(nnx.eval_shape(make), STAGES))()
        run = lambda model, prompts, **how: np.asarray(mm.generate(model, prompts, options.tokens, **how))
        requests = np.split(prompts, options.requests)
        ways: dict[str, Callable[[], np.ndarray]] = {
            "one device": lambda: run(whole, prompts),
            "in one batch": lambda: run(placed, prompts),
            "one at a time": lambda: np.concatenate([run(placed, request) for request in requests]),
            "in flight": lambda: run(placed, prompts, in_flight=options.requests),
        }
        expected = ways["one device"]()
        for name, way in ways.items():
            np.testing.assert_array_equal(way(), expected, err_msg=name)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for n in range(options.rounds):
            for name in list(ways)[:: 1 if n % 2 else -1]:
                start = time.perf_counter()
                ways[name]()
                seconds[name].append(time.perf_counter() - start)
    print(f"{options.layers} layers of width {config.width}, {cores()} cores: {options.requests} requests of")
    print(f"{options.rows} rows, {options.prompt} tokens read and {options.tokens} made in each")
    print(f"{'':14}  tokens/s  over one at a time")
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["one at a time"], times))
        print(f"{name:14} {len(prompts) * options.tokens / statistics.median(times):9.0f} {ratio:10.2f}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
