"""Pieces of other sizes, or of a padded value: each is put together of the rows that the old ones have."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mmnnx.mpmd.divide.values import Pieces
from mmnnx.mpmd.ir.equations import Atom

Trace = Callable[[Callable[..., Any], Sequence[Atom]], list[Atom]]
"""Writes the equations of a function over atoms; its results."""
Config = Sequence[tuple[int, int, int]]
"""For each dimension what is added before it, after it, and between its rows."""


def recut(value: Pieces, sizes: Sequence[int], trace: Trace) -> Pieces:
    """The same value in pieces of other sizes."""
    return pad(value, [(0, 0, 0)] * len(value.shape), None, value.shape, sizes, trace)


def pad(
    value: Pieces,
    config: Config,
    filling: Atom | None,
    shape: Sequence[int],
    sizes: Sequence[int],
    trace: Trace,
) -> Pieces:
    """What `jax.lax.pad` makes of a value, divided along the same dimension.

    Args:
      config: not negative along that dimension.
      filling: a scalar; None where nothing is added.
      shape: of the padded value.
      sizes: of its pieces.
    """
    d, (low, _, between) = value.dim, config[value.dim]
    places = [low + (between + 1) * row for row in range(value.cut.size)]  # of rows, in the padded value
    atoms: list[Atom] = []
    for begin, end in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        slices: list[tuple[Atom, int, int]] = []
        for atom, start in zip(value.atoms, itertools.accumulate(value.cut.sizes, initial=0)):
            rows = [r for r in range(atom.aval.shape[d]) if begin <= places[start + r] < end]
            slices += [(atom, rows[0], rows[-1] + 1)] if rows else []
        there = [place for place in places if begin <= place < end]
        edges = (there[0] - begin, end - 1 - there[-1], between) if there else (0, 0, 0)
        make = functools.partial(
            _piece,
            [(first, last) for _, first, last in slices],
            d,
            [*config[:d], edges, *config[d + 1 :]],
            (*shape[:d], end - begin, *shape[d + 1 :]),
        )
        read = [atom for atom, *_ in slices]
        whole = [atom for atom, *rows in slices if rows == [0, atom.aval.shape[d]]]
        if filling is None and len(slices) == len(whole) == 1:
            atoms += whole
        else:
            atoms += trace(make, read if filling is None else [*read, filling])
    return Pieces(d, tuple(atoms), value.name)


def _piece(
    slices: Sequence[tuple[int, int]], dim: int, config: Config, shape: Sequence[int], *arrays: jax.Array
) -> jax.Array:
    """Slices of arrays, one after the other, padded by what follows the arrays; that alone without slices."""
    parts = [jax.lax.slice_in_dim(x, *rows, axis=dim) for x, rows in zip(arrays, slices)]
    fillings = arrays[len(slices) :]
    if not parts:
        return jax.lax.broadcast(fillings[0], shape)
    joined = parts[0] if len(parts) == 1 else jax.lax.concatenate(parts, dim)
    return jax.lax.pad(joined, fillings[0], config) if fillings else joined
