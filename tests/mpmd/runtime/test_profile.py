"""`Program.profile`: one step that counts, and its times. Nothing is said here of how long anything takes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math

import jax
import optax
import pytest
from flax import nnx

import mmnnx as mm
from tests import models
from tests.models import in_tasks, make
from tests.mpmd.parity import arrays, assert_same, born, homes, pipeline, place, train_step
from tests.slow import few

CONVNET = (
    [("convs", 0), ("norms", 0), ("dropouts", 0)],
    [("convs", 1), ("norms", 1), ("dropouts", 1), "head"],
)


def trainer(make_model, loss, owned, per_stage=(), **options):
    """A mesh, a train step, and a model and an optimizer that have made no step."""
    mesh, tasks = pipeline(len(owned), *per_stage)
    with mesh:
        model = born(make_model, place(tasks, *owned))
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
    return mesh, train_step(mm.jit, loss, **{"microbatch": 2, **options}), model, optimizer


def mlp_trainer(**options):
    owned = ([("layers", range(2))], [("layers", range(2, 4))])
    return trainer(make(models.MLP), models.squared_error, owned, **options)


@functools.cache
def profiled(schedule: str = "1f1b", **options) -> tuple[mm.Program, mm.Profile]:
    mesh, step, model, optimizer = mlp_trainer(schedule=schedule, **options)
    with mesh:
        program = step.program(model, optimizer, models.vectors())
        return program, program.profile(model, optimizer, models.vectors())


# It is one step


@pytest.mark.slow
@pytest.mark.parametrize("donate, per_stage", [*itertools.product([(), (0, 1)], [(), (2,)])])
def test_it_counts_as_one_call(donate, per_stage):
    """Parameters, moments and counters are those of an ordinary call; so are those of calls after it."""
    results = []
    for profile in (False, True):
        options = {"donate_argnums": donate} if donate else {}
        mesh, step, model, optimizer = mlp_trainer(per_stage=per_stage, **options)
        with mesh:
            at_birth = homes(model)
            old = list(arrays(model).values())
            if profile:
                program = step.program(model, optimizer, models.vectors())
                program.profile(model, optimizer, models.vectors())
            else:
                step(model, optimizer, models.vectors())
            assert all(a.is_deleted() for a in old) == bool(donate)
            assert int(optimizer.step[...]) == 1 and homes(model) == at_birth
            step(model, optimizer, models.vectors(seed=1))
            if profile:
                program.profile(model, optimizer, models.vectors(seed=2))
            else:
                step(model, optimizer, models.vectors(seed=2))
            assert int(optimizer.step[...]) == 3
        results.append((nnx.state(model), nnx.state(optimizer)))
    assert_same(results[1], results[0])


@pytest.mark.slow
def test_state_that_is_carried_counts_once_too():
    """Statistics of BatchNorm and the random keys of Dropout, which the runs before must not move on."""
    states = []
    for profile in (False, True):
        mesh, step, model, optimizer = trainer(make(models.ConvNet), models.cross_entropy, CONVNET)
        with mesh:
            run = step.program(model, optimizer, models.images()).profile if profile else step
            run(model, optimizer, models.images())
        states.append((nnx.state(model), nnx.state(optimizer)))
    assert_same(states[1], states[0])


def test_a_step_after_it_is_not_measured():
    """Measuring ends with the profile, also with one that fails."""
    mesh, step, model, optimizer = mlp_trainer()
    with mesh:
        program = step.program(model, optimizer, models.vectors())
        with pytest.raises((TypeError, ValueError)):
            program.profile(model)
        loss, _ = step(model, optimizer, models.vectors())
    assert int(optimizer.step[...]) == 1 and float(loss) > 0


@pytest.mark.slow
def test_a_moving_task_is_profiled_on_every_slice():
    mesh, tasks = pipeline(2)
    scoped = in_tasks(make(models.MLP), {("layers", 0): mm.Task("moving", loop_dependent_mesh_slice="stage")})
    with mesh:
        model = born(scoped, place([tasks[0], *tasks], [("layers", 0)], [("layers", 1)], ["layers"]))
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
        step = train_step(mm.jit, models.squared_error, microbatch=2)
        program = step.program(model, optimizer, models.vectors())
        profile = program.profile(model, optimizer, models.vectors())
    moving = [e.mesh for e in profile.timeline.events if e.name == "moving forward"]
    assert sorted(moving) == ["stage0", "stage0", "stage1", "stage1"]
    assert program.simulate(profile.costs).makespan == profile.timeline.makespan


# What it measures


@few(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h1"])
def test_its_costs_feed_the_simulation(schedule):
    program, profile = profiled(schedule)
    again = program.simulate(profile.costs)
    assert again.makespan == profile.timeline.makespan > 0
    assert again.events == profile.timeline.events and again.transfers == profile.timeline.transfers
    assert (again.unit, profile.timeline.unit) == ("units", "s")
    assert len(profile.timeline.events) == len(program.calls)
    assert len(profile.timeline.transfers) == len(program.transfers)


def test_costs_of_one_schedule_feed_another():
    """Fragments go by name: what is measured under one schedule says how long another would take."""
    costs = profiled("gpipe")[1].costs
    other = profiled("1f1b")[0].simulate(costs)
    assert other.makespan > 0 and all(e.end > e.start for e in other.events)


def test_times_are_of_the_fragments_alone():
    """A mesh is busy, in the timeline, for the sum of the times of its calls."""
    program, profile = profiled()
    for mesh, events in profile.timeline.by_mesh().items():
        busy = sum(e.end - e.start for e in events)
        times = dict(zip(program.fragments, profile.costs.calls.values(), strict=True))
        expected = sum(times[c.fragment] for c in program.calls if program.names[c.mesh] == mesh)
        assert busy == pytest.approx(expected)


def test_times_are_those_of_something_that_ran():
    _, profile = profiled()
    costs = profile.costs
    assert profile.seconds > 0 and all(t > 0 for t in costs.calls.values())
    assert costs.latency >= 0 and costs.bandwidth > 0 and costs.dispatch > 0
    assert costs.of_transfer(10**6, "a -> b") >= costs.of_transfer(10, "a -> b") > 0
    assert math.isfinite(profile.timeline.makespan) and 0 <= profile.timeline.bubble < 1


def test_bytes_of_replicas_count_on_every_device():
    """Stages of two devices that hold the same: twice as many bytes as stages of one."""
    (_, one), (_, two) = profiled(), profiled(per_stage=(2,))
    assert two.peak_bytes == {mesh: 2 * n for mesh, n in one.peak_bytes.items()}


def test_it_prints_every_fragment():
    program, profile = profiled("zero-bubble-h1")
    text = str(profile)
    lines = text.splitlines()
    for f in program.fragments:
        assert any(line.strip().startswith(f"{f.name} ") for line in lines), f.name
    assert lines[0].startswith("step ") and "bubble" in lines[0]
    assert "transfers" in lines[-1] and len(lines) == len(program.fragments) + 2
    for bandwidth, said in ((2e9, " us + bytes / 2.00 GB/s; to start"), (math.inf, " us; to start")):
        costs = dataclasses.replace(profile.costs, bandwidth=bandwidth)
        assert said in str(dataclasses.replace(profile, costs=costs))


def test_it_draws():
    """Of the program, in units; of the profile, in seconds; both as text, picture and trace."""
    program, profile = profiled("zero-bubble-h1")
    for view, timeline in (
        (mm.timeline(program), program.simulate()),
        (mm.timeline(profile), profile.timeline),
    ):
        assert isinstance(view, mm.TimelineView) and view.timeline == timeline
        assert "stage0" in str(view) and "stage1" in str(view)
        calls = [e for e in view.trace()["traceEvents"] if e["ph"] == "X" and "backward" in e["name"]]
        assert len(calls) >= 2 * 2 * 4
        json.dumps(view.trace())


# What it refuses


def test_a_description_alone_does_not_run():
    program, _ = profiled()
    for description in (
        dataclasses.replace(program, run=None),
        mm.Program(program.instructions, program.inputs, program.outputs, program.values, program.names),
    ):
        with pytest.raises(ValueError, match="a description only"):
            description.profile()


def test_one_mesh_has_nothing_to_take_apart():
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(make(models.MLP), place(tasks[:1], ["layers"]))
        step = mm.jit(lambda model, x: model(x))
        x = jax.device_put(models.vectors()["x"], jax.devices()[0])
        program = step.program(model, x)
        with pytest.raises(ValueError, match="one TaskMesh"):
            program.profile(model, x)


@pytest.mark.slow
def test_what_was_donated_is_gone():
    """By its path, and the counters stay as they were."""
    mesh, step, model, optimizer = mlp_trainer(donate_argnums=(0, 1))
    with mesh:
        program = step.program(model, optimizer, models.vectors())
        graphdef, state = nnx.split((model, optimizer))
        before = jax.tree.map(lambda leaf: leaf, state)
        program.profile(model, optimizer, models.vectors())
        stale = nnx.merge(graphdef, before)
        with pytest.raises(ValueError, match=r"layers.*was donated to an earlier call"):
            program.profile(*stale, models.vectors())
    assert int(optimizer.step[...]) == 1
