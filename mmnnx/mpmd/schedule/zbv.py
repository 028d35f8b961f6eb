"""ZB-V (Qi et al. 2023, arXiv:2401.10241; 2024, arXiv:2405.15362): no bubble between steps, in 1F1B's memory.

Each mesh has two stages, in a V: the longer it holds saved activations of its first stage, the shorter those
of its second.
"""

from __future__ import annotations

from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import register_schedule
from mmnnx.mpmd.schedule.v_shaped import row_of


@register_schedule("zbv")
def zbv(stages: Stages, num_microbatches: int, interleave: int | None = None) -> list[list[Action]]:
    """Bubble 0 (of a `Timeline.period`) for P meshes and M >= 2P - 1.

    A mesh holds saved activations of at most 2P (stage, microbatch) pairs. Its stages are half as large as
    those of 1F1B, which holds P: the bytes are the same.

    Args:
      stages: a chain down the meshes and back up: 0, 1, 2, 2, 1, 0.
      num_microbatches: M.
      interleave: stages on each mesh: 2.

    Raises:
      ValueError: for other stages.

    Example:
      >>> len(zbv(Stages.chain((0, 1, 1, 0)), 4))
      2
    """
    num_meshes = stages.vee("zbv", interleave)
    steady = max(num_microbatches, 2 * num_meshes - 1)  # for fewer: the rows for so many, without the rest
    rows = []
    for mesh in range(num_meshes):
        below = num_meshes - mesh - 1
        word = (
            "f" * (2 * below + 1)
            + "Ff" * mesh
            + "FIw" * (below + 1)
            + "fiwFIw" * (steady - num_meshes - below)
            + "iwFIw" * below
            + "iI" * mesh
            + "iw" * (below + 1)
        )
        row = row_of(word, down=mesh, up=stages.num_stages - 1 - mesh)
        rows.append([action for action in row if action.microbatch < num_microbatches])
    return rows
