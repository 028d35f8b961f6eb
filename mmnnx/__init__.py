"""mmnnx: Flax NNX programs over several device submeshes (MPMD), on stock JAX."""

from mmnnx.mpmd.jit import ignore_transforms, jit
from mmnnx.mpmd.microbatch import microbatch
from mmnnx.mpmd.program import Program
from mmnnx.sharding import (
    MultiMesh,
    PlacementError,
    Task,
    TaskMesh,
    TaskSharding,
    clear_tasks,
    path,
    register_task,
    shard_map,
    task,
    with_sharding_constraint,
)

__all__ = [
    "MultiMesh",
    "PlacementError",
    "Program",
    "Task",
    "TaskMesh",
    "TaskSharding",
    "clear_tasks",
    "ignore_transforms",
    "jit",
    "microbatch",
    "path",
    "register_task",
    "shard_map",
    "task",
    "with_sharding_constraint",
]
