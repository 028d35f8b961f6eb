"""`multimesh.jax`: tasks on submeshes, microbatches, and functions made parallel."""

from importlib.metadata import PackageNotFoundError, version

from mmnnx import MultiMesh, Task, TaskMesh, clear_tasks
from multimesh_compat.jax.constraints import with_sharding_constraint
from multimesh_compat.jax.contexts import (
    autoshard,
    context,
    enable_fast_path,
    enable_recomputation,
    enable_task_fusion,
    ignore_transforms,
    only_fuse_loop_tasks,
)
from multimesh_compat.jax.jitted import mjit
from multimesh_compat.jax.loop import microbatch
from multimesh_compat.jax.mesh_wrapper import MeshWrapper
from multimesh_compat.jax.parallel import parallelize
from multimesh_compat.jax.partitioning import custom_partitioning, shard_map
from multimesh_compat.jax.tasks import register_task, task

try:
    __version__ = version("mmnnx")
except PackageNotFoundError:  # run from its sources, without an installation
    __version__ = "0.0.0"

__all__ = [
    "MeshWrapper",
    "MultiMesh",
    "Task",
    "TaskMesh",
    "__version__",
    "autoshard",
    "clear_tasks",
    "context",
    "custom_partitioning",
    "enable_fast_path",
    "enable_recomputation",
    "enable_task_fusion",
    "ignore_transforms",
    "microbatch",
    "mjit",
    "only_fuse_loop_tasks",
    "parallelize",
    "register_task",
    "shard_map",
    "task",
    "with_sharding_constraint",
]
