"""The processes that run a program together: what each has, and what they tell each other.

Every process runs the same Python and builds the same program; each runs the instructions that touch its own
devices. `jax.distributed` is the engine. Small things (addresses, shardings, digests of programs) go through
its key-value store, arrays from process to process through `jax.experimental.transfer`.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding

from mmnnx import _compat

_settings: dict[str, Any] = {"transfer": None, "timeout": 300.0}


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    transfer_address: str | None = None,
    timeout: float = 300.0,
    **options: Any,
) -> None:
    """Makes this process one of several that run programs together (`jax.distributed.initialize`).

    Call it before anything that uses a device. The same script runs in one process without it.

    Args:
      coordinator_address: "host:port" of process 0. Default: found by JAX (Slurm, Open MPI, Kubernetes, ...).
      num_processes, process_id: how many there are, and which this is. Default: found by JAX.
      transfer_address: the IP address at which this process hands arrays to the others. Default: the one that
        reaches the coordinator, which is loopback where that is on this machine.
      timeout: seconds to wait for what another process has to say.
      **options: more of `jax.distributed.initialize`, such as `local_device_ids`.

    Raises:
      RuntimeError: if JAX has started already, or another process did not come.

    Example:
      >>> mm.initialize("10.0.0.1:1234", num_processes=4, process_id=int(os.environ["RANK"]))
    """
    _settings.update(transfer=transfer_address, timeout=timeout)
    jax.distributed.initialize(coordinator_address, num_processes, process_id, **options)


@functools.lru_cache(maxsize=4096)
def is_here(mesh: Mesh) -> bool:
    """Whether this process has devices of a mesh."""
    here = jax.process_index()
    return any(d.process_index == here for d in mesh.devices.flat)


def are_apart(a: Mesh, b: Mesh) -> bool:
    """Whether two meshes are of more than one process between them."""
    return len({d.process_index for mesh in (a, b) for d in mesh.devices.flat}) > 1


def elsewhere(shape: Sequence[int], dtype: Any, sharding: Sharding) -> jax.Array:
    """An array of which this process has no part."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


