"""Writes arrays to a checkpoint: each process writes the shards it owns, and orbax makes one checkpoint.

Orbax's own handler of `jax.Array` refuses arrays that live in one process of several, so a `TypeHandler` of
our own writes them. The files are in orbax's format: orbax alone reads them back.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import NamedSharding

from mmnnx.sharding.divided_array import DividedArray
from mmnnx.sharding.division import starts
from mmnnx.train.checkpoint.agreement import raise_in_all
from mmnnx.train.checkpoint.keys import is_key, stored_as
from mmnnx.train.checkpoint.paths import kvstore
from mmnnx.train.checkpoint.step_folders import JSON, STATE

CHUNK = 4 * 2**20
"""The largest chunk of a stored array, in bytes. Reads are of whole chunks."""

_numbers = itertools.count()  # of writers, which all processes make in the same order

Region = tuple[slice, ...]


@dataclass
class Shards:
    """One array as this process writes it.

    Attributes:
      shape, dtype: of the whole array as it is stored.
      chunk: the shape of the parts that it is stored in; each lies within one shard.
      parts: the shards that this process owns, in host memory, with their regions of the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    parts: list[tuple[Region, np.ndarray]]


def copy_shards(arrays: Mapping[Any, Any]) -> dict[Any, Shards]:
    """Copies the shards that this process owns to the host; then the arrays may change or be donated."""
    owned = {key: _owned(x) for key, x in arrays.items()}
    for shards in owned.values():
        for _, data in shards:
            if isinstance(data, jax.Array):
                data.copy_to_host_async()  # all are started before the first is waited for
    found = {}
    for key, x in arrays.items():
        shape, dtype = stored_as(x)
        shard = shape
        if isinstance(x, jax.Array):
            own = [p.sharding.shard_shape(p.shape) for p in x.pieces] if isinstance(x, DividedArray) else []
            # A chunk lies within one shard of one piece, whatever their sizes.
            common = tuple(map(gcd, *own)) if len(own) > 1 else x.sharding.shard_shape(x.shape)
            shard = (*common, *shape[x.ndim :])
        parts = [(region, _host(data)) for region, data in owned[key]]
        found[key] = Shards(shape, dtype, chunk_shape(shape, shard, dtype.itemsize), parts)
    return found


def _owned(x: Any) -> list[tuple[Region, Any]]:
    """The shards of an array that this process writes: of replicas, the first one.

    With several processes, an array without a NamedSharding is the same in each, and process 0 writes it.
    """
    same_everywhere = not isinstance(x, jax.Array) or (
        x.is_fully_addressable and not isinstance(x.sharding, NamedSharding)
    )
    if same_everywhere and jax.process_index() > 0:
        return []
    if not isinstance(x, jax.Array):
        return [((), x)]
    if isinstance(x, DividedArray):
        firsts = zip(x.pieces, starts([piece.shape[x.dim] for piece in x.pieces]))
        return [
            (_moved(region, x.dim, first, piece.shape[x.dim]), data)
            for piece, first in firsts
            for region, data in _owned(piece)
        ]
    regions = x.sharding.devices_indices_map(x.shape)
    unwrap = jax.random.key_data if is_key(x.dtype) else lambda data: data
    return [(regions[s.device], unwrap(s.data)) for s in x.addressable_shards if s.replica_id == 0]


def _moved(region: Region, dim: int, first: int, size: int) -> Region:
    """A region of a piece as one of the whole array, of which the piece has `size` from `first` on."""
    start, stop, _ = region[dim].indices(size)
    return (*region[:dim], slice(first + start, first + stop), *region[dim + 1 :])


def _host(data: Any) -> np.ndarray:
    if isinstance(data, jax.Array) and all(d.platform != "cpu" for d in data.devices()):
        return np.asarray(data)
    return np.array(data)  # a copy: np.asarray would share memory that a later step overwrites


