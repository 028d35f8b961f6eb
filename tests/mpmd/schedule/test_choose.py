"""The schedule of a loop that names none, where there is little to choose from."""

import jax
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.ir.timetable import Stages
from mmnnx.mpmd.schedule.choose import candidates
from tests.mpmd.parity import born, pipeline, place

BOTH = {"backward-input", "backward-weight"}


class Two(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.second(jax.numpy.tanh(self.first(x)))


def make():
    return Two(nnx.Rngs(0))


mesh, tasks = pipeline(2)
placement = place(tasks, ["first"], ["second"])


def test_one_for_forwards_alone_and_one_that_is_named():
    chain = Stages.chain((0, 1))
    assert candidates(LoopSpec(length=4), chain, {0: set(), 1: set()}) == ["gpipe"]
    assert candidates(LoopSpec("zbv", length=4), chain, {0: BOTH, 1: BOTH}) == ["zbv"]
    assert len(candidates(LoopSpec(length=4), chain, {0: BOTH, 1: BOTH})) > 3


def test_a_limit_that_a_loop_without_backward_cannot_keep():
    """There is nothing else to try: it is said, and not looked for for ever."""
    with mesh:
        model = born(make, placement)
        run = mm.jit(mm.microbatch(lambda m, x: m(x).sum(), dim=0, size=1, argnum=1, memory_limit=8))
        with pytest.raises(ValueError, match=r"memory_limit=8 bytes for one TaskMesh is too little: stage"):
            run.program(model, np.ones((4, 8), np.float32))


def test_options_that_no_schedule_has_for_such_stages():
    with mesh:
        model = born(make, placement)
        grad = nnx.value_and_grad(lambda m, x: (m(x) ** 2).sum())
        run = mm.jit(mm.microbatch(grad, dim=0, size=1, argnum=1, interleave=3))
        with pytest.raises(
            ValueError, match=r"no schedule is for 2 stages on meshes 0, 1 and 4 micro.*interleave=3"
        ):
            run.program(model, np.ones((4, 8), np.float32))
