"""What a run consists of, once it is ready to take steps."""

from __future__ import annotations

import dataclasses

from flax import nnx

import mmnnx as mm
from mmnnx.modules import LM
from mmnnx.mpmd.jit.jit import Jit
from mmnnx.train.config import TrainConfig
from mmnnx.train.inputs import Data
from mmnnx.train.run_folder import RunFolder


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run.

    Attributes:
      start: the step of the checkpoint that it goes on from, or 0.
      train_step: it updates the model and the optimizer, which live on the mesh.
    """

    config: TrainConfig
    data: Data
    folder: RunFolder
    start: int
    mesh: mm.MultiMesh
    model: LM
    optimizer: nnx.Optimizer
    train_step: Jit
