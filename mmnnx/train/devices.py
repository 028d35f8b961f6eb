"""The devices of a run, chosen before JAX starts."""

from __future__ import annotations

import contextlib

import jax
import numpy as np

from mmnnx.train.errors import UserError


def choose_devices(count: int) -> np.ndarray:
    """The first ``count`` accelerators or, where there are fewer, ``count`` virtual CPU devices.

    Must come before anything makes JAX look for devices: it cannot make CPU devices later, and a UserError
    says so. Where accelerators are passed over, the CPU becomes JAX's default device.
    """
    with contextlib.suppress(RuntimeError):  # JAX has started; it may have what we need all the same
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if len(devices) < count:
        devices = jax.devices("cpu")
        jax.config.update("jax_default_device", devices[0])
    if len(devices) < count:
        raise UserError(
            f"{count} devices are needed (--stages times --tensor) and JAX has started with {len(devices)}; "
            "run `mmnnx train` in a process of its own"
        )
    return np.array(devices[:count])