def chunk_shape(shape: Sequence[int], shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The shape of chunks of at most CHUNK bytes, each inside one shard.

    The largest dimension is halved until they are that small: then little is read in vain, however the array
    is sharded when it is read. A sharded dimension is not halved when it is odd.

    >>> chunk_shape((8192, 8192), (8192, 4096), 4)
    (1024, 1024)
    """
    chunk = [max(1, size) for size in shard]
    while prod(chunk) * itemsize > CHUNK:
        halves = [d for d, size in enumerate(chunk) if size > 1 and (size % 2 == 0 or shard[d] == shape[d])]
        if not halves:
            break
        d = max(halves, key=chunk.__getitem__)
        chunk[d] = -(-chunk[d] // 2)
    return tuple(chunk)


class ShardsHandler(ocp.type_handlers.TypeHandler):
    """Writes `Shards`. Orbax reads them as NumPy arrays by default.

    Args:
      writer: the number of what writes, the same in all processes.
    """

    def __init__(self, writer: int) -> None:
        self._writer, self._saves = writer, itertools.count()

    def typestr(self) -> str:
        return "np.ndarray"

    async def serialize(
        self, values: Sequence[Shards], infos: Sequence[Any], args: Any = None
    ) -> Sequence[ocp.future.Future]:
        # Orbax merges the folders of this name into one when all processes are done.
        folder = infos[0].parent_dir / f"ocdbt.process_{jax.process_index()}"
        named = [(info.name, value) for info, value in zip(infos, values) if value.parts]
        written = _in_all(_write(kvstore(folder), named), f"written {self._writer} {next(self._saves)}")
        return [ocp.future.CommitFutureAwaitingContractedSignals(written)]

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        raise NotImplementedError("orbax reads these as arrays, with handlers of its own")

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError("orbax reads these as arrays, with handlers of its own")


async def _in_all(write: Awaitable[None], key: str) -> None:
    """Writes; if one process cannot, all raise an error: orbax would have the others wait for it."""
    failed: Exception | None = None
    try:
        await write
    except Exception as error:
        failed = error
    raise_in_all(failed, "" if failed is None else reason(failed), key)


async def _write(base: dict[str, str], named: Sequence[tuple[str, Shards]]) -> None:
    context = ts.Context()
    stores = await _all(
        [
            ts.open(
                {
                    "driver": "zarr3",
                    "kvstore": {
                        "driver": "ocdbt",
                        "base": base,
                        "path": f"{name}/",
                    },
                    # Else a chunk of zeros is not stored, and one that is lost would read as zeros.
                    "store_data_equal_to_fill_value": True,
                    "metadata": {
                        "shape": shards.shape,
                        "data_type": shards.dtype.name,
                        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shards.chunk}},
                        # A checksum for each chunk. Weights hardly compress.
                        "codecs": [
                            {"name": "bytes", "configuration": {"endian": "little"}},
                            {"name": "crc32c"},
                        ],
                    },
                },
                create=True,
                open=True,
                context=context,
            )
            for name, shards in named
        ]
    )
    writes = []
    for store, (_, shards) in zip(stores, named):
        for region, host in shards.parts:
            target = store[region] if region else store
            writes.append(target.write(host, can_reference_source_data_indefinitely=True))
    await _all(writes)


async def _all(awaitables: Sequence[Any]) -> list[Any]:
    """Their results. If one fails, the others are waited for too, so that none outlives the event loop."""
    found = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def make_writer() -> ocp.AsyncCheckpointer:
    """An orbax checkpointer: it writes a folder in the background and renames it once it is complete.

    It takes a `Composite` of STATE, a tree of `Shards`, and of JSON.
    """
    count, number = jax.process_count(), next(_numbers)
    processes = ocp.options.MultiprocessingOptions(
        # With these the processes wait for each other through the coordinator, not on their devices.
        active_processes=set(range(count)) if count > 1 else None,
        barrier_sync_key_prefix=f"mmnnx_{number}",  # or two that save at once would meet
    )
    handlers: dict[str, Any] = {
        name: ocp.JsonCheckpointHandler(f"{name}.json", multiprocessing_options=processes) for name in JSON
    }
    registry = ocp.type_handlers.create_type_handler_registry(
        (Shards, ShardsHandler(number)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # unused; without one orbax warns
    )
    handlers[STATE] = ocp.PyTreeCheckpointHandler(
        use_zarr3=True, type_handler_registry=registry, multiprocessing_options=processes
    )
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=processes), **handlers
        ),
        async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        multiprocessing_options=processes,
    )


def reason(error: Exception) -> str:
    """Why something could not be written: the system's message; tensorstore gives only its error number."""
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(number[1])) if number else getattr(error, "strerror", None) or str(error)
