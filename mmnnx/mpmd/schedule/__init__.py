"""Pipeline schedules: in which order a stage runs its forwards and backwards. One file each."""

from mmnnx.mpmd.schedule.base import Action, Schedule, get_schedule, register_schedule
from mmnnx.mpmd.schedule.gpipe import gpipe
from mmnnx.mpmd.schedule.one_f_one_b import one_f_one_b

__all__ = ["Action", "Schedule", "get_schedule", "gpipe", "one_f_one_b", "register_schedule"]
