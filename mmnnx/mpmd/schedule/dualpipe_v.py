"""DualPipeV: DualPipe (DeepSeek-V3 technical report, arXiv:2412.19437) cut in half, down a V and back up.

The cut, after which no weights are kept twice, is Sea AI Lab's ("DualPipe could be better without the Dual",
2025) and part of github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import register_schedule
from mmnnx.mpmd.schedule.v_shaped import row_of


@register_schedule("dualpipe-v")
def dualpipe_v(stages: Stages, num_microbatches: int, interleave: int | None = None) -> list[list[Action]]:
    """Bubble (P-1)/(6M+P-1) for P meshes; at most 2P + 1 (stage, microbatch) pairs of saved activations are
    held.

    In its steady part a forward of one stage of a mesh is followed by a whole backward of its other, so that
    transfers of one can hide behind the other. Backwards are cut only where the pipeline fills and drains.

    Args:
      stages: a chain down the meshes and back up: 0, 1, 2, 2, 1, 0.
      num_microbatches: M, at least 2P.
      interleave: stages on each mesh: 2.

    Raises:
      ValueError: for other stages, or fewer microbatches.

    Example:
      >>> sum(a.phase == "backward" for a in dualpipe_v(Stages.chain((0, 1, 1, 0)), 4)[0])
      5
    """
    num_meshes = stages.vee("dualpipe-v", interleave)
    if num_microbatches < 2 * num_meshes:
        raise ValueError(
            f"schedule 'dualpipe-v' needs two microbatches for each mesh, at least {2 * num_meshes} here; "
            f"there are {num_microbatches}"
        )
    rows = []
    for mesh in range(num_meshes):
        below, above = num_meshes - mesh - 1, mesh + 1
        word = (
            "ff" * below
            + "fF" * above
            + "IwF" * below
            + "fBFb" * (num_microbatches - num_meshes - below)
            + "BFb" * below
            + ("Bb" * above)[:above]
            + ("Ii" * above)[above:]
            + "wi" * below
        )
        rows.append(row_of(word, down=mesh, up=stages.num_stages - 1 - mesh))
    return rows
