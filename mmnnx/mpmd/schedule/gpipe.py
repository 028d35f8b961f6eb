"""GPipe (Huang et al. 2019, arXiv:1811.06965): all forwards, then all backwards."""

from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import register_schedule


@register_schedule("gpipe")
def gpipe(stages: Stages, num_microbatches: int) -> list[list[Action]]:
    """Bubble (S-1)/(M+S-1); every stage holds saved activations of all M microbatches."""
    order = range(num_microbatches)
    return [
        [Action(s, phase, m) for phase in ("forward", "backward") for m in order]
        for s in range(stages.num_stages)
    ]
