"""Tiny runs on a little text of their own, which share what they compile."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mmnnx.train import TrainConfig, train
from mmnnx.train.run_folder import RunFolder
from tests import environment as processes

jax.devices()  # JAX starts with the devices of all tests before a run can ask for fewer


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Path:
    """The folder in which JAX keeps what these tests compile, in this process and in those they start."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module", autouse=True)
def keep_compiled(compiled) -> Iterator[None]:
    values = {
        "jax_compilation_cache_dir": str(compiled),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # or JAX would stay at what it once found there to be
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def environment(compiled) -> dict[str, str]:
    """The environment of a process that is started as a user would, but that compiles as these tests do."""
    return processes.environment() | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


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


@pytest.fixture(autouse=True)
def without_pictures() -> Iterator[None]:
    """A third of a tiny run is what draws them: `whole` has some, and no run of a single test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmnnx.train.loop.draw_pictures", lambda run: None)
        yield


@pytest.fixture(scope="session")
def whole(text, tmp_path_factory) -> RunFolder:
    """The run of ``config()``, from its first step to its last without a stop."""
    return train(tiny(text, tmp_path_factory.mktemp("whole") / "run", sample=4))


def tiny(data: Path, out: Path, /, **options) -> TrainConfig:
    sizes = dict(stages=1, tensor=1, microbatches=2, batch=4, sequence=16, steps=7, eval_every=3, warmup=2)
    sizes |= dict(layers=1, width=16, heads=2, kv_heads=2, mlp=32, sample=0)
    return TrainConfig(**(dict(data=data, out=out) | sizes | options))
