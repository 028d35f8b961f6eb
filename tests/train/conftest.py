"""Tiny runs on a little text of their own."""

from __future__ import annotations

import random
from pathlib import Path

import jax
import pytest

from mmnnx.train import TrainConfig, train
from mmnnx.train.folder import RunFolder

jax.devices()  # JAX starts with the devices of all tests before a run can ask for fewer


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A folder of text: sentences over a few words, easy to learn something of."""
    folder = tmp_path_factory.mktemp("text")
    words = ["pipeline", "stage", "micro", "batch", "forward", "and", "backward", "the", "of", "a"]
    rng = random.Random(0)
    for i in range(40):
        (folder / f"chapter{i:02d}.txt").write_text(" ".join(rng.choices(words, k=200)) + ".\n")
    return folder


@pytest.fixture
def config(text, tmp_path):
    """``config(seed=1, ...)``: the config of a run that takes seconds, on one device if not told else."""
    return lambda **options: tiny(text, tmp_path / "run", **options)


@pytest.fixture(scope="session")
def whole(text, tmp_path_factory) -> RunFolder:
    """The run of ``config()``, from its first step to its last without a stop."""
    return train(tiny(text, tmp_path_factory.mktemp("whole") / "run", sample=4))


def tiny(data: Path, out: Path, /, **options) -> TrainConfig:
    sizes = dict(stages=1, tensor=1, microbatches=2, batch=4, sequence=16, steps=7, eval_every=3, warmup=2)
    sizes |= dict(layers=1, width=16, heads=2, kv_heads=2, mlp=32, sample=0)
    return TrainConfig(**(dict(data=data, out=out) | sizes | options))
