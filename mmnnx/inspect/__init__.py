"""Tables and pictures of models, placements, programs and runs.

What comes in: NNX objects, TaskShardings, Programs, Timelines, profiles, rows of metrics.
What goes out: views that show themselves in a terminal or a notebook, and files (SVG, PNG, PDF, JSON). All
pictures are of one width, with text of one size (`figure_style.py`).
What always holds: nothing runs on a device and nothing is changed; matplotlib is imported only to draw.
Read first: `timeline.py` for programs (then `timeline_rows.py`), `tabulate.py` for models, `locations.py` for
where arrays live.
"""

from mmnnx.inspect.chrome_trace import chrome_trace
from mmnnx.inspect.describe import Description, describe
from mmnnx.inspect.loss_curves import draw_loss
from mmnnx.inspect.mesh_picture import draw_mesh
from mmnnx.inspect.model_table import ModelTable
from mmnnx.inspect.placement import PlacementView, show_placement
from mmnnx.inspect.tabulate import tabulate
from mmnnx.inspect.timeline import TimelineView, timeline
from mmnnx.inspect.timeline_picture import draw_timeline, draw_timelines
from mmnnx.inspect.timeline_text import draw_text
from mmnnx.inspect.transfers import TransferTable, show_transfers

__all__ = [
    "Description",
    "ModelTable",
    "PlacementView",
    "TimelineView",
    "TransferTable",
    "chrome_trace",
    "describe",
    "draw_loss",
    "draw_mesh",
    "draw_text",
    "draw_timeline",
    "draw_timelines",
    "show_placement",
    "show_transfers",
    "tabulate",
    "timeline",
]
