"""`multimesh.jax`: tasks on submeshes, microbatches, and functions made parallel."""

from mmnnx import MultiMesh, Task, TaskMesh, clear_tasks, ignore_transforms, microbatch
from multimesh_compat.jax.constraints import autoshard, with_sharding_constraint
from multimesh_compat.jax.contexts import (
    context,
    enable_fast_path,
    enable_recomputation,
    enable_task_fusion,
    only_fuse_loop_tasks,
)
from multimesh_compat.jax.parallel import parallelize
from multimesh_compat.jax.partitioning import custom_partitioning, shard_map
from multimesh_compat.jax.tasks import register_task, task

__all__ = [
    "MultiMesh",
    "Task",
    "TaskMesh",
    "autoshard",
    "clear_tasks",
    "context",
    "custom_partitioning",
    "enable_fast_path",
    "enable_recomputation",
    "enable_task_fusion",
    "ignore_transforms",
    "microbatch",
    "only_fuse_loop_tasks",
    "parallelize",
    "register_task",
    "shard_map",
    "task",
    "with_sharding_constraint",
]
