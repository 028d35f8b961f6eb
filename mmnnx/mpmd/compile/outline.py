"""Outlining: what one fragment has in common with a smaller one becomes a call of that one.

The first and the last stage of a pipeline begin or end with more than the others: an embedding, a head, a
loss, or drawing or updating their weights. XLA takes as long to compile one of them as the fragment that all
others share. Split into what comes before the common core, the core and what comes after, such a fragment
runs an executable that is compiled anyway. It costs one call more, which is why it must save much.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mmnnx.mpmd.compile.constant_keys import is_draw, is_of_keys
from mmnnx.mpmd.compile.lower import loads_on_other_meshes
from mmnnx.mpmd.compile.outline_match import align, match_core
from mmnnx.mpmd.compile.outline_split import split_around
from mmnnx.mpmd.ir.equality import equation_key
from mmnnx.mpmd.ir.equations import equations_in, with_inner
from mmnnx.mpmd.ir.fragments import Fragment, Microbatches, PlacedVar
from mmnnx.mpmd.ir.instructions import Call, Instruction
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.scan_fragment import scan_fragment
from mmnnx.mpmd.ir.shardings import same_shape

# Kinds of operations that need not be compiled again, for a call more in each microbatch: in a transformer, a
# second of one core, for 3 to 5% of the shortest steps.
_WORTH = 40
# And for a call more in each step: what a program takes to compile beside its operations is that of four.
_WORTH_ONCE = 5
# Pairs of equal operations that are compared: half a second. An unrolled loop may have more by far.
_MOST_PAIRS = 1_000_000


def outline(program: Program) -> tuple[Program, list[int]]:
    """Splits fragments that do all that another does, and more, of programs with microbatch loops, or that
    initialise state.

    Only where what is compiled for one device can be loaded for others: on CPU, in one process.

    Returns:
      The program that runs, and for each of its instructions the number that it (or what it is a part of) has
      in the one given.
    """
    loads = jax.process_count() == 1 and all(loads_on_other_meshes(c.mesh) for c in program.calls)
    parts = _find_splits(program) if loads else {}
    values = list(program.values)
    steps: list[tuple[int, Instruction]] = []
    for n, i in enumerate(program.instructions):
        if isinstance(i, Call) and i.fragment in parts:
            steps += [(n, c) for c in _calls_of_parts(i, parts[i.fragment], values)]
        else:
            steps.append((n, i))
    instructions = tuple(i for _, i in steps)
    outlined = dataclasses.replace(program, instructions=instructions, values=tuple(values), loops=())
    return outlined, [n for n, _ in steps]


def _find_splits(program: Program) -> dict[Fragment, list[Fragment]]:
    """The fragments that are split, each around the largest that it holds whole."""
    kinds: dict[Any, int] = {}
    weights: dict[int, int] = {}  # of each kind, how many operations it stands for
    operations: dict[Fragment, list[int]] = {}  # what the equations of a fragment do, as numbers
    looped = {c.fragment for c in program.calls if c.microbatch is not None}
    for f in dict.fromkeys(c.fragment for c in program.calls if looped or _initialises(c)):
        if not f.jaxpr.effects and not _calls_host(f.jaxpr):
            eqns = f.one.jaxpr.eqns
            try:
                operations[f] = [kinds.setdefault(equation_key(e), len(kinds)) for e in eqns]
            except TypeError:  # it holds what cannot be hashed
                continue
            weights.update(zip(operations[f], map(_weight, eqns)))
    found: dict[Fragment, list[Fragment]] = {}
    whole: dict[Any, Fragment] = {}  # those that stay whole, one of each kind, by size
    for f in sorted(operations, key=lambda f: len(operations[f])):
        like = [
            g
            for g in whole.values()
            if f.phase == g.phase and same_shape(f.mesh, g.mesh) and _count(f) == _count(g)
        ]
        worth = _WORTH if f in looped else _WORTH_ONCE
        smaller = (g for g in reversed(like) if len(operations[g]) < len(operations[f]))
        splits = (_split(f, g, operations[f], operations[g], weights, worth) for g in smaller)
        if (parts := next(filter(None, splits), None)) is not None:
            found[f] = parts
        else:
            whole.setdefault((_count(f), *operations[f]), f)
    return found


def _count(f: Fragment) -> int:
    """How many microbatches run in a call."""
    return 1 if f.scan is None else f.scan.microbatches.count


def _weight(eqn: Any) -> int:
    """How many operations an equation stands for: the body of a scan is compiled as well."""
    return sum(1 for _ in with_inner(eqn))


def _calls_host(jaxpr: Any) -> bool:
    """Whether it holds a callback: compiled for one mesh alone, and each copy of it calls once more."""
    return any("callback" in e.primitive.name for e in equations_in(jaxpr))


def _initialises(call: Call) -> bool:
    """Whether it draws, of keys and seeds alone: initial state, so that it will hardly be called again."""
    f = call.fragment
    return all(map(is_of_keys, f.invars)) and any(map(is_draw, f.jaxpr.eqns))


def _split(
    f: Fragment,
    core: Fragment,
    mine: Sequence[int],
    its: Sequence[int],
    weights: Mapping[int, int],
    worth: int,
) -> list[Fragment] | None:
    """A fragment split around another, if it holds that whole and so saves so many kinds of operations."""
    count, other = Counter(mine), Counter(its)
    rest = count - other
    if not other <= count or sum(weights[kind] for kind in count.keys() - rest.keys()) < worth:
        return None
    if sum(n * count[kind] for kind, n in other.items()) > _MOST_PAIRS:
        return None
    one, core = f.one, core.one
    for step in (1, -1, 0):  # 0: by what they read alone, as the LM's last optimizer needs
        match = match_core(one, core, mine, its, align(mine, its, step) if step else {})
        parts = None if match is None else split_around(one, core, match)
        if parts is not None:
            return parts if f.scan is None else _scans(parts, f.scan.microbatches)
    return None


def _scans(parts: Sequence[Fragment], microbatches: Microbatches) -> list[Fragment] | None:
    """The parts of a microbatch, each for all that share a call; None if carries go from part to part."""
    for part in parts:
        takes, makes = {*part.invars}, {*part.outvars}
        for enters, leaves in microbatches.leaves.items():
            if leaves in takes or (enters in takes) != (leaves in makes):
                return None
    return [scan_fragment(part, microbatches) for part in parts]


def _calls_of_parts(call: Call, parts: Sequence[Fragment], values: list[PlacedVar]) -> list[Call]:
    """The calls of the parts of a fragment. What goes from one to another has buffers that are added."""
    f = call.fragment
    buffers = dict(zip((*f.invars, *f.outvars), (*call.inputs, *call.outputs)))
    dropped = {*call.frees}
    for v in (v for p in parts for v in p.outvars if v not in buffers):
        buffers[v] = len(values)
        dropped.add(len(values))
        values.append((v, f.mesh))
    calls: list[Call] = []
    for p in reversed(parts):
        inputs, outputs = (tuple(buffers[v] for v in held) for held in (p.invars, p.outvars))
        frees = tuple(sorted(dropped & {*inputs, *outputs}))
        dropped.difference_update(frees)
        calls.append(call._replace(fragment=p, inputs=inputs, outputs=outputs, frees=frees))
    return calls[::-1]
