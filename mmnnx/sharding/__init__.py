"""Where things live: meshes, tasks, and the placement of state."""

from mmnnx.sharding.logical import with_sharding_constraint
from mmnnx.sharding.mesh import MultiMesh, TaskMesh
from mmnnx.sharding.pipeline import pipeline_sharding
from mmnnx.sharding.placement import PlacementError, TaskSharding, path
from mmnnx.sharding.rules import LogicalRules, logical_rules
from mmnnx.sharding.shard_map import shard_map
from mmnnx.sharding.task import Task, clear_tasks, register_task, task

__all__ = [
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
