"""Looped breadth-first (Lamy-Poirier 2022, arXiv:2211.05953): GPipe with several stages on each mesh."""

from __future__ import annotations

from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import register_schedule


@register_schedule("looped-bfs")
def looped_bfs(stages: Stages, num_microbatches: int, interleave: int | None = None) -> list[list[Action]]:
    """Bubble (P-1)/(VM+P-1) for P meshes with V stages each, and M >= P; each mesh holds all VM saved
    activations.

    A mesh is done with one of its stages before it turns to its next, so that weights that are gathered for a
    stage, and gradients that are scattered after it, are so once a step.

    Args:
      stages: a chain that goes round the meshes: stage i on mesh i % P.
      num_microbatches: M.
      interleave: V, if it is to be checked.

    Raises:
      ValueError: for other stages.

    Example:
      >>> [a.stage for a in looped_bfs(Stages.chain((0, 1, 0, 1)), 2)[0]]
      [0, 0, 2, 2, 2, 2, 0, 0]
    """
    stages.rounds("looped-bfs", interleave)
    rows = []
    for mesh in range(stages.num_meshes):
        mine = range(mesh, stages.num_stages, stages.num_meshes)
        row = [Action(s, "forward", m) for s in mine for m in range(num_microbatches)]
        row += [Action(s, "backward", m) for s in reversed(mine) for m in range(num_microbatches)]
        rows.append(row)
    return rows
