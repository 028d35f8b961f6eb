"""ZB-H1 (Qi et al. 2023, arXiv:2401.10241): 1F1B with weight parts in its bubbles, in 1F1B's memory."""

from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import register_schedule
from mmnnx.mpmd.schedule.deferred_weights import defer_weights
from mmnnx.mpmd.schedule.one_f_one_b import one_each


@register_schedule("zero-bubble-h1")
def zero_bubble_h1(stages: Stages, num_microbatches: int) -> list[list[Action]]:
    """Bubble (S-1)/(3M+S-1) for M >= S; every stage holds saved activations of at most S microbatches.

    Stage s runs S - s - 1 forwards ahead, as in 1F1B, and its weight parts s microbatches late. (Where stages
    are no chain, S is the number of stages on the longest way through.)

    Example:
      >>> [a.phase for a in zero_bubble_h1(Stages.chain((0, 1)), 2)[1]][:4]
      ['forward', 'backward-input', 'forward', 'backward-input']
    """
    depth = max(stages.after)
    return [
        defer_weights(one_each(s, after, num_microbatches), lag=depth - after)
        for s, after in enumerate(stages.after)
    ]
