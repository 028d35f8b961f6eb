"""Eager 1F1B (Zhuang et al. 2022, arXiv:2211.05322): 1F1B that hides transfers."""

from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import register_schedule
from mmnnx.mpmd.schedule.one_f_one_b import one_each


@register_schedule("eager-1f1b")
def eager_1f1b(stages: Stages, num_microbatches: int) -> list[list[Action]]:
    """Bubble (S-1)/(M+S-1); stage s holds saved activations of at most 2(S-s) - 1 microbatches.

    Forwards run twice as far ahead as in 1F1B: each stage has one to run while a transfer is under way.

    Example:
      >>> [len(row) for row in eager_1f1b(Stages.chain(range(4)), 8)]
      [16, 16, 16, 16]
    """
    return [one_each(s, 2 * after, num_microbatches) for s, after in enumerate(stages.after)]
