"""What the vendors publish of accelerators: memory, arithmetic, and links. One table, with its sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

TERA, GIGA, GIBI = 1e12, 1e9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """The published figures of one device, as JAX counts devices: of TPU7x, and of TPU v4 as `mm.target`
    describes it, a core, half a chip.

    Attributes:
      name: as in a target: "v5p", "h100".
      memory: bytes that a program may use; of TPUs what their compiler allows, else the data sheet's.
      flops: floating-point operations a second in matrix products, by dtype of the operands; other dtypes as
        float32. At JAX's default precision a TPU multiplies float32 as bfloat16, a GPU as TF32.
      bandwidth: bytes a second between the device and its memory.
      link: bytes a second that the device sends over the links that a collective along one axis uses: ICI of
        a TPU (both directions of one dimension of the torus), NVLink of a GPU.
      network: bytes a second to devices of another slice or host: DCN, InfiniBand.
      latency: seconds of one hop over a link.
      source: where the figures are from.
      of_flops, of_bandwidth: what large matrix products and copies come to of these.
      shortest_operation: seconds that an operation takes at least.
      launch: seconds of the host to start an operation, beside what an instruction of a program takes.
      loop_wait: seconds in which the device waits for the host in each iteration of a loop whose end depends
        on values: the host reads whether it goes on.
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    link: float
    network: float
    latency: float
    source: str
    of_flops: float = 0.8
    of_bandwidth: float = 0.9
    shortest_operation: float = 0.0
    launch: float = 0.0
    loop_wait: float = 0.0

    def seconds(self, flops: Mapping[str, float]) -> float:
        """How long so many operations take, by dtype, at the published speed."""
        return sum(n / self._speed(dtype) for dtype, n in flops.items())

    def _speed(self, dtype: str) -> float:
        known = (dtype, dtype.split("_")[0], "bfloat16" if dtype == "float16" else "float32")
        return next(self.flops[name] for name in known if name in self.flops)


_SCALING = "jax-ml.github.io/scaling-book/tpus; memory: what libtpu 0.0.52 allows a program"
_ICI_HOP = 1e-6  # the same book
_NVLINK_HOP = 2e-6
# As benchmarks/plan_gpu.py measured it on an H200: benchmarks/results/plan_gpu.md. Of TPUs, none of which was
# at hand, the shares are those of the best programs.
_ON_GPUS = dict(of_flops=0.73, of_bandwidth=0.82, shortest_operation=3e-6, launch=5e-6, loop_wait=25e-6)

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "v4",
            int(15.25 * GIBI),
            {"bfloat16": 137.5 * TERA, "int8": 137.5 * TERA, "float32": 137.5 * TERA},
            614 * GIGA,
            90 * GIGA,
            3.1 * GIGA,
            _ICI_HOP,
            _SCALING,
        ),
        Chip(
            "v5e",
            int(15.75 * GIBI),
            {"bfloat16": 197 * TERA, "int8": 394 * TERA, "float32": 197 * TERA},
            810 * GIGA,
            90 * GIGA,
            3.1 * GIGA,
            _ICI_HOP,
            _SCALING,
        ),
        Chip(
            "v5p",
            int(95.73 * GIBI),
            {"bfloat16": 459 * TERA, "int8": 918 * TERA, "float32": 459 * TERA},
            2_765 * GIGA,
            180 * GIGA,
            6.2 * GIGA,
            _ICI_HOP,
            _SCALING,
        ),
        Chip(
            "v6e",
            int(31.24 * GIBI),
            {"bfloat16": 918 * TERA, "int8": 1836 * TERA, "float32": 918 * TERA},
            1_640 * GIGA,
            180 * GIGA,
            12.5 * GIGA,
            _ICI_HOP,
            _SCALING,
        ),
        Chip(
            "tpu7x",
            int(94.74 * GIBI),
            {"bfloat16": 1153.5 * TERA, "float8": 2307 * TERA, "float32": 1153.5 * TERA},
            3_690 * GIGA,
            200 * GIGA,
            12.5 * GIGA,
            _ICI_HOP,
            "cloud.google.com/tpu/docs/tpu7x; memory: what libtpu 0.0.52 allows a program",
        ),
        Chip(
            "a100-40",
            40 * 10**9,
            {"bfloat16": 312 * TERA, "int8": 624 * TERA, "float32": 156 * TERA},
            1_555 * GIGA,
            300 * GIGA,
            25 * GIGA,
            _NVLINK_HOP,
            "NVIDIA A100 data sheet (SXM, dense); DGX A100: 200 Gb/s a GPU",
            **_ON_GPUS,
        ),
        Chip(
            "a100-80",
            80 * 10**9,
            {"bfloat16": 312 * TERA, "int8": 624 * TERA, "float32": 156 * TERA},
            2_039 * GIGA,
            300 * GIGA,
            25 * GIGA,
            _NVLINK_HOP,
            "NVIDIA A100 data sheet (SXM, dense); DGX A100: 200 Gb/s a GPU",
            **_ON_GPUS,
        ),
        Chip(
            "h100",
            80 * 10**9,
            {"bfloat16": 989.4 * TERA, "float8": 1979 * TERA, "int8": 1979 * TERA, "float32": 494.7 * TERA},
            3_352 * GIGA,
            450 * GIGA,
            50 * GIGA,
            _NVLINK_HOP,
            "NVIDIA H100 data sheet (SXM, dense); DGX H100: 400 Gb/s a GPU",
            **_ON_GPUS,
        ),
        Chip(
            "h200",
            141 * 10**9,
            {"bfloat16": 989.4 * TERA, "float8": 1979 * TERA, "int8": 1979 * TERA, "float32": 494.7 * TERA},
            4_800 * GIGA,
            450 * GIGA,
            50 * GIGA,
            _NVLINK_HOP,
            "NVIDIA H200 data sheet (SXM, dense); DGX H200: 400 Gb/s a GPU",
            **_ON_GPUS,
        ),
        Chip(
            "b200",
            180 * 10**9,
            {"bfloat16": 2250 * TERA, "float8": 4500 * TERA, "int8": 4500 * TERA, "float32": 1125 * TERA},
            8_000 * GIGA,
            900 * GIGA,
            50 * GIGA,
            _NVLINK_HOP,
            "NVIDIA HGX B200 data sheet (dense); 400 Gb/s a GPU",
            **_ON_GPUS,
        ),
    )
}

# On a real TPU v4 the two cores of a chip are one device by default ("megacore"), whose `device_kind` is that
# of a core alone.
_V4_CHIP = dataclasses.replace(
    CHIPS["v4"],
    memory=int(30.75 * GIBI),
    flops={dtype: 2 * flops for dtype, flops in CHIPS["v4"].flops.items()},
    bandwidth=2 * CHIPS["v4"].bandwidth,
)

# What the devices of these say that they are.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}


def chip_of(device: jax.Device) -> Chip | None:
    """The figures of a device; None if there are none, as of a CPU."""
    chip = CHIPS.get(_KINDS.get(device.device_kind, ""))
    return _V4_CHIP if chip is CHIPS["v4"] and device.num_cores == 2 else chip
