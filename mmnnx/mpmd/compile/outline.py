"""The ends of a pipeline run the program of a stage between them, and what else they do beside it.

They begin or end with more: an embedding, a head, a loss, or the weights of these to be drawn or updated. As
XLA's work goes with the kinds of programs, that of an end takes as long to compile as the one for all that is
between. Cut in two, an end runs what is compiled anyway. It costs one call more, which is why it must save
much.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import jax

from mmnnx import _compat
from mmnnx.mpmd.compile.constant_keys import is_draw, is_of_keys
from mmnnx.mpmd.compile.equality import operation
from mmnnx.mpmd.compile.lower import can_be_moved
from mmnnx.mpmd.ir.equations import Var, is_var
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar
from mmnnx.mpmd.ir.instructions import Call, Instruction
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.shardings import same_shape

# Kinds of operations that are not compiled once more, for a call more in each microbatch: in a transformer, a
# second of one core, for 3 to 5% of the shortest steps.
_WORTH = 40
# And for a call more in each step: what a program takes to compile beside its operations is that of four.
_WORTH_ONCE = 5
# Pairs of equal operations that are compared: half a second. An unrolled loop may have more by far.
_MOST = 1_000_000


def share(program: Program) -> tuple[Program, list[int]]:
    """Divides fragments that do all that another does, and more: of programs that have microbatch loops, or
    that draw state.

    Only where what is compiled for one device can be loaded for others: on CPU, in one process, without
    JAX's persistent compilation cache.

    Returns:
      The program that runs, and for each of its instructions the number that it (or what it is a part of) has
      in the one given.
    """
    moves = jax.process_count() == 1 and all(can_be_moved(c.mesh) for c in program.calls)
    parts = _divided(program) if moves else {}
    values = list(program.values)
    steps: list[tuple[int, Instruction]] = []
    for n, i in enumerate(program.instructions):
        if isinstance(i, Call) and i.fragment in parts:
            steps += [(n, c) for c in _calls(i, parts[i.fragment], values)]
        else:
            steps.append((n, i))
    instructions = tuple(i for _, i in steps)
    shared = dataclasses.replace(program, instructions=instructions, values=tuple(values), loops=())
    return shared, [n for n, _ in steps]


def _divided(program: Program) -> dict[Fragment, list[Fragment]]:
    """The fragments that are divided, each by the largest that it holds whole."""
    kinds: dict[Any, int] = {}
    lines: dict[Fragment, list[int]] = {}  # what the equations of a fragment do, as numbers
    looped = {c.fragment for c in program.calls if c.microbatch is not None}
    for f in dict.fromkeys(c.fragment for c in program.calls if looped or _draws(c)):
        if not f.jaxpr.effects and not _calls_host(f.jaxpr):
            try:
                lines[f] = [kinds.setdefault(operation(e), len(kinds)) for e in f.jaxpr.eqns]
            except TypeError:  # what cannot be hashed cannot be found again
                continue
    found: dict[Fragment, list[Fragment]] = {}
    kept: dict[tuple[int, ...], Fragment] = {}  # those that stay whole, one of each kind, by size
    for f in sorted(lines, key=lambda f: len(lines[f])):
        alike = [g for g in kept.values() if f.phase == g.phase and same_shape(f.mesh, g.mesh)]
        worth = _WORTH if f in looped else _WORTH_ONCE
        smaller = (g for g in reversed(alike) if len(lines[g]) < len(lines[f]))
        whole = (_by(f, g, lines[f], lines[g], worth) for g in smaller)
        if (parts := next(filter(None, whole), None)) is not None:
            found[f] = parts
        else:
            kept.setdefault(tuple(lines[f]), f)
    return found


def _calls_host(jaxpr: Any) -> bool:
    """Whether it holds a callback: compiled for one mesh alone, and each that is copied asks once more."""
    eqns = _compat.open_jaxpr(jaxpr)[2]
    return any("callback" in e.primitive.name or any(map(_calls_host, _compat.subjaxprs(e))) for e in eqns)


def _draws(call: Call) -> bool:
    """Whether it draws, of keys and seeds alone: initial state, so that it will hardly be called again."""
    f = call.fragment
    return all(map(is_of_keys, f.invars)) and any(map(is_draw, f.jaxpr.eqns))


def _by(
    f: Fragment, g: Fragment, mine: Sequence[int], its: Sequence[int], worth: int
) -> list[Fragment] | None:
    """A fragment divided by another, if it holds that whole and spares so many kinds of operations."""
    count, other = Counter(mine), Counter(its)
    rest = count - other
    if not other <= count or len(count) - len(rest) < worth:
        return None
    if sum(n * count[kind] for kind, n in other.items()) > _MOST:
        return None
    for step in (1, -1, 0):  # 0: by what they read alone, as the LM's last optimizer needs
        found = _matched(f, g, mine, its, _aligned(mine, its, step) if step else {})
        parts = None if found is None else _cut(f, g, *found)
        if parts is not None:
            return parts
    return None


def _aligned(mine: Sequence[int], its: Sequence[int], step: int) -> dict[int, int]:
    """For items of one sequence, where they stand in another that has rows of them; of several that are next
    to each other, at the first or (step -1) the last.
    """
    blocks = SequenceMatcher(None, mine[::step], its[::step], autojunk=False).get_matching_blocks()
    here, there = range(len(mine))[::step], range(len(its))[::step]
    return {there[b + n]: here[a + n] for a, b, size in blocks for n in range(size)}


def _matched(
    f: Fragment, g: Fragment, mine: Sequence[int], its: Sequence[int], aligned: Mapping[int, int]
) -> tuple[list[Any], dict[Var, Any]] | None:
    """The equations of f that do what those of g do, in the order of g, and what its variables are in f.

    Those that are aligned, as far as they read and make what the others do; for each other one the first that
    does, and is left. None if there is none.
    """
    names: dict[Var, Any] = {}
    core: dict[int, Any] = {}
    left: dict[int, list[Any]] = {}

    def take(n: int, ours: Any) -> bool:
        theirs = g.jaxpr.eqns[n]
        each = zip((*theirs.invars, *theirs.outvars), (*ours.invars, *ours.outvars))
        pairs = [(a, b) for a, b in each if is_var(a)]
        if any(names.get(a, b) is not b for a, b in pairs):
            return False
        names.update(pairs)
        core[n] = ours
        return True

    used = {m for n, m in aligned.items() if take(n, f.jaxpr.eqns[m])}
    for m, kind in enumerate(mine):
        if m not in used:
            left.setdefault(kind, []).append(f.jaxpr.eqns[m])
    for n, kind in enumerate(its):
        if n not in core:
            ours = next((e for e in left.get(kind, ()) if take(n, e)), None)
            if ours is None:
                return None
            left[kind].remove(ours)
    return [core[n] for n in range(len(its))], names


def _cut(f: Fragment, g: Fragment, core: Sequence[Any], names: dict[Var, Any]) -> list[Fragment] | None:
    """A fragment as what comes before the equations of another, these, and what comes after.

    None if that cannot be: if they read what is made of their results, or make what is read of f and is no
    result of g. What costs next to nothing is made by each part that reads it: what is made of nothing, such
    as a mask, or of inputs and takes no work, such as the bias corrections of Adam.
    """
    if not names.keys() >= {*g.invars}:
        return None
    takes, makes = (tuple(names[v] for v in held) for held in (g.invars, g.outvars))
    given = {*f.invars}
    inside = {v for e in core for v in e.outvars}
    of_nothing: set[Var] = set()
    cheap: set[Var] = set()
    waiting: set[Var] = set()  # for the core
    free, after = [], []
    for e in f.jaxpr.eqns:
        if of_nothing.issuperset(_reads(e)):
            of_nothing.update(e.outvars)
            cheap.update(e.outvars)
        elif _takes_no_work(e) and all(v in cheap or v in given for v in _reads(e)):
            cheap.update(e.outvars)
        if not inside.isdisjoint(e.outvars):
            waiting.update(v for v in e.outvars if v not in cheap)
        elif waiting.isdisjoint(_reads(e)):
            free.append(e)
        else:
            waiting.update(e.outvars)
            after.append(e)
    if after and {v for e in free for v in e.outvars}.isdisjoint(takes):  # nothing has to come first
        after, free = [e for e in f.jaxpr.eqns if inside.isdisjoint(e.outvars)], []
    copied = inside & cheap
    wanted = {*f.outvars, *(v for e in after for v in _reads(e) if v not in copied)}
    made = {*f.outvars, *(v for e in f.jaxpr.eqns for v in _reads(e))}
    if (
        not (inside | waiting).isdisjoint(takes)
        or len({*takes}) < len(takes)
        or not inside & wanted <= {*makes} <= made  # the last for what nobody reads and has no name
    ):
        return None
    copies = [e for e in core if cheap.issuperset(e.outvars)]
    before = [_outer(f, free, copies, {*wanted, *takes})] if free else []
    behind = [_outer(f, after, copies, {*f.outvars})] if after else []
    parts = [*before, _part(f, core, takes, makes), *behind]
    return [
        dataclasses.replace(p, name=f"{f.name} ({n} of {len(parts)})") for n, p in enumerate(parts, start=1)
    ]


def _takes_no_work(eqn: Any) -> bool:
    """Whether it adds or drops dimensions of size 1, or makes scalars of scalars."""
    if eqn.primitive.name in ("reshape", "broadcast_in_dim", "squeeze"):
        shapes = [v.aval.shape for v in (*_reads(eqn), *eqn.outvars)]
        return len({tuple(n for n in shape if n != 1) for shape in shapes}) == 1
    return not _compat.subjaxprs(eqn) and not any(v.aval.shape for v in (*_reads(eqn), *eqn.outvars))


def _reads(eqn: Any) -> list[Var]:
    return [a for a in eqn.invars if is_var(a)]


def _outer(f: Fragment, eqns: Sequence[Any], cheap: Sequence[Any], wanted: set[Var]) -> Fragment:
    """A part outside of the core, with what it needs of the cheap equations; it returns what is wanted."""
    makes = tuple(v for e in eqns for v in e.outvars if v in wanted)
    needed = {v for e in eqns for v in _reads(e)}
    copies: set[Var] = set()
    for e in reversed(cheap):
        if not needed.isdisjoint(e.outvars):
            copies.update(e.outvars)
            needed.update(_reads(e))
    own = {v for e in eqns for v in e.outvars} | copies
    whole = [e for e in f.jaxpr.eqns if not own.isdisjoint(e.outvars)]
    takes = dict.fromkeys(v for e in whole for v in _reads(e) if v not in own)
    return _part(f, whole, tuple(takes), makes)


def _part(f: Fragment, eqns: Sequence[Any], takes: tuple[Var, ...], makes: tuple[Var, ...]) -> Fragment:
    jaxpr = _compat.close_jaxpr(takes, makes, eqns)
    return dataclasses.replace(f, jaxpr=jaxpr, invars=takes, outvars=makes)


def _calls(call: Call, parts: Sequence[Fragment], values: list[PlacedVar]) -> list[Call]:
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
        calls.append(dataclasses.replace(call, fragment=p, inputs=inputs, outputs=outputs, frees=frees))
    return calls[::-1]
