"""GPipe (Huang et al. 2019, arXiv:1811.06965): all forwards, then all backwards."""

from mmnnx.mpmd.schedule.base import Action, register_schedule


@register_schedule("gpipe")
def gpipe(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Bubble (S-1)/(M+S-1); every stage holds the residuals of all M microbatches."""
    order = range(num_microbatches)
    return [Action("forward", m) for m in order] + [Action("backward", m) for m in order]
