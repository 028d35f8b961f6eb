"""A function over arrays that span several meshes becomes one over the pieces that each mesh has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

import jax

import mmnnx.mpmd.divide.indexing  # noqa: F401  # rules of their own
from mmnnx.mpmd.divide.loops import divide_jaxpr
from mmnnx.mpmd.divide.values import Cut
from mmnnx.mpmd.frontend.function import Function, function_text
from mmnnx.mpmd.frontend.in_out_shardings import InOutShardings
from mmnnx.mpmd.frontend.record import Leaf, Record
from mmnnx.mpmd.ir.pieces import PieceMap
from mmnnx.mpmd.ir.shardings import DividedSharding, mesh_of
from mmnnx.sharding.division import piece_keys

T = TypeVar("T")


def divide(function: Function) -> tuple[Function, PieceMap | None]:
    """The function over pieces, and what was divided; the same function and None if nothing is.

    Raises:
      PlacementError: for an equation that would need a divided array whole.
    """
    shardings, avals, outs = function.shardings, function.jaxpr.in_avals, function.jaxpr.out_avals
    known = [(d, aval.shape) for d, aval in zip(shardings.divided_arguments, avals) if d is not None]
    results = [
        _like_its_module(shardings, n, aval.shape, known) if d is None else d
        for n, (d, aval) in enumerate(zip(shardings.divided_results, outs))
    ]
    if not any((*shardings.divided_arguments, *results)):
        return function, None
    given = [_cut(d, aval.shape) for d, aval in zip(shardings.divided_arguments, avals)]
    wanted = [_cut(d, aval.shape) for d, aval in zip(results, outs)]
    jaxpr, made = divide_jaxpr(function.jaxpr, given, wanted, function.record.names())
    arguments = _Expansion(given, shardings.divided_arguments)
    expanded = _Expansion(made, results)
    pieces = PieceMap(
        list(shardings.divided_arguments),
        [None if cut is None else (cut.dim, cut.sizes) for cut in made],
        [d if d is None or d is shardings.divided_results[n] else None for n, d in enumerate(results)],
    )
    traced = dataclasses.replace(
        function.traced,
        jaxpr=jaxpr,
        donated=arguments.repeated(function.traced.donated),
        result_shardings=expanded.repeated(function.traced.result_shardings),
    )
    record = Record(
        arguments.map(function.record.inputs, _piece_of_leaf),
        expanded.map(
            [_renumbered(leaf, cut, given, arguments) for leaf, cut in zip(function.record.results, made)],
            _piece_of_result,
        ),
        function.record.references,
        function.record.out_tree,
    )
    follows = [_follow(n, cut, given, arguments) for n, cut in zip(shardings.follows, made)]
    divided = dataclasses.replace(
        shardings,
        in_shardings=arguments.shardings(shardings.in_shardings),
        homes=arguments.homes(shardings.homes),
        follows=[n for row in follows for n in row],
        out_shardings=expanded.shardings(
            [
                None if d is None and cut is not None else s
                for s, d, cut in zip(shardings.out_shardings, shardings.divided_results, made)
            ]
        ),
        module_meshes=expanded.homes(shardings.module_meshes),
        on_every_mesh=expanded.repeated(shardings.on_every_mesh),
        divided_arguments=[None] * arguments.count,
        divided_results=[None] * expanded.count,
    )
    over_pieces = dataclasses.replace(
        function,
        traced=traced,
        record=record,
        leaves=arguments.leaves(function.leaves),
        shardings=divided,
        task_meshes=function.meshes.tasks(),
    )
    function.dump.write("divide", functools.partial(function_text, over_pieces))
    return over_pieces, pieces


def divides_inputs(function: Function) -> bool:
    """Whether an argument is divided that is no state of an NNX object."""
    divided = function.shardings.divided_arguments
    leaves = function.record.inputs
    return any(d and not (leaf is not None and leaf.is_variable) for d, leaf in zip(divided, leaves))


def _cut(divided: DividedSharding | None, shape: Sequence[int]) -> Cut | None:
    return None if divided is None else Cut(divided.dim, divided.sizes(shape))


def _like_its_module(
    shardings: InOutShardings,
    n: int,
    shape: Sequence[int],
    arguments: Sequence[tuple[DividedSharding, Sequence[int]]],
) -> DividedSharding | None:
    """How a result is divided whose module has state that is divided, and that has as many layers.

    An empty cache is such a result.

    Args:
      shardings: those of the function.
      n: the number of the result.
      shape: its shape.
      arguments: how those are divided that are, with their shapes.
    """
    if (mesh := shardings.module_meshes[n]) is None or shardings.out_shardings[n] is not None:
        return None
    for d, given in arguments:
        if mesh_of(d.whole) == mesh and shape[d.dim : d.dim + 1] == (given[d.dim],):
            return d
    return None


def _follow(
    owner: int | None, cut: Cut | None, given: Sequence[Cut | None], arguments: _Expansion
) -> list[int | None]:
    """For the pieces of a result, the arguments that they belong to."""
    if cut is None:
        return [None if owner is None or given[owner] is not None else arguments.first[owner]]
    if owner is None or given[owner] != cut:
        return [None] * len(cut.sizes)
    return [arguments.first[owner] + n for n in range(len(cut.sizes))]


def _renumbered(
    leaf: Leaf | None, cut: Cut | None, given: Sequence[Cut | None], arguments: _Expansion
) -> Leaf | None:
    """What is known of a result; it updates an argument only if that is divided as it is."""
    if leaf is None or leaf.updates is None:
        return leaf
    alike = given[leaf.updates] == cut
    return dataclasses.replace(leaf, updates=arguments.first[leaf.updates] if alike else None)


def _piece_of_leaf(leaf: Leaf | None, cut: Cut, n: int) -> Leaf | None:
    """What is known of one piece of an argument."""
    if leaf is None:
        return None
    key = piece_keys(cut.sizes)[n]
    within = (*leaf.within, key) if leaf.within else ()
    return dataclasses.replace(leaf, path=(*leaf.path, key), within=within)


def _piece_of_result(leaf: Leaf | None, cut: Cut, n: int) -> Leaf | None:
    piece = _piece_of_leaf(leaf, cut, n)
    if piece is None or piece.updates is None:
        return piece
    return dataclasses.replace(piece, updates=piece.updates + n)


class _Expansion:
    """Makes lists over pieces of lists over arrays.

    Attributes:
      first: for each array the number of its first piece.
      count: of all pieces.
    """

    def __init__(self, cuts: Sequence[Cut | None], divided: Sequence[DividedSharding | None]):
        self._cuts, self._divided = cuts, divided
        counts = [1 if cut is None else len(cut.sizes) for cut in cuts]
        *self.first, self.count = accumulate(counts, initial=0)

    def map(self, values: Sequence[T], piece: Any) -> list[T]:
        """For each piece what `piece(value, cut, n)` is of it."""
        return [
            each
            for value, cut in zip(values, self._cuts)
            for each in ([value] if cut is None else [piece(value, cut, n) for n in range(len(cut.sizes))])
        ]

    def repeated(self, values: Sequence[T]) -> list[T]:
        """For each piece what is so of the array."""
        return self.map(values, lambda value, cut, n: value)

    def shardings(self, values: Sequence[Any]) -> list[Any]:
        """For each piece its sharding, where the array has one."""
        rows = [
            [s] if cut is None else [None] * len(cut.sizes) if s is None or d is None else list(d.pieces)
            for s, cut, d in zip(values, self._cuts, self._divided)
        ]
        return [s for row in rows for s in row]

    def homes(self, values: Sequence[Any]) -> list[Any]:
        """For each piece its mesh, where the array has one."""
        rows = [
            [m] if cut is None else [None if m is None or d is None else mesh_of(s) for s in _pieces(d, cut)]
            for m, cut, d in zip(values, self._cuts, self._divided)
        ]
        return [m for row in rows for m in row]

    def leaves(self, values: Sequence[Any]) -> list[Any]:
        """What stands for the arguments."""
        return [
            piece
            for x, cut, d in zip(values, self._cuts, self._divided)
            for piece in ([x] if cut is None or d is None else _abstract(x, cut, d))
        ]


def _pieces(divided: DividedSharding | None, cut: Cut) -> Sequence[Any]:
    return [None] * len(cut.sizes) if divided is None else divided.pieces


def _abstract(x: Any, cut: Cut, divided: DividedSharding) -> list[jax.ShapeDtypeStruct]:
    aval = jax.typeof(x)
    return [
        jax.ShapeDtypeStruct(cut.shape(aval.shape, n), aval.dtype, sharding=s, weak_type=aval.weak_type)
        for n, s in enumerate(divided.pieces)
    ]
