"""How many threads XLA makes on CPU, and how many several processes need."""

from __future__ import annotations

import os
import re

import jax


def ensure_xla_threads(devices: int | None = None) -> None:
    """Before JAX starts in one of several processes: has XLA make more threads than there are CPU devices.

    While all devices wait for other processes, one thread is left to send arrays with. For one device alone
    it costs more than it brings: there `collective_order.check_threads` refuses what would wait for ever.

    Args:
      devices: the CPU devices of this process. Default: those that JAX's configuration or XLA_FLAGS ask for.
    """
    if devices is None:
        flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        configured: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
        devices = max(1, configured, int(flag[1]) if flag else 0)
    if 1 < devices >= xla_threads():
        os.environ["NPROC"] = str(devices + 1)


def xla_threads() -> int:
    """How many XLA makes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(os.environ.get("NPROC") or cores)
