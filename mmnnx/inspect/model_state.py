"""The nodes and arrays of an NNX object, with their sizes and homes. Nothing is computed."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmnnx.inspect.locations import Homes, Placed
from mmnnx.sharding.path_filter import Path


@dataclass(frozen=True)
class Piece:
    """One array of an NNX object, real or abstract.

    Attributes:
      path: of its Variable, or its own.
      kind: the type of its Variable (for those of an Rngs "RngState"), or "Array".
      shape, dtype: of PRNG keys, their logical ones.
      size, bytes: of the whole array.
      placed: where it lives; None if it is not placed.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    bytes: int
    placed: Placed | None

    def __str__(self) -> str:
        return array_text(self)

    @property
    def shares(self) -> list[Piece]:
        """What each home has of it: itself, or its pieces if it is divided between tasks."""
        if self.placed is None or not self.placed.pieces:
            return [self]
        each = self.bytes // max(self.size, 1)  # an array without elements has no bytes
        return [
            dataclasses.replace(self, size=size, bytes=size * each, placed=placed)
            for placed, size in self.placed.pieces
        ]


@dataclass(frozen=True)
class Contents:
    """The nodes and arrays of an NNX object.

    Attributes:
      nodes: by path, each Module and other node, in Flax's order (children before parents).
      pieces: its arrays, each once, under the first path that leads to it.
      shared: for each further path to a Module or Variable: the first path, and the type.
    """

    nodes: dict[Path, Any]
    pieces: tuple[Piece, ...]
    shared: dict[Path, tuple[Path, type]]


def list_state(obj: Any, homes: Homes) -> Contents:
    """Lists the nodes and arrays of `obj`, an NNX object with real or abstract arrays.

    Raises:
      TypeError: not an NNX object.
      PlacementError: state that the TaskSharding of `homes` cannot place.
    """
    if not nnx.graph.is_graph_node(obj) or isinstance(obj, nnx.Variable):
        raise TypeError(
            f"an NNX object is needed, such as an nnx.Module or nnx.Optimizer, not {type(obj).__name__}"
        )
    nodes, shared = {}, {}
    for path, value in nnx.iter_graph(obj, graph=True):
        if not isinstance(value, nnx.Variable) and nnx.graph.is_node(value):
            nodes[path] = value
    aliases: list[tuple[Path, Path]] = []
    for first, *others in nnx.find_duplicates(obj):
        aliases += [(first, other) for other in others]
    values = dict(nnx.to_flat_state(nnx.state(obj, graph=True)))
    for first, other in aliases:
        node = nodes.get(first, values.get(first))
        if isinstance(node, nnx.Module | nnx.Variable):
            shared[other] = first, type(node)
    pieces: list[Piece] = []
    for path, value in values.items():
        arrays = [x for x in jax.tree.leaves(_raw(value)) if hasattr(x, "shape") and hasattr(x, "dtype")]
        paths = [path, *_others(path, aliases)]
        for x, placed in zip(arrays, homes.find(paths, value, arrays)):
            size = math.prod(x.shape)
            pieces.append(
                Piece(path, _kind(value), tuple(x.shape), str(x.dtype), size, size * x.dtype.itemsize, placed)
            )
    return Contents(nodes, tuple(pieces), shared)


def on_devices(pieces: Iterable[Piece]) -> dict[int, int]:
    """Bytes of these arrays on each device that holds some of them, by its number."""
    found: Counter[int] = Counter()
    for share in (share for piece in pieces for share in piece.shares):
        if share.placed is not None:
            for device in share.placed.home.devices:
                found[device] += share.placed.shard_bytes
    return dict(sorted(found.items()))


def array_text(x: Any) -> str:
    """The type of an array: "float32[32,128]"."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def is_array(x: Any) -> bool:
    """Whether it is an array, a tracer, or the shape of one."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _raw(value: Any) -> Any:
    return value.get_raw_value() if isinstance(value, nnx.Variable) else value


def _kind(value: Any) -> str:
    if isinstance(value, nnx.RngState):
        return nnx.RngState.__name__
    return type(value).__name__ if isinstance(value, nnx.Variable) else "Array"


def _others(path: Path, aliases: Iterable[tuple[Path, Path]]) -> Iterator[Path]:
    """The other paths to what is at `path`: it or a node above it may be shared."""
    return (other + path[len(first) :] for first, other in aliases if path[: len(first)] == first)
