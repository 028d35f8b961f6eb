"""The sharding of every buffer of a program, learnt while its fragments are compiled one after another.

What crosses between fragments keeps the sharding that XLA gave it where it was made; what is carried around a
loop, returned, or sent to a mesh of another shape has one that is decided before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import NamedSharding, PartitionSpec

from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar
from mmnnx.mpmd.ir.instructions import Call, Control, Instruction, Transfer
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.shardings import same_shape, transferred


class BufferShardings:
    """The shardings of buffers that are known so far.

    Args:
      program: the program.
      fixed: shardings that are decided.

    Attributes:
      fixed: shardings that are decided, by buffer.
      known: all that are known so far, by buffer.
      ready: the first calls of fragments whose inputs are known; who compiles them takes them off.
    """

    def __init__(self, program: Program, fixed: Mapping[PlacedVar, NamedSharding]):
        self.known: dict[int, NamedSharding] = {}
        self.calls: dict[Fragment, list[Call]] = {}
        self.readers: dict[int, list[Instruction]] = {}
        for i in program.instructions:
            if isinstance(i, Call):
                self.calls.setdefault(i.fragment, []).append(i)
            if isinstance(i, Control):
                continue
            if isinstance(i, Transfer) or len(self.calls[i.fragment]) == 1:
                for s in set(i.inputs):
                    self.readers.setdefault(s, []).append(i)
        self.missing = {f: len(set(calls[0].inputs)) for f, calls in self.calls.items()}
        self.ready = [calls[0] for f, calls in self.calls.items() if not self.missing[f]]
        self.fixed = {s: fixed[placed] for s, placed in enumerate(program.values) if placed in fixed}
        for s, sharding in self.fixed.items():
            self.learn(s, sharding)

    def learn(self, buffer: int, sharding: NamedSharding) -> None:
        """Takes note of a sharding, unless one is decided, and of those of copies on other meshes."""
        if buffer in self.known:
            return
        self.known[buffer] = sharding = self.fixed.get(buffer, sharding)
        for i in self.readers.get(buffer, ()):
            if isinstance(i, Transfer):
                same = same_shape(i.source_mesh, i.target_mesh)
                replicated = NamedSharding(i.target_mesh, PartitionSpec())
                self.learn(i.outputs[0], transferred(sharding, i.target_mesh) if same else replicated)
            elif isinstance(i, Call):
                self.missing[i.fragment] -= 1
                self.ready += [] if self.missing[i.fragment] else [i]

    def learn_results(self, f: Fragment, specs: Sequence[PartitionSpec]) -> None:
        """Takes note of the shardings of a fragment's results, in all of its calls."""
        for call in self.calls[f]:
            for s, spec in zip(call.outputs, specs):
                self.learn(s, NamedSharding(f.mesh, spec))


def replicated(program: Program, fixed: Mapping[PlacedVar, NamedSharding]) -> dict[PlacedVar, NamedSharding]:
    """Values that go to a mesh of another shape, and all values of one-device meshes: one copy a device."""
    found: dict[PlacedVar, NamedSharding] = {}
    for placed in program.values:
        if placed[1].size == 1:
            found[placed] = NamedSharding(placed[1], PartitionSpec())
    for t in program.transfers:
        placed = program.values[t.inputs[0]]
        if not same_shape(t.source_mesh, t.target_mesh) and placed not in fixed:
            found[placed] = NamedSharding(t.source_mesh, PartitionSpec())
    return {placed: s for placed, s in found.items() if placed not in fixed}
