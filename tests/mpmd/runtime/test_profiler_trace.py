"""A trace of jax.profiler names every fragment call and transfer: its task, phase and microbatch."""

import gzip
import json
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd.compile.rewrites import rewrite
from tests.mpmd.parity import pipeline


class Chain(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jax.numpy.tanh(layer(x))
        return x


def loss_fn(model, x):
    return model(x).mean()


@pytest.mark.slow
def test_instructions_are_named_in_a_trace(tmp_path):
    """Each once for each time that it ran; outside of a trace as well a call does the same."""
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("layers", n): task for n, task in enumerate(tasks)})
    x = np.ones((6, 4), np.float32)
    with mesh:
        model = mm.jit(Chain, out_shardings=placement)()

        @mm.jit
        def step(model, x):
            return mm.microbatch(nnx.value_and_grad(loss_fn), dim=0, size=2, argnum=1, schedule="1f1b")(
                model, x
            )

        before = jax.block_until_ready(step(model, x))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(tmp_path, profiler_options=options)
        try:
            during = [jax.block_until_ready(step(model, x)) for _ in range(2)]
        finally:
            jax.profiler.stop_trace()
        program = rewrite(step.program(model, x)).program

    (file,) = tmp_path.glob("**/*.trace.json.gz")
    with gzip.open(file) as text:
        found = Counter(event.get("name") for event in json.load(text)["traceEvents"])
    expected = Counter(2 * [program.describe(i) for i in program.instructions])
    assert {name: found[name] for name in expected} == dict(expected)
    names = set(expected)
    assert any("stage0 forward [microbatch 2]" in name for name in names)
    assert any("stage1 forward and stage1 backward [microbatch 0]" in name for name in names)
    assert any("[microbatch 1] stage0 -> stage1" in name for name in names)
    jax.tree.map(np.testing.assert_array_equal, during[0], before)
