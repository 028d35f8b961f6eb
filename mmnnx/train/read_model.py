"""The model of a run, or a published one, over stages of devices: to generate with, and to evaluate."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from flax import nnx

import mmnnx as mm
from mmnnx.modules import LM
from mmnnx.sharding.pipeline import pipeline_sharding
from mmnnx.sharding.rules import logical_rules
from mmnnx.train.checkpoint import Checkpoints
from mmnnx.train.devices import choose_devices
from mmnnx.train.run_folder import RunFolder
from mmnnx.train.step import make_model, published
from mmnnx.train.tokens import Codec, codec_of


def stage_mesh(stages: int, tensor: int) -> mm.MultiMesh:
    """A mesh of so many stages, and devices in each.

    Raises:
      UserError: if there are not so many devices.
    """
    devices = choose_devices(stages * tensor).reshape(stages, tensor)
    return mm.MultiMesh(axis_sizes=devices.shape, axis_names=("stage", "model"), devices=devices)


def read_model(folder: Path, stages: int, precision: str) -> tuple[LM, Codec]:
    """A model placed over the stages of the current mesh, and its tokenizer.

    Args:
      folder: of a run, whose latest checkpoint is read, or of a published model.
      stages: how many there are.
      precision: the dtype that a published model is computed and kept in; a run has its own.

    Raises:
      UserError, CheckpointError, OSError, ValueError: for a folder that holds no model, or one that cannot be
        read.
    """
    place = lambda model: pipeline_sharding(model, stages, rules=logical_rules("tensor"))
    if not (folder / "checkpoints").is_dir():
        dtype = jnp.dtype(precision)
        return published().load(folder, placement=place, dtype=dtype, param_dtype=dtype), codec_of(folder)
    run, trained = RunFolder.open(folder)
    model = nnx.eval_shape(lambda: make_model(trained))
    with Checkpoints(run.checkpoints) as checkpoints:
        checkpoints.restore({"model": model}, sharding=place(model))
    return model, codec_of(trained.model)
