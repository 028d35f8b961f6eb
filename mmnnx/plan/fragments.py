"""What each compiled fragment needs: bytes, operations, collectives; and how long a chip takes for it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import jax

from mmnnx.mpmd.compile.compile_program import Compiled
from mmnnx.mpmd.ir.flops import count_flops, count_kernels
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.plan.chips import Chip
from mmnnx.plan.collectives import Collective, collectives, link_domains
from mmnnx.plan.hlo import parse
from mmnnx.plan.operations import Value, flops, largest_values, moved_bytes

# Large matrix products and copies come to so much of the published figures, in the best of programs.
OF_FLOPS, OF_BANDWIDTH = 0.8, 0.9
LARGE = 64 * 2**20  # bytes of a value that the report names

Bound = Literal["compute", "memory", "links", "nothing"]


@dataclasses.dataclass(frozen=True)
class FragmentCost:
    """What one run of a fragment needs of each device of its mesh.

    Attributes:
      name: of the fragment, as `Program.labels` has it.
      mesh: the name of its mesh.
      phase: as of `Fragment`.
      runs: how often it runs in a step.
      argument_bytes, output_bytes, alias_bytes, temporary_bytes: as its executable says; results that take
        over the memory of arguments are in `alias_bytes` too.
      flops: operations of a device in matrix products, by dtype.
      moved_bytes: that the device reads from its memory and writes to it.
      collectives: what it sends to other devices of the mesh; None if XLA's text of it cannot be read.
      values: the large arrays that it makes inside.
      alike: the name of the fragment that it was compiled with; its own if it was the first.
    """

    name: str
    mesh: str
    phase: str
    runs: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    flops: Mapping[str, float]
    moved_bytes: float
    collectives: tuple[Collective, ...] | None
    values: tuple[Value, ...]
    alike: str

    def seconds(self, chip: Chip) -> float:
        """How long it takes: the longer of computing and moving, and then what it sends.

        XLA hides some of what is sent behind computation; how much is not counted on. See `fastest`.
        """
        compute, memory, links = self.parts(chip)
        return max(compute / OF_FLOPS, memory / OF_BANDWIDTH) + links

    def fastest(self, chip: Chip) -> float:
        """The roofline: at the published speeds, with everything behind what takes longest."""
        return max(self.parts(chip))

    def parts(self, chip: Chip) -> tuple[float, float, float]:
        """Seconds of computing, moving and sending, each at the published speed."""
        links = sum(
            c.sent / (chip.network if c.across else chip.link) + c.count * (c.devices - 1) * chip.latency
            for c in self.collectives or ()
        )
        return chip.seconds(self.flops), self.moved_bytes / chip.bandwidth, links

    @property
    def sent(self) -> float:
        """The bytes that a device sends to others of its mesh."""
        return sum(c.sent for c in self.collectives or ())

    def bound(self, chip: Chip) -> Bound:
        """What takes longest."""
        compute, memory, links = self.parts(chip)
        if not max(compute, memory, links):
            return "nothing"
        return "compute" if compute >= max(memory, links) else "memory" if memory >= links else "links"


def fragment_costs(compiled: Compiled) -> dict[Fragment, FragmentCost]:
    """What each fragment of a compiled program needs."""
    program = compiled.program
    runs = Counter(c.fragment for c in program.calls)
    first: dict[int, str] = {}
    known: dict[Any, FragmentCost] = {}  # alike ones may be on a host, or on several
    found = {}
    for f in program.fragments:
        code = compiled.executables[f].code
        label = program.labels[f]
        alike = first.setdefault(id(code), label)
        of_devices = link_domains(f.mesh)
        key = id(code), (of_devices - of_devices.min()).tobytes()
        if key not in known:
            known[key] = _cost(f, code.compiled)
        cost = dataclasses.replace(known[key], name=label, mesh=program.names[f.mesh], runs=runs[f])
        found[f] = dataclasses.replace(cost, alike=alike)
    return found


def _cost(f: Fragment, compiled: jax.stages.Compiled) -> FragmentCost:
    memory: Any = compiled.memory_analysis()
    text = _text(compiled)
    operations: Mapping[str, float]
    sent: tuple[Collective, ...] | None = None
    values: tuple[Value, ...] = ()
    if text is None:
        operations = {dtype: n / f.mesh.size for dtype, n in count_flops(f.jaxpr).items()}
        moved = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    else:
        hlo = parse(text)
        operations, moved = dict(flops(hlo) + count_kernels(f.jaxpr)), moved_bytes(hlo)
        sent, values = tuple(collectives(hlo, f.mesh)), tuple(largest_values(hlo, LARGE))
    return FragmentCost(
        name="",
        mesh="",
        phase=f.phase,
        runs=1,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        flops=operations,
        moved_bytes=moved,
        collectives=sent,
        values=values,
        alike="",
    )


def _text(compiled: jax.stages.Compiled) -> str | None:
    """XLA's text of a program; None if this jaxlib does not know all that a newer compiler writes."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None
