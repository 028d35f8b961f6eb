"""How do programs grow? Traces, places, cuts and verifies pipelines of more and more layers, stages and
microbatches, and simulates them; runs nothing.

python benchmarks/growth.py --schedule zero-bubble-h1
python benchmarks/growth.py --model lm --sizes 24 4 16 48 4 16 96 4 16 96 16 64
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import tyro
from contenders.problem import OPTIMIZER, Problem, lm, mlp
from flax import nnx

import mmnnx as mm
from mmnnx.modules.lm import LMConfig
from mmnnx.mpmd import split
from mmnnx.mpmd.garbage import uncollected

PASSES = ("trace", "open_calls", "place", "cut", "build", "verify", "simulate")


@dataclasses.dataclass(frozen=True)
class Options:
    """Trace, place, cut, verify and simulate pipelines of more and more layers, stages and microbatches."""

    model: Literal["mlp", "lm"] = "mlp"
    """Blocks of two layers, or the language model of `make train`."""
    schedule: str | None = None
    """Name of a schedule. Default: the shortest, which has all of them simulated first."""
    sizes: tuple[tuple[int, int, int], ...] = (
        *((4, 4, 8), (8, 8, 32), (16, 16, 64), (32, 32, 128), (64, 64, 256), (64, 64, 512)),
        *((128, 4, 16), (256, 4, 16)),
    )
    """Blocks, stages and microbatches of each pipeline."""


def problem(model: str, layers: int, stages: int, microbatches: int) -> Problem:
    """The smallest of its kind: sizes of arrays make no difference here."""
    if model == "mlp":
        return mlp("mlp", stages, microbatches, rows=1, layers=layers, width=4)
    config = LMConfig(vocab=16, layers=layers, width=8, heads=2, kv_heads=1, mlp=8)
    return lm("lm", stages, microbatches, rows=1, length=8, config=config)


@contextlib.contextmanager
def timed_passes() -> Iterator[Counter[str]]:
    """CPU seconds of this thread in each pass of a split."""
    seconds: Counter[str] = Counter()

    def timed(name: str, fun: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return fun(*args, **kwargs)
            finally:
                seconds[name] += time.thread_time() - start

        return run

    originals = {name: getattr(split, name) for name in ("open_calls", "place", "cut", "build")}
    for name, fun in originals.items():
        setattr(split, name, timed(name, fun))
    try:
        yield seconds
    finally:
        for name, fun in originals.items():
            setattr(split, name, fun)


def measure(model: str, layers: int, stages: int, microbatches: int, schedule: str | None) -> str:
    """One line of the table."""
    what = problem(model, layers, stages, microbatches)
    mesh = mm.MultiMesh(axis_sizes=(stages,), axis_names=("stage",), devices=jax.devices()[:stages])
    shapes = nnx.eval_shape(what.make)
    with mesh:
        placement = mm.pipeline_sharding(shapes, stages)

        @mm.jit
        def step(batch):
            made = what.make()  # no time for weights: they are placed where a train step has its arguments
            model = nnx.merge(nnx.graphdef(made), mm.with_placement(nnx.state(made), placement))
            return model, batch

    del step, OPTIMIZER, uncollected
    return ""
