"""mmnnx: Flax NNX programs over several device submeshes (MPMD), on stock JAX."""

from mmnnx.inspect import ModelTable, PlacementView, TimelineView, show_placement, tabulate, timeline
from mmnnx.modules import generate
from mmnnx.mpmd.compile.saved_executables import load_executables
from mmnnx.mpmd.distributed.fetch import fetch
from mmnnx.mpmd.distributed.initialize import initialize
from mmnnx.mpmd.frontend.microbatch import microbatch
from mmnnx.mpmd.ir.program import Program
from mmnnx.mpmd.ir.timeline import Costs, Profile, Timeline
from mmnnx.mpmd.ir.verify import VerificationError
from mmnnx.mpmd.jit.contexts import enable_recomputation, enable_task_fusion, ignore_transforms
from mmnnx.mpmd.jit.jit import jit
from mmnnx.mpmd.schedule import Action, Stages, read_schedule, register_schedule, write_schedule
from mmnnx.plan import Plan, plan, target
from mmnnx.sharding import (
    DividedArray,
    Division,
    LogicalRules,
    MultiMesh,
    PlacementError,
    Task,
    TaskMesh,
    TaskSharding,
    clear_tasks,
    logical_rules,
    path,
    pipeline_sharding,
    register_task,
    shard_map,
    task,
    with_sharding_constraint,
)

__all__ = [
    "Action",
    "Costs",
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
    "VerificationError",
    "clear_tasks",
    "enable_recomputation",
    "enable_task_fusion",
    "fetch",
    "generate",
    "ignore_transforms",
    "initialize",
    "jit",
    "load_executables",
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
    "tabulate",
    "target",
    "task",
    "timeline",
    "with_sharding_constraint",
    "write_schedule",
]
