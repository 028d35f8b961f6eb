"""What each TaskMesh does when: simulated, or as measured."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

UNIT_COSTS = {"forward": 1.0, "backward": 2.0, "backward-input": 1.0, "backward-weight": 1.0, "none": 1.0}
"""Units of time for each phase: equal ones, a whole backward being of two parts."""

DISPATCH = 20e-6
"""Seconds of the host to start an instruction, as benchmarks/host.py measures it."""

Device = tuple[str, int]  # its platform and id, or any other that is no other's


@dataclasses.dataclass(frozen=True)
class Costs:
    """How long the instructions of a program take, in any one unit.

    Attributes:
      calls: times of fragment calls, by the name of a fragment (see `Program.labels`), else by its phase;
        "outside" for those outside the microbatch loop that are not named.
      latency, bandwidth: a transfer takes latency + bytes / bandwidth.
      bandwidths: those of single ways between meshes, such as {"stage0 -> stage1": 1e10}; others have
        `bandwidth`.
      dispatch: what a host needs to start one instruction; it starts those of its devices one after another.
      dispatches: what it needs to start single fragments, by label; others take `dispatch`.

    Example:
      >>> costs = Costs({"forward": 1e-3, "backward": 2e-3, "outside": 1e-3}, latency=1e-5, bandwidth=1e11)
      >>> program.simulate(costs).makespan > 0
      True
    """

    calls: Mapping[str, float]
    latency: float = 0.0
    bandwidth: float = math.inf
    dispatch: float = 0.0
    bandwidths: Mapping[str, float] = dataclasses.field(default_factory=dict)
    dispatches: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"Costs({len(self.calls)} calls, latency={self.latency:.4g}, bandwidth={self.bandwidth:.4g}, "
            f"dispatch={self.dispatch:.4g})"
        )

    def of_call(self, label: str, name: str, phase: str, outside: bool) -> float:
        keys = (label, name, "outside", phase) if outside else (label, name, phase)
        for key in keys:
            if key in self.calls:
                return self.calls[key]
        raise ValueError(f"the costs have no time for {label!r}, nor for its phase {phase!r}")

    def of_transfer(self, nbytes: int, way: str) -> float:
        return self.latency + nbytes / self.bandwidths.get(way, self.bandwidth)


@dataclasses.dataclass(frozen=True)
class Event:
    """One fragment call, or one transfer, on a timeline.

    Attributes:
      mesh: name of the mesh; for a transfer the two, as "a -> b".
      start, end: in the unit of the costs.
      phase: "forward", "backward", "backward-input", "backward-weight", "none" or "transfer".
      microbatch: which one, None outside the loop.
      name: of the fragment.
      stage: which stage of the loop, None outside it.
    """

    mesh: str
    start: float
    end: float
    phase: str
    microbatch: int | None
    name: str
    stage: int | None = None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What each TaskMesh does when.

    Attributes:
      events: the fragment calls.
      transfers: arrays under way between meshes.
      peak_bytes: for each mesh, the most bytes of live arrays at any time; empty if unknown.
      residual_bytes: the same, of what backwards read of the forwards alone.
      held_bytes: for each mesh, (time, bytes of live arrays from then on), in order. A time may be there
        twice: more is live in that moment than before and after. Empty if unknown.
      mesh_devices: for each mesh, its devices as (platform, id). Default: each mesh has one of its own.
      schedule: the name of its schedule; "" where there is no loop, or none is known.
      unit: what times are in: "units" or "s".

    Example:
      >>> timeline = program.simulate()
      >>> timeline.in_flight()  # microbatches
      {'stage0': 4, 'stage1': 3, 'stage2': 2, 'stage3': 1}
    """

    events: tuple[Event, ...]
    transfers: tuple[Event, ...] = ()
    peak_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    residual_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    held_bytes: Mapping[str, Sequence[tuple[float, int]]] = dataclasses.field(default_factory=dict)
    mesh_devices: Mapping[str, Sequence[Device]] = dataclasses.field(default_factory=dict, repr=False)
    schedule: str = ""
    unit: str = "units"

    def __repr__(self) -> str:
        schedule = f"{self.schedule}: " if self.schedule else ""
        return (
            f"Timeline({schedule}{len(self.by_mesh())} meshes, {len(self.events)} events, "
            f"{len(self.transfers)} transfers, period {self.period:.4g} {self.unit}, "
            f"bubble {self.bubble:.1%})"
        )

    @property
    def makespan(self) -> float:
        """The time from the start to the last end."""
        return max((e.end for e in self.events), default=0.0)

    @property
    def period(self) -> float:
        """The time from one step to the next when steps follow each other and no mesh waits for all others.

        It is the longest time of one device from its first event to its last: what zero-bubble
        schedules shorten (Qi et al. 2023, arXiv:2401.10241).
        """
        spans = defaultdict[Device, list[float]](list)
        for mesh, events in self.by_mesh().items():
            span = min(e.start for e in events), max(e.end for e in events)
            for device in self._devices(mesh):
                spans[device] += span
        return max((max(times) - min(times) for times in spans.values()), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of device time in which nothing runs, over all devices that run something and one
        `period`."""
        rows = self.by_mesh()
        devices = {device for mesh in rows for device in self._devices(mesh)}
        busy = sum((e.end - e.start) * len(self._devices(mesh)) for mesh, es in rows.items() for e in es)
        return 1 - busy / (self.period * len(devices)) if self.period else 0.0

    def _devices(self, mesh: str) -> Sequence[Device]:
        return self.mesh_devices.get(mesh, [(mesh, 0)])

    def by_mesh(self) -> dict[str, list[Event]]:
        """The events that take time, by mesh, in the order in which they start."""
        rows: dict[str, list[Event]] = {}
        for e in sorted(self.events, key=lambda e: e.start):
            if e.end > e.start:
                rows.setdefault(e.mesh, []).append(e)
        return rows

    def in_flight(self) -> dict[str, int]:
        """For each mesh, the most residuals it holds at a time, counted in (stage, microbatch) pairs.

        Residuals are held from the start of a forward to the end of the last part of its backward (of the
        forward itself, where there is no backward).
        """
        begun: dict[tuple[str, int, int], float] = {}
        ended: dict[tuple[str, int, int], float] = {}
        for e in self.events:
            if e.stage is None or e.microbatch is None:
                continue
            key = (e.mesh, e.stage, e.microbatch)
            if e.phase == "forward":
                begun[key] = min(e.start, begun.get(key, e.start))
            ended[key] = max(e.end, ended.get(key, e.end))
        moves = [(t, 1, key[0]) for key, t in begun.items()]
        moves += [(ended[key], -1, key[0]) for key in begun]
        return peaks(moves)


@dataclasses.dataclass(frozen=True)
class Profile:
    """How long a program took, in seconds.

    Attributes:
      seconds: one step, its fragments as the program lists them: from the first dispatch until all results
        are there. (Otherwise those that always follow each other on a mesh run as one.)
      costs: the median time of each fragment, of transfers, and of starting an instruction, each alone.
      timeline: the program played through with these costs.
      peak_bytes: for each mesh, the most bytes of arrays that the program held while it ran one instruction
        at a time, over all of its devices: a replicated array counts once for each.
      residual_bytes: the same, of what backwards read of the forwards alone.

    Example:
      >>> profile = program.profile(model, optimizer, batch)
      >>> sorted(profile.peak_bytes)
      ['stage0', 'stage1', 'stage2', 'stage3']
    """

    seconds: float
    costs: Costs
    timeline: Timeline
    peak_bytes: Mapping[str, int]
    residual_bytes: Mapping[str, int]

    def __repr__(self) -> str:
        return f"Profile({self._summary()})"

    def _summary(self) -> str:
        return (
            f"step {self.seconds * 1e3:.2f} ms; simulated step latency "
            f"{self.timeline.makespan * 1e3:.2f} ms, bubble {self.timeline.bubble:.1%}"
        )

    def __str__(self) -> str:
        lines = [self._summary()]
        width = max(map(len, self.costs.calls), default=0)
        lines += [f"  {name:<{width}}  {t * 1e6:10.1f} us" for name, t in self.costs.calls.items()]
        of_size = (
            f" + bytes / {self.costs.bandwidth / 1e9:.2f} GB/s" if self.costs.bandwidth < math.inf else ""
        )
        lines.append(
            f"  transfers: {self.costs.latency * 1e6:.1f} us{of_size}"
            f"; to start an instruction: {self.costs.dispatch * 1e6:.1f} us"
        )
        return "\n".join(lines)


def peaks(moves: Iterable[tuple[Any, int, str]]) -> dict[str, int]:
    """For each name, the highest sum of (time, change, name) over time; at one time, falls come first."""
    return {name: max(held for _, held in sums) for name, sums in running_sums(moves).items()}


def running_sums(moves: Iterable[tuple[Any, int, str]]) -> dict[str, list[tuple[Any, int]]]:
    """For each name, (time, sum so far) at each of (time, change, name); at one time, falls come first."""
    sums: defaultdict[str, list[tuple[Any, int]]] = defaultdict(list)
    for time, change, name in sorted(moves):
        before = sums[name][-1][1] if sums[name] else 0
        sums[name].append((time, before + change))
    return dict(sums)
