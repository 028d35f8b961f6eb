"""Arrays from one process to another: the one place that knows how.

Where the client's own `jax.device_put` reaches other processes, arrays with equal shards go by that
(`goes_by_device_put`, `put`). Else `send` and `receive` hand shards over through `jax.experimental.transfer`.
"""

from __future__ import annotations

import collections
import functools
import ipaddress
import logging
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import transfer
from jax.extend.backend import get_backend
from jax.sharding import NamedSharding

from mmnnx import _compat
from mmnnx.mpmd.distributed import progress
from mmnnx.mpmd.distributed.key_value import hear, say
from mmnnx.mpmd.distributed.processes import holders
from mmnnx.mpmd.distributed.rendezvous import split_address

_log = logging.getLogger("mmnnx")
_asked: tuple[str, int] | None = None  # (address, port); port 0 stands for any
_received: collections.Counter[int] = collections.Counter()


def listen_at(address: str) -> None:
    """Says where this process will hand arrays to others: "address" or "address:port".

    Raises:
      ValueError: if it is neither.
    """
    global _asked
    try:  # an address without a port, which in the case of IPv6 has colons
        _asked = str(ipaddress.ip_address(address.strip("[]"))), 0
    except ValueError:
        _asked = split_address(address)


@functools.lru_cache(maxsize=4096)
def goes_by_device_put(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether `jax.device_put` copies an array of one sharding to another that spans other processes.

    It must be able to on this client, and the shards equal one by one.
    """
    return (
        holders(source) != holders(target)
        and source.mesh.devices.shape == target.mesh.devices.shape
        and _compat.copies_between_processes()
    )


def put(array: jax.Array, target: NamedSharding) -> jax.Array:
    """A copy with another sharding, which `goes_by_device_put`; every process of the two sides makes it."""
    here = jax.process_index()
    givers, takers = holders(array.sharding), holders(target)
    out = jax.device_put(array, target)
    if here == min(givers):
        progress.handed.update(takers - givers)
    if here in takers - givers:
        _expect(min(givers), [out])
    return out


def send(process: int, arrays: Sequence[jax.Array]) -> None:
    """Hands arrays to a process, which receives them in the same order, at the same place in the run."""
    progress.handed[process] += 1
    _server().await_pull(progress.sign(process, progress.handed[process]), list(arrays))


def receive(process: int, types: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """The arrays that a process hands to this one, without waiting for them."""
    sign = progress.sign(jax.process_index(), _received[process] + 1)
    arrays = _connection(process).pull(sign, list(types))
    _expect(process, arrays)
    return arrays


def _expect(process: int, arrays: list[jax.Array]) -> None:
    """Lets the watch know what was asked for last: as long as it does not come, something does not."""
    _received[process] += 1
    aval, (instruction, words, _) = arrays[-1].aval, progress.at  # the words keep no array

    def what() -> str:
        return f"an array {aval.str_short()} ({words(instruction)})"

    progress.waits["array", process] = progress.Wait(process, what, _received[process], arrays[-1])


@functools.cache
def _server() -> Any:
    """What hands arrays of this process to others, and listens for those that want them."""
    if _asked is None:
        raise RuntimeError("several processes need mm.initialize() before anything uses a device")
    host, port = _asked
    host = f"[{host}]" if ":" in host else host
    # One socket takes requests, one more hands over the bytes.
    where, bytes_at = f"{host}:{port}", f"{host}:{port + 1 if port else 0}"
    server = transfer.start_transfer_server(get_backend(), where, [bytes_at])
    say("address", server.address().encode())
    _log.info("process %d hands arrays to others at %s", jax.process_index(), server.address())
    return server


@functools.cache
def _connection(process: int) -> Any:
    server = _server()  # says where it is, too: that process may wait for the address
    return server.connect(hear(process, "address").decode())
