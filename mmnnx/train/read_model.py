"""The model of a run, or a published one, over stages of devices: to generate with, and to evaluate."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

import mmnnx as mm
from mmnnx.modules import LM, LMConfig
from mmnnx.sharding.pipeline import pipeline_sharding
from mmnnx.sharding.rules import logical_rules
from mmnnx.train.checkpoint import Checkpoints
from mmnnx.train.config import Precision
from mmnnx.train.devices import choose_devices
from mmnnx.train.errors import UserError, above_zero
from mmnnx.train.run_folder import RunFolder, read_run
from mmnnx.train.step import make_model, published
from mmnnx.train.tokens import Codec, codec_of


def stage_mesh(stages: int, tensor: int) -> mm.MultiMesh:
    """A mesh of so many stages, and devices in each.

    Raises:
      UserError: if there are not so many devices.
    """
    above_zero(stages=stages, tensor=tensor)
    devices = choose_devices(stages * tensor).reshape(stages, tensor)
    return mm.MultiMesh(axis_sizes=devices.shape, axis_names=("stage", "model"), devices=devices)


def read_model(place: str, stages: int, precision: Precision | None) -> tuple[LM, Codec]:
    """A model placed over the stages of the current mesh, and its tokenizer.

    Args:
      place: the folder of a run, whose latest checkpoint is read, or the gs:// URL of its checkpoints, or the
        folder of a published model.
      stages: how many there are.
      precision: the dtype to compute in. Default: that of the run; float32 for a published model, which is
        kept in it too.

    Raises:
      UserError, CheckpointError, OSError, ValueError: for a folder that holds no model, or one that cannot be
        read.
    """
    placed = lambda model: pipeline_sharding(model, stages, rules=logical_rules("tensor"))
    run = RunFolder(Path(place))
    if not ("://" in place or run.checkpoints.is_dir() or run.metrics.exists()):
        dtype = jnp.dtype(precision or "float32")
        _check_stages(stages, published().read_config(run.path), place)
        model = published().load(run.path, placement=placed, dtype=dtype, param_dtype=dtype)
        return model, codec_of(run.path)
    folder, trained = read_run(place)
    trained = dataclasses.replace(trained, precision=precision or trained.precision)
    model = nnx.eval_shape(lambda: make_model(trained))
    _check_stages(stages, model.config, place)
    with Checkpoints(folder) as checkpoints:
        checkpoints.restore({"model": model}, sharding=placed(model))
    return model, codec_of(trained.model)


def _check_stages(stages: int, sizes: LMConfig, place: str) -> None:
    if stages > sizes.layers:
        raise UserError(f"--stages {stages} is more than the {sizes.layers} blocks of {place}")
