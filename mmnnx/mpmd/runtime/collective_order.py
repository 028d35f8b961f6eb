"""The order of CPU collectives: programs that several processes run together run alone in each of them.

Gloo, which carries collectives on CPU, pairs what two processes send by its order alone, and XLA starts
whatever has its inputs: two such programs at one time would be given each other's data. Each also holds a
thread for every device while it waits for the others, and XLA has as many threads as there are cores: what
another process waits for must not be left without one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.sharding import Mesh, Sharding

from mmnnx.mpmd.distributed.processes import holders, is_here, span_processes
from mmnnx.mpmd.distributed.threads import needed_threads, xla_threads
from mmnnx.mpmd.ir.instructions import Transfer
from mmnnx.mpmd.ir.program import Program

Run = TypeVar("Run", bound=Callable[..., Sequence[Any]])

_started: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()
"""A result of each program that may be running; all of its results come at once."""

_numbers = itertools.count()


def in_collective_order(call: Run, where: Mesh | Sharding) -> Run:
    """A call that keeps the order: on CPU, a program of several processes waits for what was started before.

    What that needs of other processes has been started there: in all of them the order is the same.
    """
    devices = where.devices.flat if isinstance(where, Mesh) else cast(Any, where.device_set)
    if jax.process_count() == 1 or next(iter(devices)).platform != "cpu":
        return call
    shared = len(holders(where)) > 1

    def run(*arrays: Any) -> Sequence[Any]:
        if shared:
            for x in list(_started.values()):
                if not x.is_deleted():  # else what took over its buffer was started later
                    x.block_until_ready()
            _started.clear()
        made = call(*arrays)
        if here := [x for x in made if isinstance(x, jax.Array) and x.addressable_shards]:
            _started[next(_numbers)] = here[0]
        return made

    return cast(Run, run)


def check_threads(program: Program) -> None:
    """Raises ValueError for a program that would wait for ever, as no thread is left to send with."""
    devices = jax.local_device_count()
    if devices < xla_threads() or jax.default_backend() != "cpu":
        return
    transfers = (i for i in program.instructions if isinstance(i, Transfer))
    sends = any(span_processes(i.source_mesh, i.target_mesh) for i in transfers)
    if sends and any(len(holders(c.mesh)) > 1 and is_here(c.mesh) for c in program.calls):
        raise ValueError(
            f"XLA has {xla_threads()} threads in this process, and it has {devices} CPU devices. Where "
            "all of these wait for another process, as on a mesh that spans processes, none is left to send "
            f"an array with: set the environment variable NPROC={needed_threads(devices)} before JAX starts"
        )
