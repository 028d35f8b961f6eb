"""What the devices of a mesh send each other in a compiled fragment."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mmnnx.plan.hlo import Hlo, Instruction

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """What the devices of a mesh send each other in one run of a fragment.

    Attributes:
      kind: one of `KINDS`.
      axes: the mesh axes that it goes along.
      devices: how many take part in each group.
      nbytes: the larger of operand and result on a device, of all such collectives.
      count: how many there are.
      across: whether some of those that take part are on hosts (of TPUs: slices) that a network alone joins.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    nbytes: int
    count: int
    across: bool = False

    @property
    def sent(self) -> float:
        """The bytes that each device sends, by the ring algorithm."""
        if self.kind == "collective-permute":
            return self.nbytes
        share = self.nbytes * (self.devices - 1) / self.devices
        return 2 * share if self.kind == "all-reduce" else share


def collectives(hlo: Hlo, mesh: Mesh) -> list[Collective]:
    """What the devices of a mesh send each other, the largest first.

    In loops, times their iterations; of a conditional, in the branch that moves most.
    """
    seen: set[str] = set()

    def found_in(i: Instruction, computation: str) -> Counter[Any]:
        kind = i.opcode.removesuffix("-start")
        if kind not in KINDS:
            return Counter()
        groups = _groups(i.line, kind, mesh.size)
        if groups.shape[-1] < 2 or not len(groups):
            return Counter()
        # XLA for TPUs makes fusions of an asynchronous one: where it starts, goes on, and is done.
        channel = _CHANNEL.search(i.line)
        if computation in hlo.fused and channel:
            if channel[1] in seen:
                return Counter()
            seen.add(channel[1])
        nbytes = _moved_bytes(i, groups.shape[-1])
        if computation.startswith("all-reduce-scatter"):  # each keeps its part of the sum
            kind = "reduce-scatter"
        key = kind, _axes(groups, mesh), groups.shape[-1], _is_across(groups, mesh)
        return Counter({(key, "bytes"): nbytes, (key, "count"): 1})

    total = hlo.total(found_in)
    found = []
    for key in (key for key, what in total if what == "count"):
        kind, axes, devices, across = key
        found.append(Collective(kind, axes, devices, total[key, "bytes"], total[key, "count"], across))
    return sorted(found, key=lambda c: -c.nbytes)


def _groups(line: str, kind: str, size: int) -> np.ndarray:
    """The device numbers of the groups of a collective, int [groups, devices of each]; pairs of a permute."""
    if kind == "collective-permute":
        pairs = _PAIRS.search(line)
        numbers = np.array(_numbers(pairs[1]) if pairs else [], int).reshape(-1, 2)
        return numbers[numbers[:, 0] != numbers[:, 1]]
    if listed := _LISTED.search(line):
        groups = [_numbers(group) for group in listed[1].split("}") if _numbers(group)]
        return np.array([group for group in groups if len(group) == len(groups[0])], int)
    if iota := _IOTA.search(line):
        shape, dims = _numbers(iota[1]), _numbers(iota[2])
        numbers = np.arange(math.prod(dims)).reshape(dims)
        if iota[3]:
            numbers = numbers.transpose(_numbers(iota[3]))
        return numbers.reshape(shape)
    if (axes := _AXES.search(line)) and not re.search(r"':\(", axes[2]):  # else parts of axes
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", axes[1])}
        along = [n for n, name in enumerate(sizes) if name in re.findall(r"'(\w+)'", axes[2])]
        numbers = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        numbers = np.moveaxis(numbers, along, range(-len(along), 0))
        return numbers.reshape(-1, math.prod(numbers.shape[numbers.ndim - len(along) :]))
    return np.arange(size)[None]


def _axes(groups: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    """The axes along which the positions of any group differ."""
    if groups.max() >= mesh.size:
        return ()
    places = np.unravel_index(groups, mesh.devices.shape)
    return tuple(name for name, at in zip(mesh.axis_names, places) if (at != at[:, :1]).any())


def _is_across(groups: np.ndarray, mesh: Mesh) -> bool:
    if groups.max() >= mesh.size:
        return False
    of_groups = link_domains(mesh)[groups]
    return bool((of_groups != of_groups[:, :1]).any())


def link_domains(mesh: Mesh) -> np.ndarray:
    """The number of each device's slice (of TPUs) or host (of GPUs), which fast links join; int [devices]."""
    return np.array(
        [getattr(d, "slice_index", 0) if d.platform == "tpu" else d.process_index for d in mesh.devices.flat]
    )


def _moved_bytes(i: Instruction, devices: int) -> int:
    """The larger of the operands and the results of a collective, from the type of its result.

    Several that go together have a tuple of results. Where an all-gather or a permute begins, the tuple has
    the operands, the results, and perhaps numbers of 32 bits for the hardware.
    """
    arrays = list(i.arrays)
    if i.opcode in ("all-gather-start", "collective-permute-start"):
        arrays = [array for array in arrays if array.dtype != "u32" or array.sizes]
        half = len(arrays) // 2
        return max(sum(a.nbytes for a in arrays[:half]), sum(a.nbytes for a in arrays[half:]))
    return sum(a.nbytes for a in arrays) * (devices if i.opcode == "reduce-scatter" else 1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
