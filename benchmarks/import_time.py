"""How long does `import mmnnx` take beside `import flax.nnx` alone? In processes of their own, in turns.

python benchmarks/import_time.py
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import time

import tyro

PROGRAMS = {
    "flax.nnx": "import flax.nnx",
    "mmnnx": "import mmnnx",
    "flax.nnx, mmnnx": "import flax.nnx, mmnnx",
    "flax.nnx, mm.jit": "import flax.nnx, mmnnx; mmnnx.jit",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Time imports in new processes."""

    rounds: int = 9
    """Processes of each kind."""


def main() -> None:
    options = tyro.cli(Options)
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(options.rounds + 1):
        for name, program in PROGRAMS.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            if number:  # the first time, files are read from disk
                seconds[name].append(time.perf_counter() - began)
    nothing = statistics.median(seconds["flax.nnx"])
    print(f"median of {options.rounds} processes, and beside flax.nnx alone")
    for name, mine in seconds.items():
        print(f"{name:20} {statistics.median(mine):7.3f} s {statistics.median(mine) / nothing:7.2f}")


if __name__ == "__main__":
    main()
