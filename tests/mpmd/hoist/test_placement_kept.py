"""Sums that are grouped and work that is hoisted are where they would be if all were placed anew."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd import pipeline as compiler
from mmnnx.mpmd.ir.equations import Loop, is_var
from mmnnx.mpmd.ir.origin import FREE, at_home
from mmnnx.mpmd.partition.timetable import fits
from mmnnx.mpmd.place.place import _cheapest
from mmnnx.mpmd.place.region import Problem
from tests.mpmd.parity import pipeline
from tests.slow import few


class Tied(nnx.Module):
    """An embedding that the last stage reads again, and a layer on each stage."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.second(jax.nn.relu(self.first(self.embed(tokens)))))


def loss_fn(model, tokens):
    return (model(tokens) ** 2).mean()


@pytest.fixture
def stages(monkeypatch):
    """(function, flat, placed, hoisted) of each function that is split."""
    found = []
    hoist = compiler.hoist

    def watched(function, placed):
        loops = [*placed.placement.bodies]
        found.append((function, placed.flat, placed, hoist(function, placed)))
        assert [*placed.placement.bodies] == loops, "what is handed in stays as it is"
        return found[-1][-1]

    monkeypatch.setattr(compiler, "hoist", watched)
    return found


def placed_anew(function, flat, nodes):
    """The placement of nodes that were placed before."""
    shardings = function.shardings
    inputs = {v: at_home(home) for v, home in zip(flat.invars, shardings.homes)}
    inputs |= {v: FREE for v, _ in flat.constants}
    follows = {
        v: flat.invars[n] for v, n in zip(flat.outvars, shardings.follows) if n is not None and is_var(v)
    }
    return _cheapest(Problem(nodes, inputs, function.task_of, follows, fits, {}))


def assert_alike(nodes, one, other):
    for node in nodes:
        if isinstance(node, Loop):
            assert_alike(node.body, one.bodies[node], other.bodies[node])
        else:
            assert one.locations.get(node) == other.locations.get(node), node
            assert one.phases.get(node) == other.phases.get(node), node
        for v in node.outvars:
            assert one.where[v].home == other.where[v].home, node


@few(1)
@pytest.mark.parametrize("spec", [P(), P("data")], ids=["data", "fsdp"])
def test_each_stage_hands_on_what_would_be_placed(stages, spec):
    mesh, tasks = pipeline(2, 2, axes=("data",))
    placement = mm.TaskSharding(
        {
            mm.path("embed"): (tasks[0], spec),
            mm.path("first"): (tasks[0], spec),
            mm.path("second"): (tasks[1], spec),
        }
    )

    @mm.jit
    def step(model, tokens):
        grad_fn = nnx.value_and_grad(loss_fn)
        loss, grads = mm.microbatch(
            grad_fn, dim=0, size=2, argnum=1, schedule="1f1b", arg_shardings=P("data")
        )(model, tokens)
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    with mesh:
        model = mm.jit(lambda: Tied(nnx.Rngs(0)), out_shardings=placement)()
        step.program(model, np.zeros((4, 3), np.int32))
    function, flat, placed, hoisted = stages[-1]
    (loop,) = (node for node in hoisted.nodes if isinstance(node, Loop))
    assert loop.parts and not loop.not_hoisted  # there is something to hoist, and it is
    assert len(loop.carries) > len(next(n for n in flat.nodes if isinstance(n, Loop)).carries)
    assert_alike(placed.nodes, placed.placement, placed_anew(function, flat, placed.nodes))
    assert_alike(hoisted.nodes, hoisted.placement, placed_anew(function, flat, hoisted.nodes))
