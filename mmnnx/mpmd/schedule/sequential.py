"""One microbatch after the other: for loops in which each begins with what the one before it ended with."""

from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import register_schedule


@register_schedule("sequential")
def sequential(stages: Stages, num_microbatches: int) -> list[list[Action]]:
    """Bubble (S-1)/S; every stage holds saved activations of one microbatch.

    Example:
      >>> [(a.phase, a.microbatch) for a in sequential(Stages.chain((0, 1)), 2)[1]]
      [('forward', 0), ('backward', 0), ('forward', 1), ('backward', 1)]
    """
    order = range(num_microbatches)
    return [
        [Action(s, phase, m) for m in order for phase in ("forward", "backward")]
        for s in range(stages.num_stages)
    ]
