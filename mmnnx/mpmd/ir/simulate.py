"""A program is played through without running it: when each mesh does what, and what it holds."""

from __future__ import annotations

import itertools
import numbers
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmnnx.mpmd.ir.buffers import Pairs, buffer_reuse, saved_activations
from mmnnx.mpmd.ir.equations import nbytes
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.instructions import Call, Control, Instruction, ProgramData
from mmnnx.mpmd.ir.timeline import UNIT_COSTS, Costs, Event, Timeline, peaks, running_sums
from mmnnx.sharding.mesh import devices_key


def simulate(program: ProgramData, costs: Costs | Mapping[str, float] | None = None) -> Timeline:
    """What `Program.simulate` returns, for these costs; of each while it plays one iteration."""
    if not isinstance(costs, Costs):
        nothing = {"outside": 0.0, "none": 0.0} if program.loops else {}
        costs = Costs(UNIT_COSTS | nothing | dict(costs or {}))
    for name, cost in (*costs.calls.items(), *costs.dispatches.items()):
        if not (isinstance(cost, numbers.Real) and cost >= 0):
            raise ValueError(f"simulate: the cost of {name!r} is a time of 0 or more, not {cost!r}")
    known = {*UNIT_COSTS, "outside", *program.labels.values(), *(f.name for f in program.labels)}
    labels = set(program.labels.values())
    unknown = [name for name in costs.calls if name not in known]
    if unknown := unknown + [name for name in costs.dispatches if name not in labels]:
        raise ValueError(
            f"simulate: there is no {', '.join(map(repr, unknown))}; there are "
            + ", ".join(map(repr, program.labels.values()))
        )
    ready: dict[int, float] = dict.fromkeys(program.inputs, 0.0)
    idle: defaultdict[Any, float] = defaultdict(float)  # of meshes, and of the ways between them
    devices = {mesh: devices_key(mesh) for mesh in program.names}
    users: defaultdict[Any, list[Any]] = defaultdict(list)
    for one, own in devices.items():
        for device in own:
            users[device].append(one)
    sharing = {one: {other for device in own for other in users[device]} for one, own in devices.items()}
    events, transfers = [], []
    # Falls come before rises at one time, except in a call that takes none: what it holds, it holds.
    moves: list[tuple[Any, int, str]] = [
        ((0.0, 0, -1, 0), nbytes(v), program.names[mesh]) for v, mesh in program.inputs.values()
    ]
    # Moves of residuals alone: to begin with, none.
    kept: list[tuple[Any, int, str]] = [(moment, 0, name) for moment, _, name in moves]
    saved, reused = saved_activations(program), buffer_reuse(program)
    # Each process starts the instructions of its devices: when it is through with the last.
    processes = {mesh: {d.process_index for d in mesh.devices.flat} for mesh in program.names}
    host = dict.fromkeys(set().union(*processes.values()), 0.0)
    live = set(program.inputs)
    for n, i in enumerate(program.instructions):
        begin = max((ready[s] for s in i.inputs), default=0.0)
        made, dropped = i.outputs, i.frees
        if isinstance(i, Call):
            mesh, label = program.names[i.mesh], program.labels[i.fragment]
            started = _start(host, processes[i.mesh], costs.dispatches.get(label, costs.dispatch))
            start = max(begin, idle[i.mesh], started)
            took = costs.of_call(label, i.name, i.phase, outside=i.microbatch is None)
            end = start + took
            idle.update((other, max(end, idle[other])) for other in sharing[i.mesh])
            events.append(Event(mesh, start, end, i.phase, i.microbatch, i.name, i.stage))
        elif isinstance(i, Control):
            started = _start(host, host, costs.dispatch)
            start = end = max(started, ready[i.inputs[0]])  # the hosts read whether it goes on
            host = dict.fromkeys(host, end)
            # What an iteration made takes the place of the carries, of which some are dropped already.
            made, dropped = (), tuple(s for s in i.outputs if s in live) if i.outputs else i.frees
        else:
            way = f"{i.source} -> {i.target}"
            both = processes[i.source_mesh] | processes[i.target_mesh]
            start = max(begin, idle[way], _start(host, both, costs.dispatch))
            end = idle[way] = start + costs.of_transfer(i.nbytes, way)
            transfers.append(Event(way, start, end, "transfer", i.microbatch, "transfer"))
        ends = [ready[s] for s in i.inputs] if isinstance(i, Control) else [end] * len(i.outputs)
        ready.update(zip(i.outputs, ends))
        live.update(i.outputs)
        live.difference_update(i.frees)
        overwritten = _overwritten(reused, i)
        changes = [((start, 1, n, 0), 1, s) for s in made]
        changes += [((end, int(end == start), n, 1), -1, s) for s in dropped]
        for time, sign, s in changes:
            v, home = program.values[s]
            move = time, sign * nbytes(v), program.names[home]
            if s not in overwritten:
                moves.append(move)
            if s in saved:
                kept.append(move)
    held = {name: tuple(_by_time(sums)) for name, sums in running_sums(moves).items()}
    return Timeline(
        tuple(events),
        tuple(transfers),
        {name: max(n for _, n in sums) for name, sums in held.items()},
        peaks(kept),
        held,
        {program.names[mesh]: found for mesh, found in devices.items()},
        program.schedule,
    )


def _start(host: dict[int, float], processes: Iterable[int], took: float) -> float:
    """When processes have started an instruction, which takes each of them so long."""
    for process in processes:
        host[process] += took
    return max(host[process] for process in processes)


def _by_time(sums: Iterable[tuple[Any, int]]) -> Iterator[tuple[float, int]]:
    """Of the sums at each time the last, and before it the most if that is more than before and after."""
    before = 0
    for time, group in itertools.groupby(sums, key=lambda moment: moment[0][0]):
        values = [n for _, n in group]
        if max(values) > max(before, values[-1]):
            yield time, max(values)
        before = values[-1]
        yield time, before


def _overwritten(reused: Mapping[Fragment, Pairs], i: Instruction) -> set[int]:
    """Buffers that an instruction drops and whose memory a result takes over, and those of the results."""
    pairs = reused[i.fragment] if isinstance(i, Call) else ()
    return {s for n, k in pairs for s in (i.inputs[n], i.outputs[k])}
