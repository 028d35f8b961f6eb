"""Arrays that several meshes have a part of: taken apart for a call, put together after it, not copied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from mmnnx.mpmd.compile.executables import CompilerOptions
from mmnnx.mpmd.distributed.processes import absent_array, is_here
from mmnnx.mpmd.ir.pieces import PieceMap
from mmnnx.mpmd.ir.shardings import DividedSharding, is_committed, mesh_of
from mmnnx.mpmd.runtime.prepare import Interface, Prepared
from mmnnx.mpmd.runtime.put import put
from mmnnx.sharding.divided_array import DividedArray, PiecewiseSharding, divide_array
from mmnnx.sharding.division import TASKS, has_layout, joined_sharding


def around_pieces(
    prepare: Callable[[CompilerOptions], Prepared], pieces: PieceMap, names: Sequence[str]
) -> Callable[[CompilerOptions], AroundPieces]:
    """What compiles a program over pieces, to be run for whole arrays.

    Args:
      prepare: compiles it.
      pieces: what is divided.
      names: of the whole arguments.
    """
    return lambda options: AroundPieces(prepare(options), pieces, names)


class AroundPieces:
    """A compiled program over pieces, for arguments and results that are whole arrays.

    Args:
      prepared: the program.
      pieces: what is divided.
      names: of the whole arguments.
    """

    def __init__(self, prepared: Prepared, pieces: PieceMap, names: Sequence[str]):
        self.compiled, self.bound, self.pieces = prepared.compiled, prepared.bound, pieces
        self._prepared, self._names = prepared, names
        self._known = tuple(d for d in pieces.arguments if d is not None)
        self._apart = [None if d is None else _TakesApart(d) for d in pieces.arguments]

    @functools.cached_property
    def interface(self) -> Interface:
        """What a caller sees of it."""
        inner = self._prepared.interface
        results = self.pieces.of_results(inner.results)
        shardings = self.pieces.of_results(inner.result_shardings)
        return Interface(
            self.pieces.by_argument(inner.next_shardings),
            self.pieces.of_arguments(inner.arguments, lambda _, divided: None),
            [row[0] if cut is None else None for row, cut in zip(results, self.pieces.results)],
            [
                row[0] if cut is None else self._sharding(row, cut, asked)
                for row, cut, asked in zip(shardings, self.pieces.results, self.pieces.result_shardings)
            ],
        )

    def _sharding(
        self, pieces: Sequence[Any], cut: tuple[int, tuple[int, ...]], asked: DividedSharding | None
    ) -> Sharding:
        divided = asked or _as_it_comes(tuple(pieces), *cut, self._known)
        return PiecewiseSharding(divided.whole) if divided.lengths is not None else divided.whole

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        given: list[Any] = []
        for apart, x, name in zip(self._apart, leaves, self._names):
            if apart is None:
                given.append(x)
            elif isinstance(x, jax.Array) and x.is_deleted():
                raise ValueError(
                    f"{name} was donated to an earlier call and is gone: "
                    "use the value that call returned, or do not donate it"
                )
            else:
                given += apart(x)
        rows = self.pieces.of_results(self._prepared(given))
        return [
            row[0] if cut is None else _joined(row, cut[0], asked, self._known)
            for row, cut, asked in zip(rows, self.pieces.results, self.pieces.result_shardings)
        ]


class _TakesApart:
    """From an array to its pieces.

    Args:
      divided: how it is divided.
    """

    def __init__(self, divided: DividedSharding):
        self.divided = divided
        self._piecewise = PiecewiseSharding(divided.whole) if divided.lengths is not None else None
        order = {d: n for n, d in enumerate(_here(divided.whole))}
        self._shards = [[order[d] for d in _here(s)] for s in divided.pieces]

    def __call__(self, x: Any) -> Sequence[jax.Array]:
        divided, piecewise = self.divided, self._piecewise
        if piecewise is not None:
            there = isinstance(x, DividedArray) and x.sharding == piecewise
            return x.pieces if there else divide_array(x, piecewise, put).pieces
        if not (is_committed(x) and x.sharding.is_equivalent_to(divided.whole, x.ndim)):
            x = put(x.whole() if isinstance(x, DividedArray) else x, divided.whole)
        shape = list(x.shape)
        shape[divided.dim] //= len(divided.pieces)
        if not is_here(divided.whole):
            return [absent_array(shape, x.dtype, s) for s in divided.pieces]
        by_device = {s.device: s.data for s in x.addressable_shards}
        shards = [by_device[d] for d in _here(divided.whole)]
        make = functools.partial(jax.make_array_from_single_device_arrays, tuple(shape), dtype=x.dtype)
        return [make(s, [shards[n] for n in mine]) for s, mine in zip(divided.pieces, self._shards)]


@functools.lru_cache(maxsize=1024)
def _here(sharding: NamedSharding) -> list[jax.Device]:
    """The devices of a sharding that this process has, in the order of its mesh."""
    return [d for d in mesh_of(sharding).devices.flat if d in sharding.addressable_devices]


def _joined(
    pieces: Sequence[jax.Array], dim: int, asked: DividedSharding | None, known: tuple[DividedSharding, ...]
) -> jax.Array:
    """One array of its pieces; where nothing says how it has to be, as they come."""
    sizes = tuple(x.shape[dim] for x in pieces)
    divided = asked or _as_it_comes(tuple(x.sharding for x in pieces), dim, sizes, known)
    pieces = [x if x.sharding == s else put(x, s) for x, s in zip(pieces, divided.pieces)]
    if divided.lengths is not None:
        return DividedArray(pieces, PiecewiseSharding(divided.whole))
    shape = list(pieces[0].shape)
    shape[dim] *= len(pieces)
    by_device = {s.device: s.data for x in pieces for s in x.addressable_shards}
    shards = [by_device[d] for d in _here(divided.whole)]
    return jax.make_array_from_single_device_arrays(
        tuple(shape), divided.whole, shards, dtype=pieces[0].dtype
    )


@functools.lru_cache(maxsize=1024)
def _as_it_comes(
    shardings: tuple[Any, ...], dim: int, sizes: tuple[int, ...], known: tuple[DividedSharding, ...]
) -> DividedSharding:
    """How pieces with these shardings make one array, along the axis of one that is on the same meshes."""
    meshes, spec = [mesh_of(s) for s in shardings], shardings[0].spec
    alike = (d for d in known if set(meshes) <= {mesh_of(s) for s in d.pieces})
    axes = (d.axis for d in alike if d.axis in meshes[0].axis_names)
    axis = next(axes, TASKS)
    whole = joined_sharding(meshes, axis, dim, spec, sizes)
    pieces = tuple(NamedSharding(mesh, spec) for mesh in meshes)
    return DividedSharding(dim, axis, whole, pieces, sizes if has_layout(whole.mesh) else None)
