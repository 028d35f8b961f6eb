"""A submesh as `mm.show_placement` shows it: its devices, and the parts of models on them."""

from __future__ import annotations

from dataclasses import dataclass

from mmnnx.inspect.units import bytes_text, ranges_text

PARTS = 5
"""Parts of a submesh that are listed."""


@dataclass(frozen=True)
class Part:
    """What a submesh holds of one top-level part of a model, such as ``blocks.0-1``.

    Attributes:
      name: of the part, after that of the model if there are several.
      bytes: on each device; if they differ, the peak.
      group: the name without the indices, the same on all submeshes; "" for several parts together.
      kind: "weights" or "optimizer state", or what a step adds, as `mmnnx.plan` has them.
    """

    name: str
    bytes: int
    group: str
    kind: str = "weights"


@dataclass(frozen=True)
class Submesh:
    """A box of the picture.

    Attributes:
      name: of its tasks, or of its slice of the MultiMesh; "free" for devices that hold nothing.
      axes: its axes that are longer than one, with their sizes.
      devices: numbers as `TaskMesh` counts them.
      parts: what is on these devices, also of larger submeshes; groups have one order on all submeshes.
      bytes: of `parts` on each device, by its number.
      step: what a step adds on the fullest device at its worst moment, if that is known.
    """

    name: str
    axes: str
    devices: tuple[int, ...]
    parts: tuple[Part, ...]
    bytes: dict[int, int]
    step: tuple[Part, ...] = ()

    @property
    def most(self) -> int:
        """The bytes of state on the fullest device."""
        return max(self.bytes.values(), default=0)

    @property
    def peak(self) -> int:
        """The peak of bytes per device: the state, and what a step adds."""
        return self.most + sum(part.bytes for part in self.step)

    @property
    def device_text(self) -> str:
        """The numbers of its devices: "devices 0-7"."""
        return f"device{'s' * (len(self.devices) > 1)} {ranges_text(self.devices)}"

    def memory_text(self, memory: int | None) -> str:
        """How full its devices are, if each has `memory` bytes."""
        if not self.parts:
            return "nothing"
        text = "" if len(set(self.bytes.values())) == 1 else "at most "
        text = (f"peak {text}" if self.step else text) + bytes_text(self.peak)
        text += " on each" if len(self.devices) > 1 else ""
        if memory is None:
            return text
        if self.peak > memory:
            return f"{text}, {bytes_text(self.peak - memory)} over {bytes_text(memory)}"
        return f"{text}, {self.peak / memory:.0%} of {bytes_text(memory)}"

    def main_parts(self) -> tuple[Part, ...]:
        """At most `PARTS` parts, in order: the largest; others, and those below a thousandth, are one."""
        large = [part for part in self.parts if 1000 * part.bytes >= self.most]
        if len(large) < len(self.parts) or len(large) > PARTS:
            large = sorted(large, key=lambda part: -part.bytes)[: PARTS - 1]
        rest = [part for part in self.parts if part not in large]
        if len(rest) <= 1:
            return self.parts
        together = Part(f"{len(rest)} more", sum(part.bytes for part in rest), "", "")
        return (*(part for part in self.parts if part in large), together)
