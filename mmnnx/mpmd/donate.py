"""Which inputs of a fragment its results may overwrite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh, NamedSharding

from mmnnx.mpmd.fragments import Fragment, Held
from mmnnx.mpmd.processes import are_apart
from mmnnx.mpmd.program import Program
from mmnnx.mpmd.trace import Var

Pairs = list[tuple[int, int]]  # (number of an input, number of the result that takes over its buffer)


def donations(
    program: Program, fixed: Mapping[Held, NamedSharding], donated: set[int]
) -> dict[Fragment, Pairs]:
    """For each fragment, the inputs whose buffers their next values take over.

    An input qualifies if every call of the fragment is its last use, it is the program's to overwrite, and
    its next value is of the same type and sharding.

    Args:
      program: the fragments with their calls.
      fixed: shardings that are decided.
      donated: input slots of the program whose arrays may be overwritten.
    """
    received = {t.outputs[0] for t in program.transfers}
    # Another process fetches an array when it comes to it: nothing may be written over it.
    handed = {t.inputs[0] for t in program.transfers if are_apart(t.source_mesh, t.target_mesh)}
    kept = received | handed | (program.inputs.keys() - donated)
    possible: dict[Fragment, set[int]] = {}
    for call in program.calls:
        dropped, times = set(call.frees) - kept, Counter(call.inputs)
        mine = {n for n, s in enumerate(call.inputs) if s in dropped and times[s] == 1}
        possible[call.fragment] = possible.get(call.fragment, mine) & mine

    def kind(v: Var, mesh: Mesh) -> Any:
        return v.aval.shape, v.aval.dtype, fixed.get((v, mesh))

    chosen: dict[Fragment, Pairs] = {}
    for f, numbers in possible.items():
        made = {v: n for n, v in enumerate(f.outvars)}
        nexts = {n: program.successors.get(f.invars[n]) for n in sorted(numbers)}
        chosen[f] = [
            (n, made[v])
            for n, v in nexts.items()
            if v in made and kind(f.invars[n], f.mesh) == kind(v, f.mesh) and (v, f.mesh) in fixed
        ]
    return chosen
