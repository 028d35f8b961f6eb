"""What takes, joins or turns round parts of a dimension that is divided."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from mmnnx.mpmd.divide.recut import pad
from mmnnx.mpmd.divide.values import Cut, Pieces, Value
from mmnnx.mpmd.divide.writer import Writer, special
from mmnnx.mpmd.ir.equations import Atom, Equation


@special("slice")
def _slice(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value] | None:
    (value,), params = operands, node.eqn.params
    if not isinstance(value, Pieces):
        return None
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    strides = list(params["strides"] or [1] * len(starts))
    return [_taken(writer, node, value, starts, limits, strides)]


@special("dynamic_slice")
def _dynamic_slice(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value] | None:
    """One at a fixed place along the divided dimension, and whole in the others."""
    value, *indices = operands
    if not isinstance(value, Pieces):
        return None
    sizes, at = node.eqn.params["slice_sizes"], indices[value.dim]
    others = [d for d in range(len(sizes)) if d != value.dim]
    place = None if isinstance(at, Pieces) else writer.known(at)
    if place is None or any(sizes[d] != value.shape[d] for d in others):
        return None
    starts, limits = [0] * len(sizes), list(value.shape)
    start = min(max(int(place), 0), value.cut.size - sizes[value.dim])
    starts[value.dim], limits[value.dim] = start, start + sizes[value.dim]
    return [_taken(writer, node, value, starts, limits, [1] * len(sizes))]


@special("split")
def _split(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value] | None:
    (value,), params = operands, node.eqn.params
    if not isinstance(value, Pieces) or params["axis"] != value.dim:
        return None
    ends = list(itertools.accumulate(map(int, params["sizes"])))
    made = []
    for end, size in zip(ends, params["sizes"]):
        starts, limits = [0] * len(value.shape), list(value.shape)
        starts[value.dim], limits[value.dim] = end - int(size), end
        made.append(_taken(writer, node, value, starts, limits, [1] * len(limits)))
    return made


def _taken(
    writer: Writer, node: Equation, value: Pieces, starts: list[int], limits: list[int], strides: list[int]
) -> Value:
    """A slice: what each piece has of it; one piece alone is a whole value."""

    def take(atom: Atom, begin: Sequence[int], end: Sequence[int]) -> list[Atom]:
        return writer.trace(lambda x: jax.lax.slice(x, begin, end, strides), [atom], node.scope)

    d = value.dim
    indices = range(starts[d], limits[d], strides[d])
    atoms: list[Atom] = []
    first = 0
    for atom in value.atoms:
        size = atom.aval.shape[d]
        mine = [i - first for i in indices if first <= i < first + size]
        first += size
        if mine:
            begin = [*starts[:d], mine[0], *starts[d + 1 :]]
            end = [*limits[:d], mine[-1] + 1, *limits[d + 1 :]]
            atoms += [atom] if _is_all(atom, begin, end, strides) else take(atom, begin, end)
    if not atoms:  # nothing at all
        starts[d] = limits[d] = 0
        return take(value.atoms[0], starts, limits)[0]
    return atoms[0] if len(atoms) == 1 else Pieces(d, tuple(atoms), value.name)


def _is_all(atom: Atom, begin: Sequence[int], end: Sequence[int], strides: Sequence[int]) -> bool:
    return not any(begin) and tuple(end) == tuple(atom.aval.shape) and set(strides) <= {1}


@special("pad")
def _pad(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value] | None:
    """More along the divided dimension, as gradients of slices have: divided as what was given is."""
    (value, filling), config = operands, node.eqn.params["padding_config"]
    if not isinstance(value, Pieces) or isinstance(filling, Pieces):
        return None
    d, shape = value.dim, node.outvars[0].aval.shape
    cut = wanted[0] or writer.cut_given(d, shape[d])
    if not any(config[d]) or min(config[d]) < 0 or cut is None or cut.dim != d:
        return None
    trace = lambda fun, atoms: writer.trace(fun, atoms, node.scope)
    return [pad(value, config, filling, shape, cut.sizes, trace)]


@special("concatenate")
def _concatenate(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value] | None:
    """Pieces of several values, one after the other."""
    along = node.eqn.params["dimension"]
    in_pieces = [v for v in operands if isinstance(v, Pieces)]
    if not in_pieces or any(v.dim != along for v in in_pieces):
        return None
    atoms = [a for v in operands for a in (v.atoms if isinstance(v, Pieces) else [v])]
    return [Pieces(along, tuple(atoms), in_pieces[0].name)]


@special("rev")
def _reverse(
    writer: Writer, node: Equation, operands: Sequence[Value], wanted: Sequence[Cut | None]
) -> Sequence[Value] | None:
    (value,), dimensions = operands, node.eqn.params["dimensions"]
    if not isinstance(value, Pieces) or value.dim not in dimensions:
        return None
    turn: Any = lambda x: jax.lax.rev(x, dimensions)
    atoms = [writer.trace(turn, [a], node.scope)[0] for a in reversed(value.atoms)]
    return [Pieces(value.dim, tuple(atoms), value.name)]
