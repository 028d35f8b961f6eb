"""How the arrays of a program go from one process to another. (`mm.fetch` goes through the coordinator.)

Where the client's own `jax.device_put` reaches other processes, arrays with equal shards go by that
(`goes_by_device_put`, `device_put`). Else `send` and `receive` carry shards by `jax.experimental.transfer`.
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
from mmnnx.mpmd.distributed import key_value, progress, waits
from mmnnx.mpmd.distributed.processes import holders
from mmnnx.mpmd.distributed.rendezvous import split_address

log = logging.getLogger(__name__)
_listen_address: tuple[str, int] | None = None  # (address, port); port 0 stands for any

sent: collections.Counter[int] = collections.Counter()
"""How many arrays, or lists of arrays, this process has sent to each other process."""

_received: collections.Counter[int] = collections.Counter()


def listen_at(address: str) -> None:
    """Sets where others get arrays from this process: "address" or "address:port".

    Raises:
      ValueError: if it is neither.
    """
    global _listen_address
    try:  # an address without a port, which in the case of IPv6 has colons
        _listen_address = str(ipaddress.ip_address(address.strip("[]"))), 0
    except ValueError:
        _listen_address = split_address(address)


@functools.lru_cache(maxsize=4096)
def goes_by_device_put(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether `jax.device_put` carries an array of one sharding to another, of other processes.

    The client must be able to do that, and both meshes must have the same shape, so that the shards are equal
    one by one.
    """
    return (
        holders(source) != holders(target)
        and source.mesh.devices.shape == target.mesh.devices.shape
        and _compat.copies_between_processes()
    )


def device_put(array: jax.Array, target: NamedSharding) -> jax.Array:
    """A copy with another sharding, which `goes_by_device_put`; every process of the two sides makes it."""
    here = jax.process_index()
    senders, receivers = holders(array.sharding), holders(target)
    out = jax.device_put(array, target)
    if here == min(senders):
        sent.update(receivers - senders)
    if here in receivers - senders:
        _expect(min(senders), [out])
    return out


def send(process: int, arrays: Sequence[jax.Array]) -> None:
    """Sends arrays to a process, which receives them in the same order, at the same place in the run."""
    sent[process] += 1
    _server().await_pull(_ticket(process, sent[process]), list(arrays))


def receive(process: int, types: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """The arrays that a process sends to this one, without waiting for them."""
    ticket = _ticket(jax.process_index(), _received[process] + 1)
    arrays = _connection(process).pull(ticket, list(types))
    _expect(process, arrays)
    return arrays


def _ticket(process: int, count: int) -> int:
    """The number by which a process asks another for arrays, the `count`-th that it gets from there.

    In both processes it is the same if they run the same step of the same call: what another call sends is
    not taken for it, but waited for in vain.
    """
    return hash((process, count, progress.current.step, progress.current.call)) & (2**63 - 1)


def _expect(process: int, arrays: list[jax.Array]) -> None:
    """Lets the watchdog know what was asked for: as long as it does not come, something does not."""
    _received[process] += 1
    aval, step, describe = arrays[-1].aval, progress.current.step, progress.current.describe

    def what() -> str:  # keeps no array
        return f"an array {aval.str_short()} ({describe(step)})"

    waits.expect(progress.current.call, waits.Wait(process, what, _received[process], arrays[-1]))


@functools.cache
def _server() -> Any:
    """What sends arrays of this process to others, and listens for those that ask for them."""
    if _listen_address is None:
        raise RuntimeError("several processes need mm.initialize() before anything uses a device")
    host, port = _listen_address
    host = f"[{host}]" if ":" in host else host
    # One socket takes requests, one more sends the bytes.
    where, bytes_at = f"{host}:{port}", f"{host}:{port + 1 if port else 0}"
    server = transfer.start_transfer_server(get_backend(), where, [bytes_at])
    key_value.put("address", server.address().encode())
    log.info("process %d sends arrays to others from %s", jax.process_index(), server.address())
    return server


@functools.cache
def _connection(process: int) -> Any:
    server = _server()  # says where it is, too: that process may wait for the address
    return server.connect(key_value.get(process, "address").decode())
