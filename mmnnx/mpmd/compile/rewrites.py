"""What is compiled of a program: other than what it prints, less for XLA to compile and fewer calls."""

from __future__ import annotations

import dataclasses
from typing import Any

from mmnnx.mpmd.compile.constant_keys import extract_constant_keys
from mmnnx.mpmd.compile.outline import outline
from mmnnx.mpmd.compile.scan_sums import add_inside_scans
from mmnnx.mpmd.emit.merge import merge
from mmnnx.mpmd.ir.program import Program


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A program as it is compiled.

    Attributes:
      program: the program.
      numbers: for each of its instructions, the number that it prints with.
      keys: what is given to the inputs that were added, which come last.
    """

    program: Program
    numbers: list[int]
    keys: list[Any]


def rewrite(program: Program) -> Rewritten:
    """Merges calls, computes constant PRNG keys, and outlines what fragments have in common."""
    merged, firsts = merge(program)
    with_keys, keys = extract_constant_keys(add_inside_scans(merged))
    outlined, origins = outline(with_keys)
    return Rewritten(outlined, [firsts[n] for n in origins], keys)
