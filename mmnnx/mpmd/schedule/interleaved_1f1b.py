"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): several virtual stages on each mesh."""

from __future__ import annotations

from itertools import pairwise

from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import register_schedule


@register_schedule("interleaved-1f1b")
def interleaved_1f1b(
    stages: Stages, num_microbatches: int, interleave: int | None = None, unrolling: int | None = None
) -> list[list[Action]]:
    """Bubble (P-1)/(VM+P-1) for P meshes with V stages each, and M >= P.

    Mesh p holds saved activations of at most (V - 1) L + 2 (P - p) - 1 (stage, microbatch) pairs. L is the
    length of the longest turn: P, if M is a multiple of P. (With V = 1 it is eager 1F1B.)

    Args:
      stages: a chain that goes round the meshes: stage i on mesh i % P.
      num_microbatches: M.
      interleave: V, if it is to be checked.
      unrolling: how many microbatches a mesh runs of one of its stages before it turns to its next: P if not
        given. Where M is not a multiple of it, turns are longer by a few, as evenly as can be.

    Raises:
      ValueError: for other stages, or no unrolling.

    Example:
      >>> [(a.stage, a.microbatch) for a in interleaved_1f1b(Stages.chain((0, 1, 0, 1)), 4)[1][:5]]
      [(1, 0), (1, 1), (3, 0), (3, 0), (3, 1)]
    """
    stages.rounds("interleaved-1f1b", interleave)
    return looping_rows(stages, num_microbatches, unrolling, hop=2)


def looping_rows(
    stages: Stages, num_microbatches: int, unrolling: int | None, hop: int
) -> list[list[Action]]:
    """One row a mesh: 1F1B over turns of `unrolling` microbatches.

    A turn goes through all stages of a mesh: first to last for forwards, last to first for backwards. Before
    its first backward, a mesh runs the forwards that take the first turn to its last stage, and `hop` for
    each mesh behind it.
    """
    num_meshes = stages.num_meshes
    unrolling = num_meshes if unrolling is None else unrolling
    if unrolling < 1:
        raise ValueError(f"unrolling={unrolling}: a mesh runs at least one microbatch of a stage at a time")
    turns = even_turns(num_microbatches, unrolling)
    rows = []
    for mesh in range(num_meshes):
        mine = range(mesh, stages.num_stages, num_meshes)
        forwards = [Action(s, "forward", m) for turn in turns for s in mine for m in turn]
        backwards = [Action(s, "backward", m) for turn in turns for s in reversed(mine) for m in turn]
        # Two turns ahead is as far as turns that are shorter than the pipeline can go: any further, and the
        # first mesh asks the last for a forward that comes after a backward which waits for the first mesh.
        ahead = (len(mine) - 1) * len(turns[-1]) + min(hop * (num_meshes - 1 - mesh), 2 * unrolling)
        row = forwards[:ahead]
        for n, backward in enumerate(backwards):
            row += [*forwards[ahead + n : ahead + n + 1], backward]
        rows.append(row)
    return rows


def even_turns(count: int, shortest: int) -> list[range]:
    """Microbatches 0 to count - 1 in turns of `shortest` or a few more, the longest last.

    Example:
      >>> even_turns(7, 3)
      [range(0, 3), range(3, 7)]
    """
    turns = max(count // shortest, 1)
    return [range(start, end) for start, end in pairwise(count * n // turns for n in range(turns + 1))]
