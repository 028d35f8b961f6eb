"""A published model of some gigabytes, loaded over four stages of two devices and written back: seconds, and
the host memory that it takes besides the weights. (The memory of virtual CPU devices is the host's.)

python benchmarks/published.py --gigabytes 2
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

import mmnnx as mm
from mmnnx.modules import LMConfig, hf
from mmnnx.modules.build import build


@dataclasses.dataclass(frozen=True)
class Options:
    """Load and save a Llama in bfloat16."""

    gigabytes: float = 2.0
    """Of its weights."""
    scan: bool = False
    """Its layers are stacked in one array for each weight."""


MESH: dict[str, Any] = dict(axis_sizes=(4, 2), axis_names=("stage", "model"))


def main(options: Options) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    width = 2048
    of_layer = 2 * (4 * width * width + 3 * width * 3 * width)  # bytes
    layers = max(4, round(options.gigabytes * 1e9 / of_layer))
    types: dict[str, Any] = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    config = LMConfig(vocab=1024, layers=layers, width=width, heads=16, kv_heads=16, mlp=3 * width, **types)
    with tempfile.TemporaryDirectory() as scratch, mm.MultiMesh(**MESH):
        folder = pathlib.Path(scratch)
        hf.save(build(config), folder / "one")
        gc.collect()
        rules = mm.logical_rules("tensor")
        place = lambda model: mm.pipeline_sharding(model, 4, rules=rules)
        model, *read = measured(lambda: hf.load(folder / "one", placement=place, scan=options.scan))
        weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
        _, *written = measured(lambda: hf.save(model, folder / "two"))
    print(f"{layers} layers, {weights / 1e9:.2f} GB, {os.cpu_count()} cores")
    print(f"load  {read[0]:6.1f} s   {(read[1] - weights) / 1e6:8.0f} MB of host memory besides the weights")
    print(f"save  {written[0]:6.1f} s   {written[1] / 1e6:8.0f} MB of host memory")


def measured(run: Callable[[], Any]) -> tuple[Any, float, int]:
    """What it returns, its seconds, and by how many bytes this process grew at most. Pages of mapped files,
    which the system takes back when it likes, do not count."""
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    out = jax.block_until_ready(run())
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return out, seconds, peak - before


def anonymous() -> int:
    """The bytes of this process that are no mapped files."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


if __name__ == "__main__":
    main(tyro.cli(Options))
