"""How many threads XLA makes on CPU, and how many several processes need."""

from __future__ import annotations

import os
import re

import jax


def ensure_xla_threads(devices: int | None = None) -> None:
    """Before JAX starts in one of several processes: has XLA make more threads than there are CPU devices.

    A program with a collective holds a thread for each of its devices while it runs. One that is started
    while a device has as many in flight as XLA allows (32) holds another for each until one of them ends. One
    thread more sends arrays to other processes while all of these wait. For one device alone it costs more
    than it brings: there `collective_order.check_threads` refuses what would wait for ever.

    Args:
      devices: the CPU devices of this process. Default: those that JAX's configuration or XLA_FLAGS ask for.
    """
    if devices is None:
        flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        configured: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
        devices = max(1, configured, int(flag[1]) if flag else 0)
    if devices > 1 and xla_threads() < needed_threads(devices):
        os.environ["NPROC"] = str(needed_threads(devices))


def needed_threads(devices: int) -> int:
    """How many a process of several needs, with so many CPU devices."""
    return 2 * devices + 1


def xla_threads() -> int:
    """How many XLA makes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(os.environ.get("NPROC") or cores)
