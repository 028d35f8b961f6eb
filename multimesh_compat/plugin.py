"""`jax_plugins.multimesh`: how many devices there are."""

from __future__ import annotations

import operator

import jax
import jax.extend.backend


def init(cpus: int | None = None) -> None:
    """Sets the number of CPU devices, before JAX starts.

    It takes precedence over JAX_NUM_CPU_DEVICES and over --xla_force_host_platform_device_count in XLA_FLAGS.
    Which platform JAX uses remains its own choice: where there is an accelerator, `jax.devices()` is the CPU
    devices only with JAX_PLATFORMS=cpu. With several processes, it is the number of each process.

    Args:
      cpus: how many, at least 1. None (default) leaves the number as it is. There is no plugin to load.

    Raises:
      TypeError: for cpus that is not an integer.
      ValueError: for cpus below 1.
      RuntimeError: if JAX has started with another number of CPU devices.

    Example:
      >>> import jax
      >>> from multimesh_compat import plugin
      >>> plugin.init(cpus=8)
      >>> len(jax.devices("cpu"))
      8
    """
    if cpus is None:
        return
    if isinstance(cpus, bool) or not hasattr(cpus, "__index__"):
        raise TypeError(f"init(cpus={cpus!r}): it takes an integer, or None to leave the number as it is")
    count = operator.index(cpus)
    if count < 1:
        raise ValueError(f"init(cpus={count}): there must be at least one CPU device")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started
        backend = jax.extend.backend.backends().get("cpu")
        started = 0 if backend is None else backend.local_device_count()
        if started != count:
            raise RuntimeError(
                f"init(cpus={count}) comes too late: JAX has started already, with {started} CPU device(s). "
                "Call init before anything that uses a device: an array, jax.devices(), jax.random.key(...)."
            ) from None
