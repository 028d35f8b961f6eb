"""Checkpoints: the state of a run, written while it goes on and read back onto whatever devices there are.

One step is a folder that orbax itself can read:

    STEP/state/       the arrays, by their paths (model/blocks/0/mlp/up/kernel): zarr3 in OCDBT files
    STEP/placement/   placement.json: shape, dtype, task and PartitionSpec of each, meshes, versions
    STEP/data/, config/, metrics/   JSON, where it was given
"""

from mmnnx.train.checkpoint.checkpoints import Checkpoints, Restored
from mmnnx.train.checkpoint.errors import CheckpointError, DamagedError, StructureError

__all__ = ["CheckpointError", "Checkpoints", "DamagedError", "Restored", "StructureError"]
