"""1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503): one forward, one backward."""

from mmnnx.mpmd.schedule.base import Action, register_schedule


@register_schedule("1f1b")
def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Bubble (S-1)/(M+S-1); stage s holds the residuals of at most S - s microbatches."""
    ahead = min(num_stages - stage - 1, num_microbatches)
    actions = [Action("forward", m) for m in range(ahead)]
    for m in range(num_microbatches - ahead):
        actions += [Action("forward", ahead + m), Action("backward", m)]
    return actions + [Action("backward", m) for m in range(num_microbatches - ahead, num_microbatches)]
