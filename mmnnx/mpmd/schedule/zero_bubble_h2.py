"""ZB-H2 (Qi et al. 2023, arXiv:2401.10241): no bubble between steps, for twice the memory of 1F1B."""

from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import register_schedule
from mmnnx.mpmd.schedule.deferred_weights import defer_weights
from mmnnx.mpmd.schedule.one_f_one_b import one_each


@register_schedule("zero-bubble-h2")
def zero_bubble_h2(stages: Stages, num_microbatches: int) -> list[list[Action]]:
    """Bubble 0 (of a `Timeline.period`) for M >= 2S - 1; every stage holds saved activations of at most 2S -
    1.

    Stage s runs 2(S - s - 1) forwards ahead, and its weight parts 2s microbatches late. Each stage is at work
    from its first action to its last: the last stage begins S - 1 forwards after the first, and ends as much
    later. (Where stages are no chain, S is the number of stages on the longest way through.)

    Example:
      >>> [a.phase for a in zero_bubble_h2(Stages.chain((0, 1)), 3)[0]][:4]
      ['forward', 'forward', 'forward', 'backward-input']
    """
    depth = max(stages.after)
    return [
        defer_weights(one_each(s, 2 * after, num_microbatches), lag=2 * (depth - after))
        for s, after in enumerate(stages.after)
    ]
