"""Pictures of programs and of runs."""

from mmnnx.inspect.curves import draw_loss
from mmnnx.inspect.picture import draw_timeline
from mmnnx.inspect.placement import PlacementView, show_placement
from mmnnx.inspect.table import ModelTable
from mmnnx.inspect.tabulate import tabulate
from mmnnx.inspect.terminal import draw_text
from mmnnx.inspect.timeline import TimelineView, timeline
from mmnnx.inspect.trace import chrome_trace

__all__ = [
    "ModelTable",
    "PlacementView",
    "TimelineView",
    "chrome_trace",
    "draw_loss",
    "draw_text",
    "draw_timeline",
    "show_placement",
    "tabulate",
    "timeline",
]
