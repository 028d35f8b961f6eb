"""Which inputs of a fragment its results may overwrite."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import NamedSharding

from mmnnx.mpmd.distributed.processes import span_processes
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar
from mmnnx.mpmd.ir.instructions import Call
from mmnnx.mpmd.ir.program import Program

Pairs = list[tuple[int, int]]  # (number of an input, number of the result that takes over its buffer)


def donations(
    program: Program, fixed: Mapping[PlacedVar, NamedSharding], donated: set[int]
) -> dict[Fragment, Pairs]:
    """For each fragment, the inputs whose buffers results take over: of `Program.overwrites` those that may.

    They must be of the same sharding, as far as it is decided; where XLA decides it, XLA decides about the
    buffer, too.

    Args:
      program: the fragments with their calls.
      fixed: shardings that are decided.
      donated: input buffers of the program whose arrays may be overwritten.
    """
    # Another process fetches an array when it comes to it: nothing may be written over it. What it sent was
    # received into memory that is no device's own, on some clients, and it may be asked about.
    apart = [t for t in program.transfers if span_processes(t.source_mesh, t.target_mesh)]
    kept = {s for t in apart for s in (*t.inputs, *t.outputs)} | (program.inputs.keys() - donated)
    barred: dict[Fragment, set[int]] = {}
    first: dict[Fragment, Call] = {}
    for call in program.calls:
        first.setdefault(call.fragment, call)
        barred.setdefault(call.fragment, set()).update(n for n, s in enumerate(call.inputs) if s in kept)

    def may(f: Fragment, n: int, k: int) -> bool:
        mine, its = (fixed.get(program.values[s]) for s in (first[f].inputs[n], first[f].outputs[k]))
        alike = its is None or (mine is not None and mine.is_equivalent_to(its, f.outvars[k].aval.ndim))
        return alike and n not in barred[f]

    return {f: [pair for pair in pairs if may(f, *pair)] for f, pairs in program.overwrites.items()}
