"""A second call with the same shapes traces and compiles nothing: what `JAX_LOG_COMPILES=1` would say of the
main job, after its first step, validation and sample, and after a restore."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from mmnnx.train import TrainConfig
from mmnnx.train.checkpoint import Checkpoints
from mmnnx.train.sample import sample
from mmnnx.train.step import create, make_train_step, make_validate, place

CONFIG = TrainConfig(
    **dict(stages=2, tensor=2, microbatches=2, batch=4, sequence=8),
    **dict(layers=2, width=16, heads=2, kv_heads=2, mlp=32),
)


@pytest.fixture
def compiled(caplog) -> Callable[[Callable[[], Any]], list[str]]:
    """``compiled(f)``: calls f and returns what JAX logs of tracing, lowering and compiling."""

    def run(f):
        caplog.clear()
        with caplog.at_level(logging.WARNING), jax.log_compiles():
            jax.block_until_ready(f())
        return [record.getMessage() for record in caplog.records]

    return run


def test_the_main_job_compiles_once(compiled, tmp_path):
    devices = np.array(jax.devices()[: CONFIG.stages * CONFIG.tensor])
    mesh, placement = place(CONFIG, devices)
    tokens = np.random.default_rng(0).integers(0, 256, (CONFIG.batch, CONFIG.sequence + 1), np.int32)
    with mesh, Checkpoints(tmp_path / "checkpoints") as checkpoints:
        model, optimizer = create(CONFIG, placement)
        train_step, validate = make_train_step(CONFIG), make_validate(tokens[None])
        calls = {
            "train": lambda: train_step(model, optimizer, tokens),
            "validate": lambda: validate(model),
            "sample": lambda: sample(model, b"abcd", 6, CONFIG.sequence, seed=0),
        }
        for name, call in calls.items():
            assert any("Compiling" in message for message in compiled(call)), name
        for name, call in calls.items():
            assert compiled(call) == [], name

        checkpoints.save(1, {"model": model, "optimizer": optimizer})
        checkpoints.restore({"model": model, "optimizer": optimizer})
        for name, call in calls.items():
            assert compiled(call) == [], f"{name} after a restore"
