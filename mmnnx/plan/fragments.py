"""What each compiled fragment needs: bytes, operations, collectives; and how long a chip takes for it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import jax

from mmnnx.mpmd.compile.compile_program import Compiled
from mmnnx.mpmd.ir.flops import count_flops
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.plan.chips import Chip
from mmnnx.plan.hlo import Collective, Value, collectives, largest_values

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
      flops: operations in matrix products, by dtype: the share of a device.
      moved_bytes: that the device reads and writes.
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
        hops = sum(c.count * (c.devices - 1) for c in self.collectives or ()) * chip.latency
        return chip.seconds(self.flops), self.moved_bytes / chip.bandwidth, self.sent / chip.link + hops

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

    known: dict[int, FragmentCost] = {}
    found = {}
    for f in program.fragments:
        executable = compiled.executables[f]
        label, key = program.labels[f], id(executable.code)
        alike = first.setdefault(key, label)
        if key not in known:
            known[key] = _cost(f, executable.code.compiled, alike)
        found[f] = dataclasses.replace(known[key], name=label, mesh=program.names[f.mesh], runs=runs[f])
    return found


def _cost(f: Fragment, compiled: jax.stages.Compiled, name: str) -> FragmentCost:
    memory: Any = compiled.memory_analysis()
    text = _text(compiled)
    cost = _cost_analysis(compiled)
    size = f.mesh.size
    flops = {dtype: n / size for dtype, n in count_flops(f.jaxpr).items()}
    # XLA counts the body of a loop once. What it moves then grows with what it computes.
    whole, once = sum(flops.values()), cost.get("flops", 0.0)
    loops = whole / once if 0 < once < whole else 1.0
    if whole and once > whole:  # some of it every device does
        flops = {dtype: n * once / whole for dtype, n in flops.items()}
    least = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return FragmentCost(
        name=name,
        mesh="",
        phase=f.phase,
        runs=1,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        flops=flops,
        moved_bytes=max(cost.get("bytes accessed", 0.0) * loops, least),
        collectives=None if text is None else tuple(collectives(text, f.mesh)),
        values=() if text is None else tuple(largest_values(text, LARGE)),
        alike=name,
    )


def _cost_analysis(compiled: jax.stages.Compiled) -> Mapping[str, float]:
    """What XLA says of a program; nothing where it says nothing, as for a GPU that is only described."""
    try:
        return compiled.cost_analysis() or {}
    except Exception:  # it is not implemented there
        return {}


def _text(compiled: jax.stages.Compiled) -> str | None:
    """XLA's text of a program; None if this jaxlib does not know all that a newer compiler writes."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None
