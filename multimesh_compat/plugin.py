"""`jax_plugins.multimesh`: how many devices there are, and what the published plugin is told beside that."""

from __future__ import annotations

import operator
import os
import warnings
from typing import Any

import jax
import jax.extend.backend

from mmnnx._compat import backends_are_initialized


def init(
    cpus: int | None = None,
    gpus: int | None = None,
    debug: Any = None,
    dump: Any = None,
    fbmem: Any = None,
    profile: Any = None,
) -> None:
    """Sets the number of devices, before JAX starts.

    The number of CPU devices takes precedence over JAX_NUM_CPU_DEVICES and over
    --xla_force_host_platform_device_count in XLA_FLAGS. Which platform JAX uses remains its own choice: where
    there is an accelerator, `jax.devices()` is the CPU devices only with JAX_PLATFORMS=cpu or `gpus=0`. With
    several processes, it is the number of each process.

    Args:
      cpus: how many CPU devices, at least 1. None (default) leaves the number as it is. There is no plugin to
        load.
      gpus: how many GPUs: the first of those that CUDA has. 0 is JAX_PLATFORMS=cpu.
      dump: a folder, in which each stage of the compiler writes what it hands on (MMNNX_DUMP); True for
        "multimesh_dump".
      debug, fbmem, profile: what only the published runtime has; where one is set, a warning says what there
        is instead.

    Raises:
      TypeError: for a number of devices that is not an integer.
      ValueError: for cpus below 1 or gpus below 0.
      RuntimeError: if JAX has started with another number of devices.

    Example:
      >>> import jax
      >>> from multimesh_compat import plugin
      >>> plugin.init(cpus=8)
      >>> len(jax.devices("cpu"))
      8
    """
    count, gpu_count = _count("cpus", cpus, 1, "CPU device"), _count("gpus", gpus, 0, "GPU")
    for name, value, instead in (
        ("debug", debug, "JAX_LOG_COMPILES=1 and dump= show what is compiled"),
        ("fbmem", fbmem, "XLA_PYTHON_CLIENT_MEM_FRACTION limits the memory that JAX takes of a GPU"),
        ("profile", profile, "f.program(...).profile(...) measures every fragment"),
    ):
        if value:
            warnings.warn(f"init({name}={value!r}) changes nothing here: {instead}", stacklevel=2)
    if dump:
        os.environ["MMNNX_DUMP"] = "multimesh_dump" if dump is True else os.fspath(dump)
    started = _started()
    if started is not None:
        _check("cpus", count, started.get("cpu", 0), "CPU device(s)")
        _check("gpus", gpu_count, started.get("cuda", 0), "GPU(s)")
        return
    if count is not None:
        jax.config.update("jax_num_cpu_devices", count)
    if gpu_count == 0:
        jax.config.update("jax_platforms", "cpu")
    elif gpu_count is not None:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(gpu_count))))


def init_test(cpus: int = 8, **options: Any) -> None:
    """`init` for tests: CPU devices alone, 8 unless told otherwise.

    Example:
      >>> init_test()
      >>> jax.default_backend()
      'cpu'
    """
    init(cpus, **({"gpus": 0} | options))


def shutdown() -> None:
    """Waits for what is still running; there is no runtime of its own to end.

    Example:
      >>> shutdown()
    """
    jax.effects_barrier()


def _count(name: str, number: Any, least: int, what: str) -> int | None:
    if number is None:
        return None
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"init({name}={number!r}): it takes an integer, or None to leave the number as it is")
    count = operator.index(number)
    if count < least:
        raise ValueError(f"init({name}={count}): there must be at least {'one' if least else 'zero'} {what}")
    return count


def _started() -> dict[str, int] | None:
    """How many devices JAX has started with, by platform; None before that."""
    if not backends_are_initialized():
        return None
    return {name: b.local_device_count() for name, b in jax.extend.backend.backends().items()}


def _check(name: str, count: int | None, started: int, what: str) -> None:
    if count is not None and started != count:
        raise RuntimeError(
            f"init({name}={count}) comes too late: JAX has started already, with {started} {what}. "
            "Call init before anything that uses a device: an array, jax.devices(), jax.random.key(...)."
        )
