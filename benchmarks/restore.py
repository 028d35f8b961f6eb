"""How much host memory do saving and restoring a checkpoint take, over what a process holds of the state?

One process saves the state of 4 stages of 2 devices; fresh ones restore it, one or several, onto abstract
nodes and onto concrete ones. Devices are virtual CPU devices, whose memory is the host's: so restoring takes
a process's own share of the state at least. The peak is counted from the start of saving or restoring. By
then concrete nodes have their old values, which are there until the new ones are complete.

    python benchmarks/restore.py --megabytes 1024 --processes 1 2 4

The peak is VmHWM, the most that was resident at one time, set back before: Linux alone has it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

DEVICES = 8  # four stages of two


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure peak host memory and time of saving and restoring a checkpoint."""

    megabytes: int = 1024
    """Size of the state, 2**20 bytes each: 32 equal matrices."""
    processes: tuple[int, ...] = (1, 2, 4)
    """Numbers of processes that restore it."""
    folder: Path | None = None
    """Where to write the checkpoint. Default: a temporary folder."""


def main(options: Options) -> None:
    for count in options.processes:
        if DEVICES % count:
            raise SystemExit(f"--processes {count} does not divide {DEVICES} devices")
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(options.folder or temporary)
        title = f"state of {options.megabytes} MB on 4 stages of 2 devices"
        table = Table("", "processes", "share, MB", "peak, MB", "peak / share", "seconds", title=title)
        for what, count in [
            ("save", 1),
            *((w, c) for w in ("abstract", "concrete") for c in options.processes),
        ]:
            found = run(what, count, folder, options.megabytes)
            worst = max(found, key=lambda one: one["peak"] / one["share"])
            table.add_row(
                what if what == "save" else f"restore, {what}",
                str(count),
                f"{worst['share'] / 2**20:.0f}",
                f"{worst['peak'] / 2**20:.0f}",
                f"{worst['peak'] / worst['share']:.2f}",
                f"{max(one['seconds'] for one in found):.1f}",
            )
    Console().print(table)


def run(what: str, count: int, folder: str, megabytes: int) -> list[dict[str, Any]]:
    """What each of `count` fresh processes measured."""
    command = [sys.executable, __file__, "--process", what, folder, str(megabytes)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(DEVICES // count),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(count),
    }
    processes = [
        subprocess.Popen(
            command, env={**environment, "JAX_PROCESS_ID": str(n)}, stdout=subprocess.PIPE, text=True
        )
        for n in range(count)
    ]
    try:
        printed = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit("a process failed; what it said is above")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def process(what: str, folder: str, megabytes: int) -> None:
    """One of the processes: measures itself, and prints it as JSON."""
    import jax
    from flax import nnx
    from jax.sharding import PartitionSpec as P

    import mmnnx as mm
    from mmnnx.train.checkpoint import Checkpoints

    count = int(os.environ["JAX_NUM_PROCESSES"])
    if count > 1:
        mm.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], count, int(os.environ["JAX_PROCESS_ID"]))

    def make() -> nnx.List:
        rngs = nnx.Rngs(0)
        rows = megabytes * 2**20 // 32 // 4 // 2048
        return nnx.List(nnx.Param(jax.random.normal(rngs.params(), (rows, 2048))) for _ in range(32))

    mesh = mm.MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model"))
    tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(4)]
    sharding = mm.TaskSharding(
        {mm.path(range(8 * n, 8 * n + 8)): (tasks[n], P(None, "model")) for n in range(4)}
    )
    checkpoints = Checkpoints(folder)
    with mesh:
        node = nnx.eval_shape(make) if what == "abstract" else mm.jit(make, out_shardings=sharding)()
        jax.block_until_ready([x for x in jax.tree.leaves(nnx.state(node)) if isinstance(x, jax.Array)])
        before, start = reset_peak(), time.perf_counter()
        if what == "save":
            checkpoints.save(1, {"weights": node})
            checkpoints.close()
        else:
            checkpoints.restore({"weights": node}, sharding=sharding)
        seconds = time.perf_counter() - start
    share = sum(shard.data.nbytes for x in jax.tree.leaves(nnx.state(node)) for shard in x.addressable_shards)
    print(json.dumps({"share": share, "peak": status("VmHWM") - before, "seconds": seconds}))


def reset_peak() -> int:
    """Has VmHWM start anew; returns the bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    """Bytes that /proc/self/status gives under this name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        process(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(tyro.cli(Options))
