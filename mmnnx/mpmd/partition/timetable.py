"""What is decided about a microbatch loop before it is partitioned: schedule, split backwards, remat."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence

from mmnnx.mpmd.ir.equations import Loop
from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.ir.timetable import PARTS, Remat, Stages, Timetable
from mmnnx.mpmd.partition.durations import estimate_durations
from mmnnx.mpmd.partition.joins import set_joins_apart
from mmnnx.mpmd.partition.split_backward import split_backward
from mmnnx.mpmd.partition.split_scans import can_be_split
from mmnnx.mpmd.partition.stages import find_stages
from mmnnx.mpmd.schedule.choose import Way, asked, make_table, ways


def ways_to_run(loop: Loop, placement: Placement) -> Iterator[Way]:
    """The ways in which a loop may run: the one that it asks for, or all that would do, the fastest first.

    Args:
      loop: the loop.
      placement: of its body.

    Raises:
      ValueError: if nothing would do.
    """
    if (way := asked(loop.spec)) is not None:
        return iter([way])
    *_, found = _stages_and_ways(loop, set_joins_apart(loop, placement))
    return found


def timetable(loop: Loop, placement: Placement) -> Timetable:
    """Finds the stages of a loop and what its schedule, or else the fastest, asks of them.

    Args:
      loop: the loop.
      placement: of its body.

    Raises:
      ValueError: if the loop has another number of stages than was asked for, or its schedule (where none was
        asked for: every schedule) is not for such stages or so few microbatches; if several are to share a
        call that wait for one another.
    """
    spec = loop.spec
    positions, stages, backward, found = _stages_and_ways(loop, placement)
    way = next(found)
    table = make_table(way.schedule, spec, stages, backward)
    parts = {a.stage for row in table for a in row if a.phase in PARTS}
    split = {positions[s] for s in parts}
    if any(name.endswith((" backward-input", " backward-weight")) for name in spec.named):
        split.update(positions)
    return Timetable(
        way.schedule,
        stages,
        positions,
        table,
        split_positions(placement) | split,
        _remat(spec, positions, placement),
    )


def _stages_and_ways(
    loop: Loop, placement: Placement
) -> tuple[tuple[int, ...], Stages, Mapping[int, Collection[str]], Iterator[Way]]:
    """The positions of the stages, the stages, the parts that the backward of each has, and the ways in which
    they may run."""
    spec = loop.spec
    positions, stages = find_stages(loop, placement)
    names = [str(placement.positions[p].task or f"stage {n}") for n, p in enumerate(positions)]
    if spec.num_stages not in (None, stages.num_stages):
        raise ValueError(
            f"microbatch: num_stages={spec.num_stages}, but the loop runs through {stages.num_stages} "
            f"stages: {', '.join(names)}"
        )
    halved = split_backward(loop.body, placement, positions)
    there = {(halved.locations[node].position, phase) for node, phase in halved.phases.items()}
    scans = [node for node in loop.body if can_be_split(node, placement)]
    there.update((placement.locations[node].position, "backward-weight") for node in scans)
    backward = {n: {part for part in PARTS if (p, part) in there} for n, p in enumerate(positions)}
    if (why := _one_by_one(stages, names, placement)) is not None:
        if (spec.per_call or 1) > 1:
            raise ValueError(f"microbatch: per_call={spec.per_call}, but {why}: leave per_call out")
        spec = dataclasses.replace(spec, per_call=1)
    durations = functools.partial(estimate_durations, loop, placement)
    return positions, stages, backward, ways(spec, stages, backward, durations)


def _one_by_one(stages: Stages, names: Sequence[str], placement: Placement) -> str | None:
    """Why microbatches cannot share a call, if they cannot."""
    moving = [t for p in placement.positions if (t := p.task) and t.loop_dependent_mesh_slice is not None]
    if moving:
        return f"each microbatch has a mesh of its own in {moving[0]}"
    for maker, reader in stages.carried:
        # A backward reads state as the forward of its stage does, of each microbatch.
        if maker[0] != reader[0] or maker[1] != "forward":
            one, other = (f"the {phase} of {names[n]}" for n, phase in (reader, maker))
            return f"{one} waits for state that {other} leaves after the microbatch before"
    return None


def fits(loop: Loop, placement: Placement) -> bool:
    """Whether a loop can have the schedule and whatever else it asks for, if its body is placed so."""
    try:
        timetable(loop, placement)
    except ValueError:
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
