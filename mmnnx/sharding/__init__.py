"""Meshes, tasks, and the placement of state.

What comes in: devices, and what the user says about them: meshes, tasks, rules, PartitionSpecs, axis names.
What goes out: the task and the NamedSharding of each piece of state, and the task of each equation.
What always holds: nothing is computed or moved here, and rules that cannot hold raise before anything runs.
Read first: `task.py` (what a task is), then `placement.py` (state) and `task_scope.py` (computation).
"""

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

__all__ = [
    "DividedArray",
    "Division",
    "LogicalRules",
    "MultiMesh",
    "PlacementError",
    "Task",
    "TaskMesh",
    "TaskSharding",
    "clear_tasks",
    "logical_rules",
    "path",
    "pipeline_sharding",
    "register_task",
    "shard_map",
    "task",
    "with_sharding_constraint",
]
