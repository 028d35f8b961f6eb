"""The devices of a run, chosen before JAX starts."""

from __future__ import annotations

import contextlib

import jax
import numpy as np

from mmnnx import _compat
from mmnnx.mpmd.distributed.threads import ensure_xla_threads
from mmnnx.train.config import DEVICES, share_of_devices
from mmnnx.train.errors import UserError


def choose_devices(count: int) -> np.ndarray:
    """``count`` devices, equally many of each process, in order of processes: the first accelerators of each
    or, if there are fewer, virtual CPU devices.

    Call it before JAX looks for devices: later JAX cannot make CPU devices, which is a UserError. If the
    accelerators are too few, the CPU becomes JAX's default device; with several processes, whose devices must
    be of one kind, that is a UserError too.
    """
    _, processes = _compat.own_process()
    share = share_of_devices(count, processes)
    if processes > 1:
        ensure_xla_threads(share)
    with contextlib.suppress(RuntimeError):  # JAX has started; it may have enough devices all the same
        jax.config.update("jax_num_cpu_devices", share)
    devices = _first(share, jax.devices())
    if len(devices) < count and processes == 1:
        devices = _first(share, jax.devices("cpu"))
        jax.config.update("jax_default_device", devices[0])
    if len(devices) == count:
        return np.array(devices)
    if processes == 1:
        raise UserError(
            f"{count} devices are needed ({DEVICES}) and JAX has started with {len(devices)}; "
            "run `mmnnx train` in a process of its own"
        )
    raise UserError(
        f"{count} devices are needed ({DEVICES}), {share} in each of {processes} processes, "
        f"and they have {len(devices)} ({devices[0].platform}); JAX_PLATFORMS=cpu makes virtual ones"
    )


def _first(share: int, devices: list[jax.Device]) -> list[jax.Device]:
    """The first so many devices of each process."""
    found: dict[int, list[jax.Device]] = {}
    for device in devices:
        found.setdefault(device.process_index, []).append(device)
    return [device for process in sorted(found) for device in found[process][:share]]
