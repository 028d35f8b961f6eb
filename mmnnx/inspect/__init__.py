"""Pictures of programs and of runs."""

from mmnnx.inspect.chrome_trace import chrome_trace
from mmnnx.inspect.loss_curves import draw_loss
from mmnnx.inspect.model_table import ModelTable
from mmnnx.inspect.placement import PlacementView, show_placement
from mmnnx.inspect.tabulate import tabulate
from mmnnx.inspect.timeline import TimelineView, timeline
from mmnnx.inspect.timeline_picture import draw_timeline
from mmnnx.inspect.timeline_text import draw_text

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
