"""What is decided about a microbatch loop before it is partitioned: schedule, split backwards, remat."""

from __future__ import annotations

from collections.abc import Sequence

from mmnnx.mpmd.ir.equations import Loop
from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.ir.placement import Placement
from mmnnx.mpmd.ir.timetable import PARTS, Remat, Timetable
from mmnnx.mpmd.partition.split_backward import split_backward
from mmnnx.mpmd.partition.stages import find_stages
from mmnnx.mpmd.schedule.choose import candidates, make_table


def timetable(loop: Loop, placement: Placement, choice: int = 0) -> Timetable:
    """Finds the stages of a loop and what its schedule asks of them.

    Args:
      loop: the loop.
      placement: of its body.
      choice: where no schedule was asked for, which of those that would do: 0 has the lowest step latency.
        Where there are fewer, the last.

    Raises:
      ValueError: if the loop has another number of stages than was asked for, or its schedule (where none was
        asked for: every schedule) is not for such stages or so few microbatches.
    """
    spec = loop.spec
    positions, stages = find_stages(loop, placement)
    if spec.num_stages not in (None, stages.num_stages):
        names = [str(placement.positions[p].task or f"stage {n}") for n, p in enumerate(positions)]
        raise ValueError(
            f"microbatch: num_stages={spec.num_stages}, but the loop runs through {stages.num_stages} "
            f"stages: {', '.join(names)}"
        )
    halved = split_backward(loop.body, placement, positions)
    there = {(halved.locations[node].position, phase) for node, phase in halved.phases.items()}
    backward = {n: {part for part in PARTS if (p, part) in there} for n, p in enumerate(positions)}
    names = candidates(spec, stages, backward)
    name = names[min(choice, len(names) - 1)]
    table = make_table(name, spec, stages, backward)
    parts = {a.stage for row in table for a in row if a.phase in PARTS}
    split = {positions[s] for s in parts}
    if any(name.endswith((" backward-input", " backward-weight")) for name in spec.named):
        split.update(positions)
    return Timetable(
        name,
        stages,
        positions,
        table,
        split_positions(placement) | split,
        _remat(spec, positions, placement),
        len(names),
    )


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
