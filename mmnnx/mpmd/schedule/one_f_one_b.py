"""1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503): one forward, one backward."""

from mmnnx.mpmd.ir.timetable import Action, Stages
from mmnnx.mpmd.schedule.base import register_schedule


@register_schedule("1f1b")
def one_f_one_b(stages: Stages, num_microbatches: int) -> list[list[Action]]:
    """Bubble (S-1)/(M+S-1); stage s holds saved activations of at most S - s microbatches."""
    return [one_each(s, after, num_microbatches) for s, after in enumerate(stages.after)]


def one_each(stage: int, ahead: int, num_microbatches: int) -> list[Action]:
    """A row that runs `ahead` forwards, then one forward and one backward in turn."""
    ahead = min(ahead, num_microbatches)
    row = [Action(stage, "forward", m) for m in range(ahead)]
    for m in range(num_microbatches):
        if ahead + m < num_microbatches:
            row.append(Action(stage, "forward", ahead + m))
        row.append(Action(stage, "backward", m))
    return row
