"""The environment of tests and of processes that they start: virtual devices, programs that compile fast."""

from __future__ import annotations

import os
from importlib.metadata import version

FLAGS = [
    "--xla_force_host_platform_device_count=8",
    # Tests compile much and compute little: LLVM need not optimise what XLA hands it.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # Inside one program XLA may leave out roundings to bfloat16 and back. A program that is cut in two rounds
    # what crosses; with this flag the whole rounds there, too, and both are the same to the last bit.
    "--xla_allow_excess_precision=false",
]
MLIR_ALONE = not version("jaxlib").startswith("0.10.")
if not MLIR_ALONE:
    # Kernels made without MLIR compile in half the time. Later releases know no such flag, and would abort.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")


def compile_fast() -> None:
    """Sets the variables; before JAX starts."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # That XLA need not be told which line of Python an operation comes from saves a tenth of the time.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    # NumPy and SciPy start threads of their own, which spin: half a second of CPU in each process.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    given = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in FLAGS if flag not in given)])


def flags() -> str:
    """The XLA_FLAGS of the tests, but for the number of devices."""
    return " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)


def environment() -> dict[str, str]:
    """Without anything that was said to JAX or mmnnx from outside."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "MMNNX_"))}
    limit = "JAX_TRACEBACK_IN_LOCATIONS_LIMIT"
    return kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(), limit: os.environ[limit]}
