"""On CPU, programs that several processes run together run alone in each of them.

Gloo, which carries their collectives there, pairs what two processes send by its order alone, and XLA starts
whatever has its inputs: two such programs at one time would be given each other's data. Each holds a thread
for every device while it waits for the others, too, and XLA has as many threads as there are cores: what
another process waits for must not be left without one.
"""

from __future__ import annotations

import itertools
import os
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.sharding import Mesh, Sharding

from mmnnx.mpmd.processes import holders

Run = TypeVar("Run", bound=Callable[..., Sequence[Any]])

_started: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()
"""A result of each program that may be running; all of its results come at once."""

_numbers = itertools.count()


def taking_turns(call: Run, where: Mesh | Sharding) -> Run:
    """A program as it is to be called: on CPU, one of several processes waits for what was started before.

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


def have_threads(devices: int | None = None) -> None:
    """Before JAX starts in one of several processes: more threads than CPU devices, to send arrays with while
    all of these wait for others. XLA has as many as NPROC says, else as there are cores.

    Args:
      devices: the CPU devices of this process. Default: those that JAX's configuration or XLA_FLAGS ask for.
    """
    if devices is None:
        flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        asked: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
        devices = max(1, asked, int(flag[1]) if flag else 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if devices >= int(os.environ.get("NPROC") or cores):
        os.environ["NPROC"] = str(devices + 1)
