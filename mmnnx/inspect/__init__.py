"""Pictures of programs and of runs."""

from mmnnx.inspect.curves import draw_loss
from mmnnx.inspect.timeline import draw_timeline

__all__ = ["draw_loss", "draw_timeline"]
