"""Pictures of programs and of runs."""

from mmnnx.inspect.curves import draw_loss
from mmnnx.inspect.picture import draw_timeline
from mmnnx.inspect.terminal import draw_text
from mmnnx.inspect.timeline import TimelineView, timeline
from mmnnx.inspect.trace import chrome_trace

__all__ = ["TimelineView", "chrome_trace", "draw_loss", "draw_text", "draw_timeline", "timeline"]
