"""A small language model to plan."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.plan.language_models import TrainingJob


def small(**options) -> TrainingJob:
    """A job for CPU devices, of two blocks unless options say otherwise."""
    return TrainingJob(
        **{"model": "tiny", "target": "cpu", "stages": 2, "layers": 2, "batch": 4, "sequence": 16} | options
    )


def plan_here(job: TrainingJob) -> mm.Plan:
    """Its plan for the CPU devices of this process."""
    with job.mesh(devices_of(job)):
        model, optimizer = nnx.eval_shape(job.make)
        return mm.plan(job.train_step(model), model, optimizer, abstract_tokens(job))


def devices_of(job: TrainingJob) -> list[jax.Device]:
    """As many CPU devices as it is for."""
    return jax.devices()[: math.prod(job.axes.values())]


def abstract_tokens(job: TrainingJob) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((job.batch, job.sequence + 1), jnp.int32)


def tokens(job: TrainingJob) -> np.ndarray:
    return np.ones((job.batch, job.sequence + 1), np.int32)


@pytest.fixture(scope="module")
def plan() -> mm.Plan:
    return plan_here(small())
