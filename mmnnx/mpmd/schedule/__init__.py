"""Pipeline schedules: in which order each mesh runs the forwards and backwards of its stages. One file each.

In: the stages of a microbatch loop, and the number of microbatches. Out: a table, which is rows of actions,
each row of one mesh (`table.py` checks it); and the order in which all fragments are dispatched
(`dispatch_order.py`).
Always: an action comes after those that it needs. Read `one_f_one_b.py` first, then `base.py`.
"""

from mmnnx.mpmd.ir.timetable import Action, Stages, Table
from mmnnx.mpmd.schedule.base import Schedule, get_schedule, register_schedule, schedule_names

# isort: off
# Schedules are listed in the order in which they are imported: a reader meets the simple ones first.
from mmnnx.mpmd.schedule.sequential import sequential
from mmnnx.mpmd.schedule.gpipe import gpipe
from mmnnx.mpmd.schedule.one_f_one_b import one_f_one_b
from mmnnx.mpmd.schedule.eager_1f1b import eager_1f1b
from mmnnx.mpmd.schedule.wavefront import wavefront
from mmnnx.mpmd.schedule.interleaved_1f1b import interleaved_1f1b
from mmnnx.mpmd.schedule.looped_bfs import looped_bfs
from mmnnx.mpmd.schedule.zero_bubble_h1 import zero_bubble_h1
from mmnnx.mpmd.schedule.zero_bubble_h2 import zero_bubble_h2
from mmnnx.mpmd.schedule.interleaved_zero_bubble import interleaved_zero_bubble
from mmnnx.mpmd.schedule.zbv import zbv
from mmnnx.mpmd.schedule.dualpipe_v import dualpipe_v

# isort: on
from mmnnx.mpmd.schedule.table import check_table, simulate
from mmnnx.mpmd.schedule.table_csv import read_schedule, write_schedule

__all__ = [
    "Action",
    "Schedule",
    "Stages",
    "Table",
    "check_table",
    "dualpipe_v",
    "eager_1f1b",
    "get_schedule",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "read_schedule",
    "register_schedule",
    "schedule_names",
    "sequential",
    "simulate",
    "wavefront",
    "write_schedule",
    "zbv",
    "zero_bubble_h1",
    "zero_bubble_h2",
]
