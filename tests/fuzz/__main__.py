"""Random train steps under mm.jit and nnx.jit: `python -m tests.fuzz --examples 1000 --seed 0`.

Prints the smallest train step that differs, as code for a test, and counts at the end. The exit status is 1
if there was one. tests/fuzz/case.py says what is random, tests/fuzz/compare.py what is compared, and how
closely.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

from tests.fuzz.run import run  # JAX reads the environment


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100, metavar="N", help="how many train steps")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, other train steps")
    parser.add_argument("--verbose", action="store_true", help="print each train step before it runs")
    options = parser.parse_args(argv)
    counts = run(options.examples, options.seed, options.verbose)
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
