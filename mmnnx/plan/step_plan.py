"""The figures of a planned step: fragments, memory, time."""

from __future__ import annotations

import dataclasses
from typing import Any

from mmnnx.mpmd.compile.compile_program import Compiled
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.timeline import Timeline
from mmnnx.plan.chips import Chip
from mmnnx.plan.fragments import FragmentCost
from mmnnx.plan.memory import DeviceMemory


@dataclasses.dataclass(frozen=True)
class Overflow:
    """A fragment that the compiler refused, as it needs more memory than its device has.

    Attributes:
      fragment: its name, as `Program.labels` has it.
      needed, limit: bytes of a device.
      largest: (bytes, what) of the largest arrays that its equations make, over all devices of its mesh.
      said: what the compiler said.
    """

    fragment: str
    needed: int
    limit: int
    largest: tuple[tuple[int, str], ...]
    said: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What a compiled step needs of its machine; `Plan` shows it.

    Attributes:
      name: of the function.
      device_kind: what JAX calls the devices.
      devices: how many they are.
      chip: their published figures; None for devices that there are none of, such as CPUs.
      fragments: what each fragment needs.
      memory: what is in the memory of each group of devices that hold the same.
      timeline: the step, played through with the times of the fragments; None without a chip.
      fastest: the same if each fragment ran at the published speeds, and nothing waited to be sent: seconds.
      notes: what could not be done as it should, and what is not counted.
      program: what was compiled.
      compiled: its executables; None where the compiler refused one.
      overflow: what does not fit, where the compiler refused it; then there is neither memory nor timeline.
    """

    name: str
    device_kind: str
    devices: int
    chip: Chip | None
    fragments: tuple[FragmentCost, ...]
    memory: tuple[DeviceMemory, ...]
    timeline: Timeline | None = dataclasses.field(repr=False)
    fastest: float | None
    notes: tuple[str, ...]
    program: Program = dataclasses.field(repr=False)
    compiled: Compiled | None = dataclasses.field(default=None, repr=False)
    overflow: Overflow | None = None

    @property
    def fits(self) -> bool | None:
        """Whether each device has the memory; None if it is not known how much there is."""
        if self.overflow is not None:
            return False
        return None if self.chip is None else all(m.total <= self.chip.memory for m in self.memory)

    @property
    def seconds(self) -> float | None:
        """The step time that is expected, from one step to the next."""
        return None if self.timeline is None else self.timeline.period

    @property
    def flops(self) -> float:
        """Operations in matrix products in a step, on all devices, recomputation among them."""
        sizes = {name: mesh.size for mesh, name in self.program.names.items()}
        return sum(f.runs * sizes[f.mesh] * sum(f.flops.values()) for f in self.fragments)

    @property
    def utilization(self) -> float | None:
        """The share of the devices' published speed that the step comes to, recomputation counted (HFU)."""
        if self.chip is None or not self.seconds:
            return None
        sizes = {name: mesh.size for mesh, name in self.program.names.items()}
        busy = sum(f.runs * sizes[f.mesh] * self.chip.seconds(f.flops) for f in self.fragments)
        return busy / (self.seconds * self.devices)

    def to_json(self) -> dict[str, Any]:
        """All but the timeline and single operations, as data for `json.dumps`; of one device."""
        chip = self.chip
        return {
            "name": self.name,
            "device_kind": self.device_kind,
            "devices": self.devices,
            "chip": None if chip is None else dataclasses.asdict(chip),
            "fits": self.fits,
            "seconds": self.seconds,
            "fastest_seconds": self.fastest,
            "bubble": None if self.timeline is None else self.timeline.bubble,
            "flops": self.flops,
            "utilization": self.utilization,
            "memory": [dataclasses.asdict(m) | {"total": m.total} for m in self.memory],
            "fragments": [
                {k: v for k, v in dataclasses.asdict(f).items() if k != "operations"}
                | {"flops": f.flops, "moved_bytes": f.moved_bytes}
                | ({} if chip is None else {"seconds": f.seconds(chip), "bound": f.bound(chip)})
                for f in self.fragments
            ],
            "notes": list(self.notes),
            "overflow": None if self.overflow is None else dataclasses.asdict(self.overflow),
        }
