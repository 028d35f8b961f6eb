"""The stages of a microbatch loop, and the table of actions that its schedule asks of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from mmnnx.mpmd.ir.dataflow import running_sums
from mmnnx.mpmd.ir.equations import Loop, is_var
from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.ir.timetable import PARTS, Phase, Remat, Timetable
from mmnnx.mpmd.partition.split_backward import split_backward
from mmnnx.mpmd.schedule import (
    Action,
    Schedule,
    Stages,
    check_table,
    get_schedule,
    schedule_names,
    simulate,
)


def timetable(loop: Loop, placement: Placement, choice: int = 0) -> Timetable:
    """Finds the stages of a loop and what its schedule asks of them.

    Args:
      loop: the loop.
      placement: of its body.
      choice: where no schedule was asked for, which of those that would do: 0 is the shortest.

    Raises:
      ValueError: if the loop has another number of stages than was asked for, or its schedule is not for such
        stages or so few microbatches.
    """
    spec = loop.spec
    positions, stages = _stages(loop, placement)
    if spec.num_stages not in (None, stages.num_stages):
        names = [str(placement.positions[p].task or f"stage {n}") for n, p in enumerate(positions)]
        raise ValueError(
            f"microbatch: num_stages={spec.num_stages}, but the loop runs through {stages.num_stages} "
            f"stages: {', '.join(names)}"
        )
    halved = split_backward(loop.body, placement, positions)
    there = {(halved.locations[node].position, phase) for node, phase in halved.phases.items()}
    backward = {n: {part for part in PARTS if (p, part) in there} for n, p in enumerate(positions)}
    name, table = _table(spec, stages, backward, choice)
    parts = {a.stage for row in table for a in row if a.phase in PARTS}
    split = {positions[s] for s in parts}
    if spec.names_tasks:
        named = [entry[1] for row in spec.rows for entry in row]
        if any(name.endswith((" backward-input", " backward-weight")) for name in named):
            split.update(positions)
    return Timetable(
        name, stages, positions, table, split_positions(placement) | split, _remat(spec, positions, placement)
    )


def fits(loop: Loop, placement: Placement) -> bool:
    """Whether a loop can have the schedule and whatever else it asks for, if its body is placed so."""
    try:
        timetable(loop, placement)
    except (ValueError, IndexError):
        return False
    return True


def split_positions(placement: Placement) -> frozenset[int]:
    """The positions of tasks with `split_backprop`."""
    return frozenset(
        n for n, p in enumerate(placement.positions) if p.task is not None and p.task.split_backprop
    )


def task_remat(placement: Placement) -> dict[int, Remat]:
    """For the positions of tasks that say so: what their backward may compute again."""
    return {
        n: p.task.remat
        for n, p in enumerate(placement.positions)
        if p.task is not None and p.task.remat is not None
    }


def _stages(loop: Loop, placement: Placement) -> tuple[tuple[int, ...], Stages]:
    """The positions that are stages, in order, and what each reads.

    A task whose slice depends on the microbatch is no stage: it runs where and when others need it.
    """
    reads: dict[int, set[int]] = {}
    made: dict[Any, set[int]] = {}  # by which positions
    for node in loop.body:
        location = placement.locations.get(node)
        makers = set().union(*(made.get(a, ()) for a in node.invars if is_var(a)))
        if location is not None and location.position is not None and placement.phases[node] == "forward":
            reads.setdefault(location.position, set()).update(makers)
            makers = {location.position}
        made.update(dict.fromkeys(node.outvars, makers))
    for p in sorted(reads):
        reads[p].discard(p)
        for before in [b for b in reads[p] if _moves(placement, b)]:
            reads[p] |= reads[before]
    positions = tuple(p for p in sorted(reads) if not _moves(placement, p))
    number = {p: n for n, p in enumerate(positions)}
    meshes: dict[Mesh, int] = {}
    for p in positions:
        meshes.setdefault(placement.positions[p].mesh, len(meshes))
    return positions, Stages(
        tuple(meshes[placement.positions[p].mesh] for p in positions),
        tuple(tuple(sorted(number[b] for b in reads[p] if b in number and b < p)) for p in positions),
        tuple(dict.fromkeys(_carried(loop, placement, number))),
    )


def _carried(
    loop: Loop, placement: Placement, number: Mapping[int, int]
) -> Iterator[tuple[tuple[int, Phase], tuple[int, Phase]]]:
    """`Stages.carried` of a loop. Sums are left out, for microbatches add to them in any order."""
    enters = {
        v: frozenset([v]) for v in loop.carry_in
    }  # the carries that a value outside the flow is made of
    makers: dict[Any, frozenset[tuple[int, Phase]]] = {}
    readers: dict[Any, set[tuple[int, Phase]]] = {v: set() for v in loop.carry_in}
    for node in loop.body:
        atoms = [a for a in node.invars if is_var(a)]
        carries = frozenset().union(*(enters.get(a, ()) for a in atoms))
        made_by = frozenset().union(*(makers.get(a, ()) for a in atoms))
        location = placement.locations.get(node)
        if location is not None and location.position is not None and location.position in number:
            phase: Phase = "backward" if placement.phases[node].startswith("backward") else "forward"
            action = number[location.position], phase
            for v in carries:
                readers[v].add(action)
            carries, made_by = frozenset(), frozenset([action])
        enters |= dict.fromkeys(node.outvars, carries)
        makers |= dict.fromkeys(node.outvars, made_by)
    sums = running_sums(loop)
    for v, out in zip(loop.carry_in, loop.carry_out):
        for maker, reader in itertools.product(sorted(makers.get(out, ())), sorted(readers[v])):
            if v not in sums and maker != reader:
                yield maker, reader


def _moves(placement: Placement, position: int) -> bool:
    task = placement.positions[position].task
    return task is not None and task.loop_dependent_mesh_slice is not None


def _table(
    spec: LoopSpec, stages: Stages, parts: Mapping[int, Collection[str]], choice: int
) -> tuple[str, list[list[Action]]]:
    """The name and the table of the schedule of a loop; `parts` are those that its backwards have."""
    if spec.rows:
        table = [] if spec.names_tasks else [list(row) for row in spec.rows]
        if table:
            check_table(table, stages, spec.length, parts=parts)
        return "custom", table
    if spec.schedule is not None:
        name = spec.schedule
    elif any(parts.values()):
        everyone = tuple(s for s in map(get_schedule, schedule_names()) if s.is_own)
        ranked = _ranked(everyone, stages, min(spec.length, 2 * stages.num_stages + 1), spec.options)
        if choice >= len(ranked):
            raise IndexError(choice)
        name = ranked[choice]
    else:
        name = "sequential" if stages.carried else "gpipe"  # forwards alone, in order
    if not stages.num_stages:
        return name, []  # all is in moving tasks, and follows by dependency
    table = get_schedule(name).table(stages, spec.length, **dict(spec.options))
    check_table(table, stages, spec.length, name, parts)
    return name, table


@functools.lru_cache(maxsize=256)
def _ranked(
    schedules: Sequence[Schedule], stages: Stages, length: int, options: tuple[tuple[str, Any], ...]
) -> list[str]:
    """The schedules that can be used, the shortest first; of equals that with fewest residuals."""
    found = []
    for schedule in schedules:
        if not {name for name, _ in options} <= set(schedule.options):
            continue
        try:
            table = schedule.table(stages, length, **dict(options))
            check_table(table, stages, length, schedule.name)
            timeline = simulate(table, stages)
        except ValueError:
            continue  # not for such stages, or not for so few microbatches
        found.append((round(timeline.makespan, 6), max(timeline.in_flight().values()), schedule.name))
    return [name for *_, name in sorted(found, key=lambda item: item[:2])]


def _remat(spec: LoopSpec, positions: Sequence[int], placement: Placement) -> dict[int, Remat]:
    remat = spec.remat
    if isinstance(remat, tuple):
        if len(remat) != len(positions):
            raise ValueError(
                f"microbatch: remat= has {len(remat)} entries, but the loop has {len(positions)} stages"
            )
        each = dict(zip(positions, remat))
    else:
        each = dict.fromkeys(positions, remat)
    return each | task_remat(placement)
