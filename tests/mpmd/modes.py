"""A function under `nnx.jit`, under `mm.jit` on one device, and under `mm.jit` over two meshes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import pytest
from flax import nnx

import mmnnx as mm
from tests.mpmd.parity import born, pipeline


class Pair(nnx.Module):
    """Two layers, a counter and a static attribute."""

    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.second = nnx.Linear(4, 3, rngs=rngs)
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.mode = "plain"

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@dataclasses.dataclass
class Mode:
    """A jit, and how to make a model for it."""

    jit: Callable
    make: Callable[[Callable], nnx.Module]
    split: bool


# Under nnx.jit a test is checked, rather than what it tests.
@pytest.fixture(params=[pytest.param("nnx.jit", marks=pytest.mark.slow), "mm.jit", "mm.jit split"])
def mode(request):
    mesh, tasks = pipeline(2)
    with contextlib.ExitStack() as stack:
        if request.param == "nnx.jit":
            yield Mode(nnx.jit, lambda make: make(), split=False)
        elif request.param == "mm.jit":
            yield Mode(mm.jit, lambda make: make(), split=False)
        else:
            stack.enter_context(mesh)
            placement = mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]})
            yield Mode(mm.jit, lambda make: born(make, placement), split=True)
