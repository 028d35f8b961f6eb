"""`multimesh.jax.flax`: tasks made of linen modules, and train steps of them."""

from multimesh_compat.jax.constraints import with_sharding_constraint
from multimesh_compat.jax.flax.axes import shard_axes
from multimesh_compat.jax.flax.modules import task
from multimesh_compat.jax.flax.step import parallelize_step

__all__ = ["parallelize_step", "shard_axes", "task", "with_sharding_constraint"]
