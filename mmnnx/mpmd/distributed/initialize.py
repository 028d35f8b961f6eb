"""`mm.initialize`: this process becomes one of several."""

from __future__ import annotations

import atexit
import ipaddress
import numbers
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

from mmnnx import _compat
from mmnnx.mpmd.distributed import transport
from mmnnx.mpmd.distributed.rendezvous import host, join, split_address
from mmnnx.mpmd.distributed.threads import ensure_xla_threads
from mmnnx.mpmd.distributed.watchdog import Watchdog

_DAY = 24 * 3600  # JAX's own heartbeats would end processes without a word of which failed


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    cluster_detection_method: str | None = None,
    coordinator_bind_address: str | None = None,
    transfer_address: str | None = None,
    initialization_timeout: float = 300.0,
    failure_timeout: float = 20.0,
    timeout: float = 300.0,
    **options: Any,
) -> None:
    """Makes this process one of several that run programs together, with `jax.distributed` as the engine.

    Call it before anything that uses a device. The same script runs in one process without it, or with
    `num_processes=1`. What is not given comes from the environment variables JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, and what is not there from JAX's detectors (Slurm, Open MPI,
    Kubernetes, Cloud TPU, ...).

    When a process fails, all end with status 1 and a message that says which, how, and at which instruction:
    at once when it dies or raises, after `failure_timeout` when it is stopped or its host is gone, after
    `timeout` when it does not send what another waits for. SIGTERM ends a process as it would end any other:
    JAX's preemption service, which would swallow it, is off (`mmnnx.train.signals.Stop` stops all).

    Args:
      coordinator_address: "host:port" of process 0.
      num_processes, process_id: how many there are, and which this is, from 0.
      local_device_ids, cluster_detection_method: as in `jax.distributed.initialize`.
      coordinator_bind_address: "host:port" at which process 0 listens. Default: the coordinator's port, on
        loopback where its address is a loopback one, else on every address of the machine.
      transfer_address: the IP address from which this process sends arrays to the others, or "address:port"
        for a port of your choice. Default: the address from which the coordinator is reached, which is
        loopback where that is on this machine.
      initialization_timeout: seconds to wait for all processes to come.
      failure_timeout: seconds of silence, 2 or more, after which a process counts as failed.
      timeout: seconds to wait for an array, or for anything else from another process, while no array comes
        to any.
      **options: more of `jax.distributed.initialize`, such as `partition_index`.

    Raises:
      ValueError: if something is missing or out of range, or processes were started with different counts
        or with the same number.
      TimeoutError: if not all processes came; it names those that did not.
      RuntimeError: if JAX has started already, or this was called before.

    Example:
      >>> import os
      >>> if "RANK" in os.environ:  # of four processes, in each
      ...     mm.initialize("10.0.0.1:1234", num_processes=4, process_id=int(os.environ["RANK"]))
    """
    if jax.distributed.is_initialized():
        raise RuntimeError("mm.initialize was called before: call it once")
    for name, seconds in (
        ("initialization_timeout", initialization_timeout),
        ("failure_timeout", failure_timeout),
        ("timeout", timeout),
    ):
        if not isinstance(seconds, numbers.Real) or not 0 < float(seconds) < _DAY:
            raise ValueError(f"{name}={seconds!r}: it is a number of seconds, above 0 and less than a day")
    if failure_timeout < 2:
        raise ValueError(f"failure_timeout={failure_timeout:g}: a process that works may be silent for 2 s")
    for name, value in (("num_processes", num_processes), ("process_id", process_id)):
        if value is not None and not hasattr(value, "__index__"):
            raise ValueError(f"{name}={value!r}: it must be a number")
    given = _from_environment(coordinator_address, num_processes, process_id)
    if given[1] == 1 and given[0] is None:
        if given[2]:
            raise ValueError(f"process_id={given[2]} with num_processes=1: it is 0")
        return
    coordinator, count, number, local_device_ids = _compat.detect_cluster(
        *given, local_device_ids, cluster_detection_method, int(initialization_timeout)
    )
    coordinator, count, number = _checked(coordinator, count, number)
    bind = (
        coordinator_bind_address
        or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
        or _bind_address(coordinator)
    )
    split_address(bind)
    if _compat.backends_are_initialized():
        raise RuntimeError(
            "mm.initialize comes too late: JAX has started. Call it before anything that uses a device, such "
            "as jax.devices(), jax.numpy or jax.random.key"
        )
    ensure_xla_threads()
    if transfer_address is not None:
        transport.listen_at(transfer_address)
    watchdog = Watchdog(number, failure_timeout, timeout)
    watchdog.start(
        host(bind, count, initialization_timeout)
        if number == 0
        else join(coordinator, number, count, initialization_timeout)
    )
    if transfer_address is None:
        transport.listen_at(watchdog.members[number].address)
    sys.excepthook = watchdog.except_hook(sys.excepthook)
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        count,
        number,
        local_device_ids=local_device_ids,
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind,
        initialization_timeout=max(1, int(initialization_timeout)),
        **{"heartbeat_timeout_seconds": _DAY, "shutdown_timeout_seconds": _DAY} | options,
    )
    atexit.register(watchdog.leave)


def _from_environment(
    coordinator: str | None, count: int | None, number: int | None
) -> tuple[str | None, int | None, int | None]:
    """The arguments, completed from the environment."""

    def read(name: str) -> int | None:
        value = os.environ.get(name)
        try:
            return int(value) if value else None
        except ValueError:
            raise ValueError(f"the environment variable {name} is {value!r}: it must be a number") from None

    return (
        coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or None,
        read("JAX_NUM_PROCESSES") if count is None else count,
        read("JAX_PROCESS_ID") if number is None else number,
    )


def _checked(coordinator: str | None, count: int | None, number: int | None) -> tuple[str, int, int]:
    names = {
        "coordinator_address (JAX_COORDINATOR_ADDRESS)": coordinator,
        "num_processes (JAX_NUM_PROCESSES)": count,
        "process_id (JAX_PROCESS_ID)": number,
    }
    missing = [name for name, value in names.items() if value is None]
    if coordinator is None or count is None or number is None:
        raise ValueError(
            f"mm.initialize does not know {', '.join(missing)}: give the argument or set the environment "
            "variable. JAX found no cluster (Slurm, Open MPI, Kubernetes, ...) that would say it. A script "
            "that runs in one process needs no mm.initialize, or num_processes=1"
        )
    if count < 1 or not 0 <= number < count:
        raise ValueError(
            f"process_id={number} with num_processes={count}: ids go from 0 to num_processes - 1"
        )
    split_address(coordinator)
    return coordinator, count, number


def _bind_address(coordinator: str) -> str:
    """Where process 0 listens: on loopback if that is where the others look for it, else at all addresses.

    A host's own name does not say which: it often stands for loopback on that host alone.
    """
    where, port = split_address(coordinator)
    if where == "localhost":
        where = "127.0.0.1"
    try:
        loopback = ipaddress.ip_address(where).is_loopback
    except ValueError:
        loopback = False
    return f"{where if '.' in where else f'[{where}]'}:{port}" if loopback else f"[::]:{port}"
