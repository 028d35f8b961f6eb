"""`DividedArray`: one array in pieces of any sizes, each on a mesh.

An array that JAX makes has one shard on each device, all of one size. Layers that are divided unevenly, or in
several pieces on each mesh, as for interleaved schedules, are none such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from mmnnx import _compat
from mmnnx.sharding.division import has_layout, starts, undivided, ways_to_divide


class PiecewiseSharding(Sharding):
    """Where the pieces of a `DividedArray` are.

    Attributes:
      named: the same over the mesh of all pieces; the name of the axis along which they are divided says how.
    """

    def __init__(self, named: NamedSharding):
        self.named = named

    @property
    def device_set(self) -> set[jax.Device]:
        """The devices of all pieces."""
        return self.named.device_set

    @property
    def num_devices(self) -> int:
        """1, for JAX: of one device alone it takes an array to be free to move. See `device_set`."""
        return 1

    @property
    def is_fully_replicated(self) -> bool:
        return False

    @property
    def is_fully_addressable(self) -> bool:
        return self.named.is_fully_addressable

    @property
    def memory_kind(self) -> str | None:
        return None

    def with_memory_kind(self, kind: str) -> Sharding:
        """Refused: pieces are in the memory of their devices.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(f"the pieces of a DividedArray stay in device memory, not in {kind!r}")

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the largest shard of a piece."""
        return max((s.shard_shape(shape) for s, shape in self.pieces(global_shape)), key=math.prod)

    def devices_indices_map(self, global_shape: Sequence[int]) -> Mapping[jax.Device, Any]:
        """Refused: a device may have several pieces.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(
            "a device may have several pieces of a DividedArray: see its .pieces; and save it by "
            "mmnnx.train.checkpoint.Checkpoints"
        )

    def check_compatible_aval(self, aval_shape: Sequence[int]) -> None:
        """Refused, which is what JAX asks before it puts an array somewhere.

        Raises:
          ValueError: always.
        """
        raise ValueError(
            "JAX itself cannot put an array in pieces: let mm.jit do it, with in_shardings= or "
            "out_shardings= a TaskSharding that divides it"
        )

    @property
    def dim(self) -> int:
        """The dimension that is divided."""
        return ways_to_divide(self.named)[0].dim

    def pieces(self, shape: Sequence[int]) -> list[tuple[NamedSharding, tuple[int, ...]]]:
        """The sharding and the shape of each piece of an array."""
        way = ways_to_divide(self.named)[0]
        assert way.sizes is not None
        shapes = [(*shape[: way.dim], n, *shape[way.dim + 1 :]) for n in way.sizes]
        return [(NamedSharding(mesh, way.spec), piece) for mesh, piece in zip(way.meshes, shapes)]

    def is_equivalent_to(self, other: Sharding, ndim: int) -> bool:
        """Whether the same pieces are in the same places."""
        return isinstance(other, PiecewiseSharding) and self.named.is_equivalent_to(other.named, ndim)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PiecewiseSharding) and self.named == other.named

    def __hash__(self) -> int:
        return hash((PiecewiseSharding, self.named))

    def __repr__(self) -> str:
        return f"PiecewiseSharding({self.named.spec} over {dict(self.named.mesh.shape)})"


def sharding_of(named: NamedSharding) -> Sharding:
    """What an array has whose pieces are as a NamedSharding says, if it is in pieces."""
    named = undivided(named)
    return PiecewiseSharding(named) if has_layout(named.mesh) else named


def named_sharding(x: Any) -> NamedSharding | None:
    """The NamedSharding of an array, or that of a `DividedArray` over all its meshes; None for any other."""
    own = getattr(x, "sharding", None)
    if isinstance(own, PiecewiseSharding):
        return own.named
    return own if isinstance(own, NamedSharding) else None


