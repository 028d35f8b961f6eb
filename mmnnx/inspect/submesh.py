"""A submesh as pictures show it: its devices, and the parts of models that it holds."""

from __future__ import annotations

from dataclasses import dataclass

from mmnnx.inspect.units import bytes_text, ranges_text

PARTS = 5
"""Parts of a submesh that are named."""


@dataclass(frozen=True)
class Part:
    """What a submesh holds of one top-level part of a model: ``blocks/0-1``.

    Attributes:
      name: of the part, behind that of the model where there are several.
      bytes: on each device; where they differ, the most.
      group: the name without the numbers, which other submeshes may have as well; "" for several parts.
    """

    name: str
    bytes: int
    group: str


@dataclass(frozen=True)
class Submesh:
    """A box of the picture.

    Attributes:
      name: of its tasks, or of its slice of the MultiMesh; "free" for devices that hold nothing.
      axes: its axes that are longer than one, with their sizes.
      devices: numbers as `TaskMesh` counts them.
      parts: what is on these devices, whichever submesh it belongs to, largest first.
      bytes: on each device, by its number.
    """

    name: str
    axes: str
    devices: tuple[int, ...]
    parts: tuple[Part, ...]
    bytes: dict[int, int]

    @property
    def most(self) -> int:
        """Bytes on the fullest device."""
        return max(self.bytes.values(), default=0)

    @property
    def device_text(self) -> str:
        """The numbers of its devices, runs as ranges: "devices 0-7"."""
        return f"device{'s' * (len(self.devices) > 1)} {ranges_text(self.devices)}"

    def memory_text(self, memory: int | None) -> str:
        """How full its devices are, in words, where each has `memory` bytes."""
        if not self.parts:
            return "nothing"
        text = ("" if len(set(self.bytes.values())) == 1 else "at most ") + bytes_text(self.most)
        text += " on each" if len(self.devices) > 1 else ""
        if memory is None:
            return text
        if self.most > memory:
            return f"{text}, {bytes_text(self.most - memory)} over {bytes_text(memory)}"
        return f"{text}, {self.most / memory:.0%} of {bytes_text(memory)}"

    def main_parts(self) -> tuple[Part, ...]:
        """The largest parts, at most `PARTS`; others, and those of less than a thousandth, as one."""
        large = [part for part in self.parts if 1000 * part.bytes >= self.most]
        shown = large if len(large) <= PARTS and large == list(self.parts) else large[: PARTS - 1]
        rest = self.parts[len(shown) :]
        if len(rest) == 1:
            return self.parts
        return (*shown, *([Part(f"{len(rest)} more", sum(p.bytes for p in rest), "")] if rest else []))
