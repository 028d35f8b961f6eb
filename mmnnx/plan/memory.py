"""What is in the memory of each device while a program runs, and what it is: the worst moment."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import jax

from mmnnx.mpmd.compile.compile_program import Compiled
from mmnnx.mpmd.frontend.record import Leaf
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.instructions import Call, Control
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.runtime.bound_program import BoundProgram
from mmnnx.plan.fragments import FragmentCost

Kind = Literal[
    "weights",  # their copies in another type, and other state of modules
    "optimizer state",
    "gradients",
    "saved activations",
    "other arguments",  # such as the batch
    "other values",
    "temporaries",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The bytes on each of some devices that hold the same, at the moment when there are most.

    Attributes:
      meshes: the meshes that they are in.
      devices: how many they are.
      at_peak: bytes of a device at the worst moment, by kind; arrays of the program and temporaries of the
        fragment that runs.
      moment: the fragment that runs then.
      peak_of: the most bytes of each kind at any moment.
      arrays: the most bytes of the program's arrays, without temporaries, at any moment.
    """

    meshes: tuple[str, ...]
    devices: int
    at_peak: Mapping[Kind, int]
    moment: str
    peak_of: Mapping[Kind, int]
    arrays: int

    @property
    def total(self) -> int:
        """All bytes at the worst moment."""
        return sum(self.at_peak.values())


def device_memory(
    compiled: Compiled, costs: Mapping[Fragment, FragmentCost], bound: BoundProgram
) -> list[DeviceMemory]:
    """Plays a program through, and counts what each device holds. Donation counts as the executables do it.

    Args:
      compiled: the program.
      costs: of its fragments.
      bound: what ties it to its function: what its arguments and results are.
    """
    program = compiled.program
    kinds = buffer_kinds(program, bound)
    groups = _groups(program)
    nbytes = buffer_bytes(compiled)
    return [
        _Replay(program, compiled, costs, kinds, nbytes, meshes, devices).run()
        for meshes, devices in groups.items()
    ]


def shard_bytes(program: Program, compiled: Compiled, s: int) -> int:
    """The bytes of a buffer on each device of its mesh."""
    aval = program.values[s][0].aval
    return math.prod(compiled.shardings[s].shard_shape(aval.shape)) * aval.dtype.itemsize


def buffer_bytes(compiled: Compiled) -> dict[int, int]:
    """The bytes of each buffer on each device of its mesh, with the padding that the compiler gives it."""
    program = compiled.program
    found = {s: shard_bytes(program, compiled, s) for s in compiled.shardings}
    for c in program.calls:
        executable = compiled.executables[c.fragment]
        code = executable.code.compiled
        sides = (
            (c.inputs, executable.inputs, code.input_formats),
            (c.outputs, executable.outputs, code.output_formats),
        )
        for buffers, order, formats in sides:
            for n, of in zip(order, jax.tree.leaves(formats)):
                aval = program.values[buffers[n]][0].aval
                shape = compiled.shardings[buffers[n]].shard_shape(aval.shape)
                found[buffers[n]] = _padded_size(shape, of.layout) * aval.dtype.itemsize
    return found