class DividedArray(jax.Array):
    """An array in pieces along one dimension, each on a mesh of its own or several on one.

    State that a `Division` places unevenly is one. `mm.jit` computes with each piece where it lives. To JAX
    it is an array like others: elsewhere it is computed with as a whole, on the default device.

    Attributes:
      pieces: the pieces, in order, each a `jax.Array` on its mesh.
      dim: the dimension.

    Args:
      pieces: the pieces.
      sharding: where they are.

    Example:
      >>> layers = mm.TaskSharding({...: (stages, P())})  # ten layers, on four stages
      >>> with mesh:
      ...     stack = mm.jit(lambda: nnx.Param(jnp.ones((10, 64))), out_shardings=layers)()
      >>> [piece.shape for piece in stack.get_value().pieces]
      [(3, 64), (3, 64), (2, 64), (2, 64)]
    """

    __slots__ = ("__dict__",)
    _committed = False  # where JAX looks for `committed`

    def __init__(self, pieces: Sequence[jax.Array], sharding: PiecewiseSharding):
        self.pieces, self._sharding = tuple(pieces), sharding
        self.dim = ways_to_divide(sharding.named)[0].dim
        shape = list(pieces[0].shape)
        shape[self.dim] = sum(piece.shape[self.dim] for piece in pieces)
        self._aval = jax.typeof(pieces[0]).update(shape=tuple(shape))

    @property
    def aval(self) -> Any:
        return self._aval

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def weak_type(self) -> bool:
        return self.aval.weak_type

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def sharding(self) -> Any:
        return self._sharding

    @property
    def committed(self) -> bool:
        """False to JAX, so that it may put a copy where it computes; `mm.jit` knows better."""
        return False

    @property
    def is_fully_addressable(self) -> bool:
        return self._sharding.is_fully_addressable

    @property
    def is_fully_replicated(self) -> bool:
        return False

    @property
    def addressable_shards(self) -> list[Any]:
        """The shards of all pieces that this process has; the index of each is that in its piece."""
        return [shard for piece in self.pieces for shard in piece.addressable_shards]

    def devices(self) -> set[jax.Device]:
        """The devices of all pieces."""
        return set(self._sharding.device_set)

    def is_ready(self) -> bool:
        """Whether all pieces are computed."""
        return all(piece.is_ready() for piece in self.pieces)  # type: ignore[attr-defined]

    def block_until_ready(self) -> DividedArray:
        """Waits for all pieces."""
        jax.block_until_ready(self.pieces)
        return self

    def copy(self) -> DividedArray:
        """The same in buffers of its own."""
        return DividedArray([piece.copy() for piece in self.pieces], self._sharding)

    def copy_to_host_async(self) -> None:
        """Begins to copy all pieces to the host."""
        for piece in self.pieces:
            piece.copy_to_host_async()

    def delete(self) -> None:
        """Deletes all pieces."""
        for piece in self.pieces:
            piece.delete()

    def is_deleted(self) -> bool:
        """Whether a piece is deleted."""
        return any(piece.is_deleted() for piece in self.pieces)

    def whole(self) -> Any:
        """All of it in one place: of numbers a NumPy array, of PRNG keys an array on the default device.

        Raises:
          ValueError: if this process does not have all pieces: `mm.fetch` brings them.
        """
        if not self.is_fully_addressable:
            raise ValueError(
                "other processes have pieces of this array, which is divided between tasks: mm.fetch it, in "
                "every process"
            )
        if jax.dtypes.issubdtype(self.dtype, jax.dtypes.prng_key):
            words = [np.asarray(jax.random.key_data(piece)) for piece in self.pieces]
            impl = jax.random.key_impl(self.pieces[0])
            return jax.random.wrap_key_data(jnp.concatenate(words, axis=self.dim), impl=impl)
        return np.concatenate([np.asarray(piece) for piece in self.pieces], axis=self.dim)

    def tolist(self) -> Any:
        """The numbers in nested lists."""
        return self.whole().tolist()

    def tobytes(self, order: Any = "C") -> bytes:
        """The numbers as bytes."""
        return self.whole().tobytes(order)

    def __reduce__(self) -> Any:
        return jnp.asarray(self.whole()).__reduce__()  # unpickled, it is on one device, as of any jax.Array

    @property
    def _base_array(self) -> Any:
        return self.whole()._base_array  # what jax.random.key_data takes of PRNG keys

    def __array__(self, dtype: Any = None, context: None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.whole(), dtype=dtype)

    def __repr__(self) -> str:
        return f"DividedArray({self.dtype}{list(self.shape)}, {self._sharding})"

    __str__ = __repr__
    __hash__ = None  # type: ignore[assignment]  # as of any jax.Array


def divide_array(x: Any, sharding: PiecewiseSharding, put: Any) -> DividedArray:
    """An array in pieces.

    Args:
      x: an array, here or on the host.
      sharding: where the pieces go.
      put: from an array and a NamedSharding to the array there.
    """
    way = ways_to_divide(sharding.named)[0]
    assert way.sizes is not None
    index = (slice(None),) * way.dim
    ranges = [slice(start, start + n) for start, n in zip(starts(way.sizes), way.sizes)]
    whole = x.whole() if isinstance(x, DividedArray) else x
    pieces = [
        put(whole[(*index, part)], NamedSharding(mesh, way.spec)) for part, mesh in zip(ranges, way.meshes)
    ]
    return DividedArray(pieces, sharding)


_compat.register_array_type(DividedArray, lambda x: x.aval, DividedArray.whole)
_compat.forward_array_methods(DividedArray, lambda x: jnp.asarray(x.whole()))