class Peers:
    """This process among the others: what it says and reads, and its way to send and receive arrays."""

    def __init__(self) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()
        self.store = _compat.key_value_store()
        self.timeout = int(1000 * _settings["timeout"])
        address = _settings["transfer"] or _own_address(_compat.coordinator_address())
        self.server = _compat.start_transfer_server(address)
        self.say("address", self.server.address().encode())
        self.sent: collections.Counter[int] = collections.Counter()  # arrays handed to each process
        self.received: collections.Counter[int] = collections.Counter()
        self.programs = self.gathered = 0

    def say(self, key: str, value: bytes) -> None:
        """Tells all processes something, once."""
        self.store.key_value_set_bytes(f"mmnnx/{self.index}/{key}", value)

    def hear(self, process: int, key: str) -> bytes:
        """What a process says.

        Raises:
          RuntimeError: if it does not say it in time.
        """
        try:
            return self.store.blocking_key_value_get_bytes(f"mmnnx/{process}/{key}", self.timeout)
        except Exception as error:
            raise RuntimeError(
                f"process {self.index} waited {self.timeout / 1000:.0f} s in vain for process {process} to "
                f"say its {key!r}: is it still running, and the same program?"
            ) from error

    @functools.cache  # noqa: B019  # as long-lived as the process
    def _connection(self, process: int) -> Any:
        return self.server.connect(self.hear(process, "address").decode())

    def send(self, process: int, arrays: Sequence[jax.Array]) -> None:
        """Hands arrays on one device each to a process, which receives them in the same order."""
        self.sent[process] += 1
        self.server.await_pull(self.sent[process] * self.count + process, list(arrays))

    def receive(self, process: int, types: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """The arrays that a process hands to this one, without waiting for them."""
        self.received[process] += 1
        number = self.received[process] * self.count + self.index
        return self._connection(process).pull(number, list(types))

    def gather(self, x: jax.Array) -> np.ndarray:
        """The value of an array of which each process has some part or none; all call it, in one order."""
        self.gathered += 1
        mine = {s.device: s.data for s in x.addressable_shards}
        indices: dict[Any, Any] = dict(x.sharding.devices_indices_map(x.shape))
        parts = {str(index): (index, d) for d, index in indices.items()}
        for n, (_, device) in enumerate(parts.values()):
            if device in mine:
                self.say(f"part {n} of array {self.gathered}", np.asarray(mine[device]).tobytes())
        whole = np.empty(x.shape, x.dtype)
        for n, (index, device) in enumerate(parts.values()):
            if device in mine:
                whole[index] = mine[device]
            else:
                raw = self.hear(device.process_index, f"part {n} of array {self.gathered}")
                whole[index] = np.frombuffer(raw, x.dtype).reshape(whole[index].shape)
        return whole

    def agree(self, program: str) -> int:
        """Checks that all processes have built the same program; returns its number.

        Raises:
          ValueError: if they have not, with the first line that differs.
        """
        self.programs += 1
        number = self.programs
        self.say(f"program {number}", hashlib.sha256(program.encode()).digest())
        others = {p: self.hear(p, f"program {number}") for p in range(self.count)}
        if len(set(others.values())) == 1:
            return number
        self.say(f"text {number}", program.encode())
        lines = {p: self.hear(p, f"text {number}").decode().splitlines() for p in others}
        self.say(f"read {number}", b"")
        if self.index == 0:  # the store ends with process 0
            for p in others:
                self.hear(p, f"read {number}")
        other = next(p for p in others if others[p] != others[0])
        first, second = lines[0], lines[other]
        common = min(len(first), len(second))
        at = next((n for n in range(common) if first[n] != second[n]), common)
        shown = [text[at] if at < len(text) else "nothing" for text in (first, second)]
        raise ValueError(
            f"processes 0 and {other} have built different programs. They differ in line {at + 1}:\n"
            f"  process 0: {shown[0]}\n  process {other}: {shown[1]}\n"
            "Every process must run the same script with the same configuration and shapes"
        )


def tell_specs(program: int, fragment: int, mesh: Mesh, specs: Sequence[PartitionSpec]) -> None:
    """Tells the processes that are not on `mesh` how a fragment's results are sharded there."""
    holders = {d.process_index for d in mesh.devices.flat}
    if mesh.size > 1 and len(holders) < jax.process_count() and min(holders) == jax.process_index():
        peers().say(f"specs {program} {fragment}", json.dumps([list(spec) for spec in specs]).encode())


def hear_specs(program: int, fragment: int, mesh: Mesh, count: int) -> list[PartitionSpec]:
    """How the results of a fragment are sharded on a mesh of which this process has no device."""
    if mesh.size == 1:
        return [PartitionSpec()] * count
    holder = min(d.process_index for d in mesh.devices.flat)
    specs = json.loads(peers().hear(holder, f"specs {program} {fragment}"))
    return [PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in spec)) for spec in specs]


def agree(describe: Callable[[], str]) -> int:
    """Checks that all processes have built the same program; returns the number by which they know it.

    Raises:
      ValueError: as `Peers.agree` does.
    """
    return peers().agree(describe()) if jax.process_count() > 1 else 0


@functools.cache
def peers() -> Peers:
    """This process among the others; made at first use."""
    return Peers()


def _own_address(coordinator: str | None) -> str:
    """The IP address of this machine from which the coordinator can be reached."""
    host = (coordinator or "localhost").rpartition(":")[0].strip("[]") or "localhost"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((host, 9))
        return probe.getsockname()[0]


def fetch(tree: Any) -> Any:
    """The values of arrays on every process that runs the program, wherever the arrays live.

    It waits for them. Meant for losses and metrics: what is elsewhere comes through the coordinator.

    Args:
      tree: a pytree of arrays; in several processes each must call it, with the same.

    Returns:
      The same tree with NumPy arrays.

    Example:
      >>> loss = mm.fetch(train_step(model, optimizer, batch))
    """
    return jax.tree.map(_fetch, tree)


def _fetch(x: Any) -> Any:
    if not isinstance(x, jax.Array) or jax.process_count() == 1:
        return np.asarray(x)
    holders = {d.process_index for d in cast(Any, x.sharding.device_set)}
    if x.is_fully_replicated and len(holders) == jax.process_count():
        return np.asarray(x.addressable_data(0))
    return peers().gather(x)
