"""Random train steps under mm.jit and nnx.jit: `python -m tests.fuzz --examples 1000 --seed 0`.

Prints the smallest train step that differs, as code for a test, and counts at the end. The exit status is 1
if there was one. tests/fuzz/case.py says what is random, tests/fuzz/compare.py what is compared, and how
closely. Each process has its own train steps: which ones, the seed says, and how many processes there are.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.environment import compile_fast

compile_fast()

from tests.fuzz.run import run, summary  # noqa: E402  # JAX reads the environment

STRIDE = 1_000_003  # between the seeds of processes


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100, metavar="N", help="how many train steps")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, other train steps")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="P", help="to run them in")
    parser.add_argument("--verbose", action="store_true", help="print each train step before it runs")
    options = parser.parse_args(argv)
    count = max(1, min(options.processes, options.examples))
    began, total = time.monotonic(), Counter()
    with ProcessPoolExecutor(count, get_context("spawn")) as processes:
        shares = [len(range(k, options.examples, count)) for k in range(count)]
        seeds = [options.seed + k * STRIDE for k in range(count)]
        for counts in processes.map(run, shares, seeds, [options.verbose] * count):
            total += counts
    print(f"in all: {summary(total, time.monotonic() - began)}")
    return int(total["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