def _padded_size(shape: tuple[int, ...], layout: Any) -> int:
    """The numbers that an array takes the room of: the last of its dimensions fill whole tiles."""
    tile = layout.tiling[0] if layout is not None and layout.tiling else ()
    if not tile:
        return math.prod(shape)
    sizes = [1] * len(tile) + [shape[d] for d in layout.major_to_minor]
    whole = [-(-size // n) * n for size, n in zip(sizes[-len(tile) :], tile)]
    return math.prod(sizes[: -len(tile)]) * math.prod(whole)


def buffer_kinds(program: Program, bound: BoundProgram) -> dict[int, Kind]:
    """What each buffer holds."""
    record, arguments = bound.record, bound.number
    of: dict[Var, Kind] = {}
    given = {leaf.within for leaf in record.inputs if leaf is not None and leaf.within}
    for leaf, placed in zip(record.results, bound.results):
        if leaf is not None and leaf.within:
            # State by the path of an argument's, but not its new value.
            returned = leaf.updates is None and leaf.within in given and not leaf.is_optimizer_state
            of |= dict.fromkeys((v for v, _ in placed), "gradients" if returned else _kind(leaf))
    of |= {v: _kind(record.inputs[n] if n < len(record.inputs) else None) for v, n in arguments.items()}
    weights = {
        (v.aval.shape, mesh): v.aval.dtype for v, mesh in program.inputs.values() if of.get(v) == "weights"
    }
    for v, new in program.successors.items():  # of state, or the next value of a sum
        if v in of:
            of[new] = of[v]
    found: dict[int, Kind] = {}
    for s, (v, _) in enumerate(program.values):
        found[s] = "saved activations" if s in program.residuals else of.get(v, "other values")
        if v in arguments and found[s] == "saved activations":
            found[s] = of[v]
    sums = {v for pair in program.successors.items() for v in pair}
    for c in program.calls:
        for s in c.outputs:
            v, mesh = program.values[s]
            if found[s] != "other values":
                continue
            dtype = weights.get((v.aval.shape, mesh))
            if dtype is not None and c.stage is None and v.aval.dtype != dtype:
                found[s] = "weights"
            elif v in sums or (dtype is not None and (c.stage is None or c.phase.startswith("backward"))):
                found[s] = "gradients"
    return found


def _kind(leaf: Leaf | None) -> Kind:
    """Of an argument, or of a part of a module among the results."""
    if leaf is None or not leaf.within:
        return "other arguments"
    return "optimizer state" if leaf.is_optimizer_state else "weights"


def _groups(program: Program) -> dict[tuple[str, ...], int]:
    """The devices, counted, by the meshes that they are in, of those that hold anything."""
    held = {mesh for _, mesh in program.values}
    meshes: defaultdict[jax.Device, list[str]] = defaultdict(list)
    for mesh, name in program.names.items():
        for device in mesh.devices.flat if mesh in held else ():
            meshes[device].append(name)
    return dict(Counter(tuple(names) for names in meshes.values()))


class _Replay:
    """The bytes of one device of a group while a program runs."""

    def __init__(
        self,
        program: Program,
        compiled: Compiled,
        costs: Mapping[Fragment, FragmentCost],
        kinds: Mapping[int, Kind],
        nbytes: Mapping[int, int],
        meshes: tuple[str, ...],
        devices: int,
    ):
        self.program, self.compiled, self.costs = program, compiled, costs
        self.kinds, self.nbytes, self.meshes, self.devices = kinds, nbytes, set(meshes), devices
        self.names = meshes
        self.live: dict[int, int] = {}  # the bytes of each buffer that is there
        self.now: Counter[Kind] = Counter()
        self.peak: Counter[Kind] = Counter()
        self.peak_of: Counter[Kind] = Counter()
        self.arrays, self.moment = 0, "the arguments"

    def run(self) -> DeviceMemory:
        self.add(self.program.inputs)
        self.look(self.moment)
        for i in self.program.instructions:
            if isinstance(i, Call) and self.program.names[i.mesh] in self.meshes:
                taken = [i.inputs[n] for n, _ in self.compiled.donations[i.fragment]]
                self.drop(taken)
                self.add(i.outputs)
                cost = self.costs.get(i.fragment)
                self.look(self.program.labels[i.fragment], cost.temporary_bytes if cost else 0)
            elif isinstance(i, Control) and i.kind == "repeat":
                self.drop(i.outputs)
                self.add(i.outputs)
            elif not isinstance(i, Control):
                self.add(i.outputs)
                self.look("a transfer")
            self.drop(i.frees)
        order = [kind for kind in KINDS if self.peak_of[kind]]
        return DeviceMemory(
            self.names,
            self.devices,
            {kind: self.peak[kind] for kind in order},
            self.moment,
            {kind: self.peak_of[kind] for kind in order},
            self.arrays,
        )

    def add(self, buffers: Iterable[int]) -> None:
        for s in buffers:
            if self.program.names[self.program.values[s][1]] in self.meshes and s not in self.live:
                self.live[s] = self.nbytes[s]
                self.now[self.kinds[s]] += self.nbytes[s]

    def drop(self, buffers: Iterable[int]) -> None:
        for s in buffers:
            self.now[self.kinds[s]] -= self.live.pop(s, 0)

    def look(self, moment: str, temporary: int = 0) -> None:
        """Whether there is more than there ever was."""
        total = sum(self.now.values())
        self.arrays = max(self.arrays, total)
        if total + temporary > sum(self.peak.values()):
            self.peak = Counter({**self.now, "temporaries": temporary})
            self.moment = moment
        for kind, n in {**self.now, "temporaries": temporary}.items():
            self.peak_of[kind] = max(self.peak_of[kind], n)
