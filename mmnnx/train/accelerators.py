"""The accelerators of this machine, divided among processes by a parent process that must not hold them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys

from mmnnx.train.config import DEVICES
from mmnnx.train.errors import UserError


def share_accelerators(devices: int, processes: int) -> list[dict[str, str]]:
    """For each process, environment variables that give it its share of ``devices``: of this machine's GPUs
    or, if there are fewer, of virtual CPU devices.

    Raises UserError for accelerators that JAX cannot divide by a variable.

    Example:
      >>> share_accelerators(8, 4)[3]  # {'JAX_LOCAL_DEVICE_IDS': '6,7'} on a machine with eight GPUs
      {'JAX_PLATFORMS': 'cpu'}
    """
    platform, count = _accelerators()
    if count < devices:
        if count:
            logging.getLogger("mmnnx").warning(on_virtual_devices(devices, count, platform))
        return [{"JAX_PLATFORMS": "cpu"}] * processes
    if platform not in ("gpu", "cuda", "rocm"):
        raise UserError(
            f"--processes divides GPUs or CPU devices, and this machine has {count} of {platform}: use one "
            "process, or JAX_PLATFORMS=cpu"
        )
    share = devices // processes
    numbers = [range(n * share, (n + 1) * share) for n in range(processes)]
    return [{"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, own))} for own in numbers]


def on_virtual_devices(used: int, accelerators: int, kind: str) -> str:
    """What to say of a run on virtual CPU devices where there are accelerators, but too few."""
    return (
        f"this run is on virtual CPU devices: it needs {used} devices ({DEVICES}), and JAX finds "
        f"{accelerators} {kind}. To run there, choose fewer: --stages 1 --tensor 1 needs one device"
    )


def _accelerators() -> tuple[str, int]:
    """Their kind and number, which JAX looks up in another process, so that this one does not hold them."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    installed = plugins or any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not installed:
        return "cpu", 0
    ask = "import jax; devices = jax.devices(); print(devices[0].platform, len(devices))"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    platform, count = answer.stdout.split()[-2:] if answer.returncode == 0 else ("cpu", "0")
    return platform, 0 if platform == "cpu" else int(count)
