"""What is known of the memory behind a program's buffers."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.instructions import ProgramData, Transfer

Pairs = tuple[tuple[int, int], ...]  # (number of an input, number of the result that takes over its memory)


def saved_activations(program: ProgramData) -> frozenset[int]:
    """The buffers of what the backward of a stage and microbatch reads of its forward."""
    made_for = {s: i.microbatch for i in program.instructions for s in i.outputs}
    seen: defaultdict[Any, set[int]] = defaultdict(set)  # what forwards make and read
    found: set[int] = set()
    for c in program.calls:
        key = (c.mesh, c.stage, c.microbatch)
        if c.phase == "forward":
            seen[key].update((*c.inputs, *c.outputs))
        elif key in seen and c.phase != "none":
            found.update(s for s in c.inputs if s in seen[key] and made_for.get(s) is not None)
    return frozenset(found)


def buffer_reuse(program: ProgramData) -> dict[Fragment, Pairs]:
    """For each fragment, the inputs whose memory results take over: (number of the input, of the result).

    An input qualifies if each call of the fragment is its last use, and if it shares no memory with another
    mesh. If it is state or a sum, its next value takes its buffer, where this fragment makes that. Any other
    value that the program made gives its buffer to a result of the same shape and dtype.
    """
    # A transfer to a mesh of another shape, or to one that shares devices with the source, may not copy: the
    # result shares memory with the source. Then it is not overwritten. If the two meshes share devices, the
    # source is not either: whichever of the two is last used first, the other is still read.
    shared = {t.outputs[0] for t in program.transfers if not _is_copied(t)}
    shared |= {t.inputs[0] for t in program.transfers if _common_devices(t)}
    shared = program.moved(shared)
    dying: dict[Fragment, set[int]] = {}
    given: defaultdict[Fragment, set[int]] = defaultdict(set)  # those that are arguments, in some call
    for c in program.calls:
        given[c.fragment].update(n for n, s in enumerate(c.inputs) if s in program.inputs)
        times, free = Counter(c.inputs), set(c.frees) - shared
        mine = {n for n, s in enumerate(c.inputs) if s in free and times[s] == 1}
        dying[c.fragment] = dying.get(c.fragment, mine) & mine
    nexts, found = set(program.successors.values()), {}
    for f, places in dying.items():
        made = {v: k for k, v in enumerate(f.outvars)}
        after = {n: program.successors.get(f.invars[n]) for n in sorted(places)}
        pairs = [(n, made[v]) for n, v in after.items() if v in made]
        spare: defaultdict[Any, list[int]] = defaultdict(list)
        for v, k in made.items():
            if v not in nexts:
                spare[v.aval.shape, v.aval.dtype].append(k)
        for n, v in after.items():
            like = spare[f.invars[n].aval.shape, f.invars[n].aval.dtype]
            if v is None and n not in given[f] and like:
                pairs.append((n, like.pop(0)))
        found[f] = tuple(pairs)
    return found


def _is_copied(t: Transfer) -> bool:
    """Whether what a transfer makes shares no memory with what is on another mesh."""
    return t.source_mesh.devices.shape == t.target_mesh.devices.shape and not _common_devices(t)


def _common_devices(t: Transfer) -> set[Any]:
    return set(t.source_mesh.devices.flat) & set(t.target_mesh.devices.flat)
