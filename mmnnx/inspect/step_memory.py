"""What a planned step adds to the state on the devices of a submesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mmnnx.inspect.submesh import Part, Submesh

SHOWN = ("gradients", "saved activations", "temporaries")


class GroupMemory(Protocol):
    """Such as `mmnnx.plan.memory.DeviceMemory`."""

    @property
    def meshes(self) -> Sequence[str]: ...

    @property
    def at_peak(self) -> Mapping[Any, int]: ...

    @property
    def total(self) -> int: ...


class StepMemory(Protocol):
    """Such as a `Plan`, which is made of more than what is here."""

    @property
    def memory(self) -> Sequence[GroupMemory]: ...

    @property
    def program(self) -> Any: ...

    @property
    def chip(self) -> Any: ...


def add_step(box: Submesh, plan: StepMemory, numbers: Mapping[Any, int]) -> Submesh:
    """A submesh with what the step adds there on the fullest device.

    State of the step that is not in the submesh's parts, such as an optimizer that is not shown, is "other".

    Args:
      plan: of the step.
      numbers: of the devices, as those of the submesh are counted.
    """
    meshes = {name: {numbers.get(d) for d in mesh.devices.flat} for mesh, name in plan.program.names.items()}
    there = [m for m in plan.memory if set.intersection(*map(meshes.__getitem__, m.meshes)) & {*box.devices}]
    if not there:
        return box
    fullest = max(there, key=lambda m: m.total)
    sizes = {kind: fullest.at_peak.get(kind, 0) for kind in SHOWN}
    sizes["other"] = max(0, fullest.total - box.most - sum(sizes.values()))
    parts = (Part(kind, size, kind, kind) for kind, size in sizes.items() if size)
    return dataclasses.replace(box, step=tuple(parts))
