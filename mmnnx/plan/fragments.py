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
from mmnnx.plan.operations import (
    Operation,
    Value,
    flops,
    largest_values,
    made_by,
    moved_bytes,
    operations,
)

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
      operations: what a device does.
      collectives: what it sends to other devices of the mesh; None if XLA's text of it cannot be read.
      values: the large arrays that it makes inside.
      uncounted_loops: where the model has loops of which XLA's text does not tell the iterations, as where
        they depend on values: `operations` and `collectives` have one of each.
      iterations_on_values: of its loops whose end depends on values, as far as `operations` counts them.
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
    operations: tuple[Operation, ...]
    collectives: tuple[Collective, ...] | None
    values: tuple[Value, ...]
    uncounted_loops: tuple[str, ...]
    iterations_on_values: int
    alike: str

    @property
    def flops(self) -> Mapping[str, float]:
        """Floating-point operations of a device in matrix products and convolutions, by dtype."""
        return dict(flops(self.operations))

    @property
    def moved_bytes(self) -> int:
        """What a device reads from its memory and writes to it."""
        return moved_bytes(self.operations)

    @property
    def operation_count(self) -> int:
        """How many operations it runs, each of which is a kernel on a GPU."""
        return sum(o.runs for o in self.operations)

    @property
    def sent(self) -> float:
        """The bytes that a device sends to others of its mesh."""
        return sum(c.sent for c in self.collectives or ())

    def seconds(self, chip: Chip) -> float:
        """How long it takes: one operation after the other, what it sends, and the waits of its loops.

        XLA hides some of what is sent behind computation; how much is not counted on. See `fastest`.
        """
        return sum(self.parts(chip)) + self.iterations_on_values * chip.loop_wait

    def parts(self, chip: Chip) -> tuple[float, float, float]:
        """Seconds in operations that are bound by computing, in those bound by moving, and of sending.

        Each operation takes the longer of the two. What goes on beside others takes what is left of the
        bandwidth.
        """
        compute = memory = 0.0
        for o in self.operations:
            computing = chip.seconds(o.flops) / chip.of_flops
            moving = max(o.moved_bytes / chip.bandwidth / chip.of_bandwidth, chip.shortest_operation)
            if computing > moving:
                compute += o.runs * computing
            elif not o.beside:
                memory += o.runs * moving
        moving = self.moved_bytes / chip.bandwidth / chip.of_bandwidth
        return compute, max(memory, moving - compute), self._sending(chip)

    def fastest(self, chip: Chip) -> float:
        """The roofline: at the published speeds, with everything behind what takes longest."""
        return max(chip.seconds(self.flops), self.moved_bytes / chip.bandwidth, self._sending(chip))

    def _sending(self, chip: Chip) -> float:
        return sum(
            c.sent / (chip.network if c.across else chip.link) + c.count * (c.devices - 1) * chip.latency
            for c in self.collectives or ()
        )

    def bound(self, chip: Chip) -> Bound:
        """What takes most of its time."""
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
    sent: tuple[Collective, ...] | None = None
    values: tuple[Value, ...] = ()
    uncounted: tuple[str, ...] = ()
    on_values = 0
    if text is None:
        of_device = {dtype: n / f.mesh.size for dtype, n in count_flops(f.jaxpr).items()}
        moved = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        done = [Operation(of_device, moved)]
    else:
        hlo = parse(text)
        done = operations(hlo, count_kernels(f.jaxpr))
        sent, values = tuple(collectives(hlo, f.mesh)), tuple(largest_values(hlo, LARGE))
        uncounted = tuple(dict.fromkeys(map(made_by, hlo.uncounted_loops())))
        on_values = hlo.iterations_on_values()
    return FragmentCost(
        name="",
        mesh="",
        phase=f.phase,
        runs=1,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        operations=tuple(done),
        collectives=sent,
        values=values,
        uncounted_loops=uncounted,
        iterations_on_values=on_values,
        alike="",
    )


def _text(compiled: jax.stages.Compiled) -> str | None:
    """XLA's text of a program; None if this jaxlib does not know all that a newer compiler writes."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None
