"""Calls that always follow each other become one: one XLA program, and nothing kept between them.

Under 1F1B the last stage runs the backward of each microbatch right after its forward. A program lists both,
so that its schedule can be read; they are compiled as one. `compile.outline` may take out of it again what
other stages compile as well.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.instructions import Call, Control, Instruction, Transfer
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.scan_fragment import scan_fragment


def merge(program: Program) -> tuple[Program, list[int]]:
    """Merges calls of one microbatch, or in one while, that always follow each other on their mesh.

    Nothing that the first makes may be sent, and the second may read nothing that is received for it, so that
    no mesh waits for longer than before.

    Returns:
      The program that runs, and for each of its instructions the number that it (or its first part) has in
      the one given.
    """
    steps = list(enumerate(program.instructions))
    while True:
        instructions = [i for _, i in steps]
        pairs = _mergeable_pairs(instructions)
        if not pairs:
            merged = dataclasses.replace(program, instructions=tuple(instructions), loops=())
            return merged, [n for n, _ in steps]
        calls = _merged_calls(instructions, pairs)
        seconds = {j for _, j in pairs}
        steps = [(n, calls.get(k, i)) for k, (n, i) in enumerate(steps) if k not in seconds]


def _mergeable_pairs(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """Numbers of calls that can be merged: with a pair, all others of the same two fragments."""
    calls = _calls(instructions)
    found: dict[tuple[Fragment, Fragment], list[tuple[int, int]]] = {}
    for i, j in _neighbours(instructions):
        found.setdefault((calls[i].fragment, calls[j].fragment), []).append((i, j))
    counts = Counter(c.fragment for c in calls.values())
    used: set[Fragment] = set()
    chosen: list[tuple[int, int]] = []
    for (first, second), pairs in found.items():
        if len(pairs) == counts[first] == counts[second] and not used & {first, second}:
            used |= {first, second}
            chosen += pairs
    return chosen


def _neighbours(instructions: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """Numbers of calls that follow each other on a mesh, of one microbatch or one while, with no transfer
    between."""
    sent: set[int] = set()
    received: set[int] = set()  # for these: what comes from outside the loop is there before it
    depth = 0  # how many whiles are around
    last: dict[Mesh, tuple[int, Call]] = {}
    for j, second in enumerate(instructions):
        if isinstance(second, Control):
            depth += {"while": 1, "repeat": 0, "end": -1}[second.kind]
            last.clear()
        elif isinstance(second, Transfer):
            sent.update(second.inputs)
            received.update(second.outputs if depth or second.microbatch is not None else ())
        else:
            i, first = last.get(second.mesh, (0, None))
            if (
                first is not None
                and first.microbatch == second.microbatch
                and (depth or second.microbatch is not None)
                and sent.isdisjoint(first.outputs)
                and received.isdisjoint({*second.inputs} - {*first.inputs})
                and _variables_agree(first, second)
            ):
                yield i, j
            last[second.mesh] = j, second


def _calls(instructions: Sequence[Instruction]) -> dict[int, Call]:
    return {n: i for n, i in enumerate(instructions) if isinstance(i, Call)}


def _variables_agree(first: Call, second: Call) -> bool:
    """Whether each variable means the same in both calls."""
    f = first.fragment
    buffers = dict(zip((*f.invars, *f.outvars), (*first.inputs, *first.outputs)))
    within = {v for e in f.jaxpr.eqns for v in e.outvars} - buffers.keys()
    read = list(zip(second.fragment.invars, second.inputs))
    return all(buffers.get(v, s) == s and v not in within for v, s in read) and not any(
        s in first.outputs and v not in buffers for v, s in read
    )


def _merged_calls(instructions: Sequence[Instruction], pairs: Sequence[tuple[int, int]]) -> dict[int, Call]:
    """The calls that take the place of pairs, by the number of the first."""
    calls = _calls(instructions)
    readers = Counter(s for i in instructions for s in set(i.inputs))
    inner: dict[Fragment, set[Var]] = {}  # what only the second reads of the first, in every pair
    for i, j in pairs:
        first, second = calls[i], calls[j]
        made = zip(first.fragment.outvars, first.outputs)
        own = {v for v, s in made if readers[s] == 1 and s in second.inputs and s in second.frees}
        inner[first.fragment] = inner.get(first.fragment, own) & own
    fragments: dict[Fragment, Fragment] = {}
    merged = {}
    for i, j in pairs:
        first, second = calls[i], calls[j]
        if first.fragment not in fragments:
            fragments[first.fragment] = _merged_fragment(first, second, inner[first.fragment])
        f = fragments[first.fragment]
        buffers = dict(zip(second.fragment.invars, second.inputs))
        buffers |= dict(zip(first.fragment.invars, first.inputs))
        buffers |= dict(zip(first.fragment.outvars, first.outputs))
        buffers |= dict(zip(second.fragment.outvars, second.outputs))
        gone = {buffers[v] for v in inner[first.fragment]}
        frees = tuple(sorted({*first.frees, *second.frees} - gone))
        inputs, outputs = (tuple(buffers[v] for v in held) for held in (f.invars, f.outvars))
        merged[i] = Call(f, first.microbatch, inputs, outputs, first.stage, frees)
    return merged


def _merged_fragment(first: Call, second: Call, inner: set[Var]) -> Fragment:
    """Two fragments as one, without these results of the first."""
    f, g = first.fragment, second.fragment
    if f.scan is None or g.scan is None or f.scan.microbatches.stacks is not g.scan.microbatches.stacks:
        return _one_after_the_other(f, g, inner)
    of_f, of_g = f.scan.microbatches, g.scan.microbatches
    # Scans of the same microbatches become one scan, and what is inside is not stacked. Carries leave it all
    # the same, and results that are kept, of each microbatch apart.
    within = {v for v, stack in of_f.stacks.items() if stack in inner}
    one = _one_after_the_other(f.one, g.one, within - {*of_f.leaves.values(), *of_f.kept})
    read, passed = (of_f.read & of_g.read) - within, (of_f.passed & of_g.passed) - within
    return scan_fragment(one, dataclasses.replace(of_f, read=read, passed=passed))


def _one_after_the_other(f: Fragment, g: Fragment, inner: set[Var]) -> Fragment:
    """One after the other as one fragment, without these results of the first. What is copied into both is
    computed once."""
    known = {*f.invars, *(v for e in f.jaxpr.eqns for v in e.outvars)}
    more = [e for e in g.jaxpr.eqns if not (e.outvars and known.issuperset(e.outvars))]
    invars = (*f.invars, *(v for v in g.invars if v not in known))
    outvars = (*(v for v in f.outvars if v not in inner), *g.outvars)
    return dataclasses.replace(
        g,
        name=f.name if f.name == g.name else f"{f.name} and {g.name}",
        jaxpr=_compat.close_jaxpr(invars, outvars, [*f.jaxpr.eqns, *more]),
        invars=invars,
        outvars=outvars,
        scan=None,
    )
