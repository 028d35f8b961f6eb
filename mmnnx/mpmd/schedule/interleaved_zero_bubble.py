"""Interleaved 1F1B with weight parts in its bubbles, as ZB-H1 has them (Qi et al. 2023, arXiv:2401.10241)."""

from __future__ import annotations

from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import register_schedule
from mmnnx.mpmd.schedule.deferred_weights import defer_weights
from mmnnx.mpmd.schedule.interleaved_1f1b import looping_rows


@register_schedule("interleaved-zero-bubble")
def interleaved_zero_bubble(
    stages: Stages, num_microbatches: int, interleave: int | None = None, unrolling: int | None = None
) -> list[list[Action]]:
    """Bubble (P-1)/(3VM+P-1) for P meshes with V stages each, and M >= P.

    Every mesh holds saved activations of at most (V - 1) L + P (stage, microbatch) pairs. L is the length of
    the longest turn: P, if M is a multiple of P; these are VP pairs, the bytes of 1F1B. An input part is as
    short as a forward: one forward ahead for each mesh behind will do, where interleaved 1F1B has two. Mesh p
    runs a weight part p input parts later.

    Args:
      stages: a chain that goes round the meshes: stage i on mesh i % P.
      num_microbatches: M.
      interleave: V, if it is to be checked.
      unrolling: how many microbatches a mesh runs of one of its stages before it turns to its next: P if not
        given. Where M is not a multiple of it, turns are longer by a few, as evenly as can be.

    Raises:
      ValueError: for other stages, or no unrolling.

    Example:
      >>> [(a.stage, a.phase) for a in interleaved_zero_bubble(Stages.chain((0, 1, 0, 1)), 2)[0][3:6]]
      [(2, 'forward'), (2, 'backward-input'), (2, 'backward-weight')]
    """
    stages.rounds("interleaved-zero-bubble", interleave)
    rows = looping_rows(stages, num_microbatches, unrolling, hop=1)
    return [defer_weights(row, lag=mesh) for mesh, row in enumerate(rows)]
