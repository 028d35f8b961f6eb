"""mmnnx: Flax NNX programs over several device submeshes (MPMD), on stock JAX.

What is named here is imported when it is first used, so that `import mmnnx` imports neither JAX nor Flax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mmnnx.plan import plan  # not on first use: a package of mmnnx has the same name

if TYPE_CHECKING:  # the same names as in _HOMES below
    # From the modules that define them: mypy takes `mmnnx.inspect.timeline` for the module of that name.
    from mmnnx import inspect as inspect
    from mmnnx import modules as modules
    from mmnnx import mpmd as mpmd
    from mmnnx import sharding as sharding
    from mmnnx.inspect.describe import Description, describe
    from mmnnx.inspect.model_table import ModelTable
    from mmnnx.inspect.notebook import load_ipython_extension
    from mmnnx.inspect.placement import PlacementView, show_placement
    from mmnnx.inspect.tabulate import tabulate
    from mmnnx.inspect.timeline import TimelineView, timeline
    from mmnnx.inspect.transfers import TransferTable, show_transfers
    from mmnnx.modules.generate import generate
    from mmnnx.mpmd.compile.saved_executables import load_executables
    from mmnnx.mpmd.distributed.fetch import fetch
    from mmnnx.mpmd.distributed.initialize import initialize
    from mmnnx.mpmd.frontend.microbatch import microbatch
    from mmnnx.mpmd.ir.program import Program
    from mmnnx.mpmd.ir.timeline import Costs, Profile, Timeline
    from mmnnx.mpmd.ir.timetable import Action, Stages
    from mmnnx.mpmd.ir.verify import VerificationError
    from mmnnx.mpmd.jit.contexts import enable_recomputation, enable_task_fusion, ignore_transforms
    from mmnnx.mpmd.jit.jit import jit
    from mmnnx.mpmd.schedule.base import register_schedule
    from mmnnx.mpmd.schedule.table_csv import read_schedule, write_schedule
    from mmnnx.plan.planning import Plan
    from mmnnx.plan.targets import target
    from mmnnx.sharding.divided_array import DividedArray
    from mmnnx.sharding.division import Division
    from mmnnx.sharding.logical import with_sharding_constraint
    from mmnnx.sharding.mesh import MultiMesh, TaskMesh
    from mmnnx.sharding.path_filter import path
    from mmnnx.sharding.pipeline import pipeline_sharding
    from mmnnx.sharding.placement import PlacementError, TaskSharding
    from mmnnx.sharding.registered_tasks import clear_tasks, register_task
    from mmnnx.sharding.rules import LogicalRules, logical_rules
    from mmnnx.sharding.shard_map import shard_map
    from mmnnx.sharding.task import Task
    from mmnnx.sharding.task_wrapper import task

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Costs",
    "Description",
    "DividedArray",
    "Division",
    "LogicalRules",
    "ModelTable",
    "MultiMesh",
    "PlacementError",
    "PlacementView",
    "Plan",
    "Profile",
    "Program",
    "Stages",
    "Task",
    "TaskMesh",
    "TaskSharding",
    "Timeline",
    "TimelineView",
    "TransferTable",
    "VerificationError",
    "clear_tasks",
    "describe",
    "enable_recomputation",
    "enable_task_fusion",
    "fetch",
    "generate",
    "ignore_transforms",
    "initialize",
    "jit",
    "load_executables",
    "load_ipython_extension",
    "logical_rules",
    "microbatch",
    "path",
    "pipeline_sharding",
    "plan",
    "read_schedule",
    "register_schedule",
    "register_task",
    "shard_map",
    "show_placement",
    "show_transfers",
    "tabulate",
    "target",
    "task",
    "timeline",
    "with_sharding_constraint",
    "write_schedule",
]

_HOMES = {  # where each name is defined
    "mmnnx.inspect.describe": ("Description", "describe"),
    "mmnnx.inspect.model_table": ("ModelTable",),
    "mmnnx.inspect.notebook": ("load_ipython_extension",),
    "mmnnx.inspect.placement": ("PlacementView", "show_placement"),
    "mmnnx.inspect.tabulate": ("tabulate",),
    "mmnnx.inspect.timeline": ("TimelineView", "timeline"),
    "mmnnx.inspect.transfers": ("TransferTable", "show_transfers"),
    "mmnnx.modules.generate": ("generate",),
    "mmnnx.mpmd.compile.saved_executables": ("load_executables",),
    "mmnnx.mpmd.distributed.fetch": ("fetch",),
    "mmnnx.mpmd.distributed.initialize": ("initialize",),
    "mmnnx.mpmd.frontend.microbatch": ("microbatch",),
    "mmnnx.mpmd.ir.program": ("Program",),
    "mmnnx.mpmd.ir.timeline": ("Costs", "Profile", "Timeline"),
    "mmnnx.mpmd.ir.timetable": ("Action", "Stages"),
    "mmnnx.mpmd.ir.verify": ("VerificationError",),
    "mmnnx.mpmd.jit.contexts": ("enable_recomputation", "enable_task_fusion", "ignore_transforms"),
    "mmnnx.mpmd.jit.jit": ("jit",),
    "mmnnx.mpmd.schedule.base": ("register_schedule",),
    "mmnnx.mpmd.schedule.table_csv": ("read_schedule", "write_schedule"),
    "mmnnx.plan.planning": ("Plan",),
    "mmnnx.plan.targets": ("target",),
    "mmnnx.sharding.divided_array": ("DividedArray",),
    "mmnnx.sharding.division": ("Division",),
    "mmnnx.sharding.logical": ("with_sharding_constraint",),
    "mmnnx.sharding.mesh": ("MultiMesh", "TaskMesh"),
    "mmnnx.sharding.path_filter": ("path",),
    "mmnnx.sharding.pipeline": ("pipeline_sharding",),
    "mmnnx.sharding.placement": ("PlacementError", "TaskSharding"),
    "mmnnx.sharding.registered_tasks": ("clear_tasks", "register_task"),
    "mmnnx.sharding.rules": ("LogicalRules", "logical_rules"),
    "mmnnx.sharding.shard_map": ("shard_map",),
    "mmnnx.sharding.task": ("Task",),
    "mmnnx.sharding.task_wrapper": ("task",),
}
_PACKAGES = ("inspect", "modules", "mpmd", "sharding")


if not TYPE_CHECKING:  # for which every name would be one of mmnnx

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"mmnnx.{name}")
        for module, names in _HOMES.items():
            if name in names:
                value = globals()[name] = getattr(importlib.import_module(module), name)
                return value
        raise AttributeError(f"module 'mmnnx' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
