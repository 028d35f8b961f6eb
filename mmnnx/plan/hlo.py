"""What a compiled fragment sends between its devices, and its largest values: read from XLA's text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|calls|to_apply|called_computations|\w+_computation)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":?\{"n":"(\d+)"')
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """What the devices of a mesh send each other in one run of a fragment.

    Attributes:
      kind: one of `KINDS`.
      axes: the mesh axes that it goes along.
      devices: how many take part in each group.
      nbytes: the larger of operand and result on a device, of all such collectives.
      count: how many there are.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    nbytes: int
    count: int

    @property
    def sent(self) -> float:
        """The bytes that each device sends, by the ring algorithm."""
        if self.kind == "collective-permute":
            return self.nbytes
        share = self.nbytes * (self.devices - 1) / self.devices
        return 2 * share if self.kind == "all-reduce" else share


@dataclasses.dataclass(frozen=True)
class Value:
    """A large array that a fragment makes inside.

    Attributes:
      shape: as XLA prints it: "f32[1,4096,128256]"; that of one device.
      nbytes: its size.
      name: where the program makes it: JAX's name stack, if XLA kept it.
      count: how many of the same shape and name there are.
    """

    shape: str
    nbytes: int
    name: str
    count: int


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """What the devices of a mesh send each other, the largest first.

    In loops, times their iterations, where the compiler says how many; of a conditional, in all branches.
    """
    found: defaultdict[tuple[str, tuple[str, ...], int], list[int]] = defaultdict(lambda: [0, 0])
    for times, _, shape, kind, line in _instructions(text):
        base = kind.removesuffix("-start")
        if base not in KINDS:
            continue
        group = _group(line, base, mesh.size)
        if group.size < 2:
            continue
        entry = found[base, _axes(group, mesh), group.size]
        entry[0] += times * _moved_bytes(kind, shape, group.size)
        entry[1] += times
    all_of_them = (Collective(*key, *entry) for key, entry in found.items())
    return sorted(all_of_them, key=lambda c: -c.nbytes)


def largest_values(text: str, least: int) -> list[Value]:
    """The arrays of at least so many bytes that a fragment makes inside, one by one, the largest first.

    XLA reuses memory: not all of them are there at one time.
    """
    found: defaultdict[tuple[str, int, str], int] = defaultdict(int)
    made_inside = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "copy-done")
    for _, in_fusion, shape, kind, line in _instructions(text):
        if in_fusion or kind in made_inside or kind.endswith("-done"):
            continue
        for array in _arrays(shape):
            if (nbytes := _nbytes(array)) >= least:
                name = _NAME.search(line)
                made_by = re.sub(r"^jit\(\w+\)/", "", name[1]) if name else kind
                found[_short(array), nbytes, made_by] += 1
    values = (Value(shape, nbytes, name, n) for (shape, nbytes, name), n in found.items())
    return sorted(values, key=lambda v: -v.nbytes)


def _instructions(text: str) -> Iterator[tuple[int, bool, str, str, str]]:
    """(how often it runs, whether inside a fusion, its type, its opcode, its line) of each instruction."""
    bodies: dict[str, list[str]] = {}
    entry = current = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            current = start[2]
            bodies[current] = []
            entry = current if start[1] else entry
        elif current:
            bodies[current].append(line)

    def walk(name: str, times: int, in_fusion: bool) -> Iterator[tuple[int, bool, str, str, str]]:
        for line in bodies.get(name, ()):
            parts = _INSTRUCTION.match(line)
            if parts is None:
                continue
            _, shape, kind = parts.groups()
            yield times, in_fusion, shape, kind, line
            if kind in ("while", "fusion", "call", "conditional", "async-start"):
                trips = _TRIPS.search(line)
                inner = times * int(trips[1]) if kind == "while" and trips else times
                branches = _BRANCHES.search(line)
                called_here = re.findall(r"[\w.\-]+", branches[1]) if branches else _CALLED.findall(line)
                for called in called_here:
                    yield from walk(called, inner, in_fusion or kind == "fusion")

    return walk(entry, 1, False)


def _group(line: str, kind: str, size: int) -> np.ndarray:
    """The device numbers of the first group of a collective, or of the first pair of two devices."""
    if kind == "collective-permute":
        pairs = _PAIRS.search(line)
        numbers = np.array(_numbers(pairs[1]) if pairs else [], int).reshape(-1, 2)
        return next((pair for pair in numbers if pair[0] != pair[1]), np.array([]))
    if listed := _LISTED.search(line):
        return np.array(_numbers(listed[1].split("}")[0]))
    if iota := _IOTA.search(line):
        shape, dims = _numbers(iota[1]), _numbers(iota[2])
        numbers = np.arange(math.prod(dims)).reshape(dims)
        if iota[3]:
            numbers = numbers.transpose(_numbers(iota[3]))
        return numbers.reshape(shape)[0]
    if (mesh := _AXES.search(line)) and not re.search(r"':\(", mesh[2]):  # else parts of axes
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        along = re.findall(r"'(\w+)'", mesh[2])
        numbers = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        return numbers[tuple(slice(None) if name in along else 0 for name in sizes)].ravel()
    return np.arange(size)


def _axes(group: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    """The axes along which the positions of a group differ."""
    if group.max() >= mesh.size:
        return ()
    places = np.stack(np.unravel_index(group, mesh.devices.shape))
    return tuple(name for name, row in zip(mesh.axis_names, places) if len(set(row)) > 1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _moved_bytes(kind: str, shape: str, devices: int) -> int:
    """The larger of the operands and the results of a collective, from the type of its result.

    Several that go together have a tuple of results. Where an all-gather or a permute begins, the tuple has
    the operands, the results, and perhaps numbers of 32 bits for the hardware.
    """
    arrays = _arrays(shape)
    if kind in ("all-gather-start", "collective-permute-start"):
        arrays = [array for array in arrays if array != ("u32", "")]
        half = len(arrays) // 2
        return max(sum(map(_nbytes, arrays[:half])), sum(map(_nbytes, arrays[half:])))
    return sum(map(_nbytes, arrays)) * (devices if kind == "reduce-scatter" else 1)


def _arrays(shape: str) -> list[tuple[str, str]]:
    return _ARRAY.findall(shape)


def _short(array: tuple[str, str]) -> str:
    return f"{array[0]}[{array[1]}]"


def _nbytes(array: tuple[str, str]) -> int:
    dtype, sizes = array
    bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["8"])[0])
    return math.prod(_numbers(sizes)) * bits // 8
