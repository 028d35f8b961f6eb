"""Checkpoints: the state of a run, written in the background and restored onto any devices.

What comes in: NNX objects by name, and JSON. What goes out: the same objects with their state set in place.
What always holds: a step that is not complete is not seen; damage is found before state is changed.
Read first: `checkpoints.py`; then `write.py` (arrays to disk), or `match.py` and `read.py` (and back).

One step is a folder that orbax itself can read:

    STEP/state/       the arrays, by their paths (model.blocks.0.mlp.up.kernel): zarr3 in OCDBT files
    STEP/placement/   placement.json: shape, dtype, task and PartitionSpec of each, meshes, versions
    STEP/data/, config/, metrics/   JSON, if it was given
"""

from mmnnx.train.checkpoint.checkpoints import Checkpoints, Restored
from mmnnx.train.checkpoint.errors import CheckpointError, DamagedError, StructureError

__all__ = ["CheckpointError", "Checkpoints", "DamagedError", "Restored", "StructureError"]
