"""Devices that are only described: `mm.target` names a machine that need not be here."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from mmnnx.plan.chips import CHIPS, GIBI, Chip

TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")

# What XLA's compiler asks of a GPU beside the figures in `CHIPS`: facts of its data sheet and of CUDA's
# guide (compute capability; multiprocessors; shared memory of one, and what a block may have; clock in GHz;
# second-level cache in bytes; float32 units of a multiprocessor).
_GPU_FACTS: dict[str, tuple[int, int, int, int, float, int, int, str]] = {
    "a100-40": (8, 108, 167_936, 166_912, 1.41, 41_943_040, 64, "NVIDIA A100-SXM4-40GB"),
    "a100-80": (8, 108, 167_936, 166_912, 1.41, 41_943_040, 64, "NVIDIA A100-SXM4-80GB"),
    "h100": (9, 132, 233_472, 232_448, 1.98, 52_428_800, 128, "NVIDIA H100 80GB HBM3"),
    "h200": (9, 132, 233_472, 232_448, 1.98, 52_428_800, 128, "NVIDIA H200"),
    "b200": (10, 148, 233_472, 232_448, 1.965, 132_644_864, 128, "NVIDIA B200"),
}

# What libtpu asks of its surroundings on a host with TPUs; elsewhere any answer does. Several processes may
# compile at once there.
_WITHOUT_TPUS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def target(name: str) -> list[jax.Device]:
    """The devices of a machine that need not be here: to compile for, and to plan with `mm.plan`.

    Nothing can run on them. TPUs are described by the compiler in libtpu, GPUs by JAX's CUDA plugin; neither
    needs an accelerator or a driver.

    Args:
      name: a chip and a topology: "v5e:2x4", "v5p:4x4x8" (sizes of the torus in chips; each of v4 and tpu7x
        has two devices), or "h100:4x8" (hosts x GPUs of each).

    Returns:
      The devices, in the order that a `MultiMesh` takes: neighbours in the torus, or of one host, follow each
      other.

    Raises:
      TypeError: if the name is no string.
      ValueError: for a name that is none, or a topology that the compiler does not know.
      ImportError: where the compiler is not installed; says how to install it.
      RuntimeError: where it does not start.

    Example:
      >>> devices = mm.target("v5p:4x4x8")
      >>> mesh = mm.MultiMesh(devices=devices, axis_sizes=(16, 8), axis_names=("stage", "model"))
    """
    if not isinstance(name, str):
        raise TypeError(f'mm.target takes a name such as "v5e:2x4", not {name!r}')
    chip, _, topology = name.partition(":")
    if chip not in CHIPS:
        raise ValueError(f"there is no target {name!r}: the chips are {', '.join(map(repr, CHIPS))}")
    sizes = [int(n) for n in topology.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", topology) else []
    if chip in TPUS:
        dimensions = 2 if chip in ("v5e", "v6e") else 3
        if len(sizes) != dimensions:
            example = f"{chip}:{'x'.join('4' * dimensions)}"
            raise ValueError(
                f"target {name!r}: the topology of {chip} is {dimensions} numbers, as in {example!r}"
            )
        return _tpus(name)
    if len(sizes) != 2:
        raise ValueError(f"target {name!r}: a GPU has hosts x GPUs of each, as in '{chip}:4x8'")
    return _gpus(CHIPS[chip], *sizes)


def _tpus(name: str) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(f"target {name!r} needs the TPU compiler: pip install 'mmnnx[tpu]'")
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/*"):
        for variable, value in _WITHOUT_TPUS.items():
            os.environ.setdefault(variable, value)
    return _described(name, name, "tpu")


def _gpus(chip: Chip, hosts: int, each: int) -> list[jax.Device]:
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        raise ImportError(
            f"target '{chip.name}' needs the GPU compiler: pip install 'mmnnx[cuda12]' (or cuda13)"
        )
    if not glob.glob("/dev/nvidia*"):  # or JAX's plugin would not start
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    name, topology = f"{chip.name}:{hosts}x{each}", f"1x{hosts}x{each}"
    return _described(name, chip.name, "cuda", topology=topology, target_config=gpu_description(chip))


def _described(name: str, what: str, platform: str, **options: Any) -> list[jax.Device]:
    from jax.experimental import topologies

    try:
        found: Sequence[jax.Device] = topologies.get_topology_desc(what, platform, **options).devices
    except NotImplementedError as error:
        raise RuntimeError(
            f"target {name!r}: JAX has looked for a GPU and found none, so the compiler does not start: call "
            "mm.target before anything runs, or set JAX_PLATFORMS=cpu"
        ) from error
    except Exception as error:  # the compilers raise what they like
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "INVALID_ARGUMENT" in said:
            raise ValueError(f"target {name!r}: the compiler knows no such topology ({said})") from error
        raise RuntimeError(f"target {name!r}: the compiler does not start ({said})") from error
    return list(found)


def gpu_description(chip: Chip) -> str:
    """A GPU in the words of XLA: its GpuTargetConfigProto as text."""
    major, cores, shared, block, clock, cache, units, kind = _GPU_FACTS[chip.name]
    memory = int(chip.memory / 10**9 * GIBI * 0.99)  # what CUDA shows of so many GB
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
        shared_memory_per_core: {shared} threads_per_core_limit: 2048 core_count: {cores}
        fpus_per_core: {units} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
        block_dim_limit_z: 65535 memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: {cache}
        clock_rate_ghz: {clock} device_memory_size: {memory}
        shared_memory_per_block_optin: {block} cuda_compute_capability {{ major: {major} }}
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
      }}
      platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
      device_description_str: "{kind}"
    """
