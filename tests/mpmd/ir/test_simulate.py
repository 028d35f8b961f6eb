"""`Program.simulate`: times worked out by hand, residuals by the papers' formulas, and bytes."""

from __future__ import annotations

import functools

import jax
import optax
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd.ir.instructions import Call
from mmnnx.mpmd.ir.timeline import UNIT_COSTS
from tests import models
from tests.models import make
from tests.mpmd.parity import born, pipeline, place, train_step
from tests.slow import few, grid


@functools.cache
def chain(stages: int, microbatches: int, schedule: str) -> mm.Program:
    """Loss and gradients of one linear layer a stage, in microbatches of two rows."""
    return chain_of(*pipeline(stages), microbatches, schedule)


def chain_of(mesh: mm.MultiMesh, tasks: list[mm.Task], microbatches: int, schedule: str) -> mm.Program:
    """The same, on these tasks."""
    stages = len(tasks)
    with mesh:
        model = born(make(models.MLP, layers=stages), place(tasks, *[[("layers", i)] for i in range(stages)]))
        grad_fn = nnx.value_and_grad(models.squared_error)
        loop = mm.microbatch(grad_fn, 0, 2, argnum=1, schedule=schedule)
        return mm.jit(lambda model, batch: loop(model, batch)).program(
            model, models.vectors(rows=2 * microbatches)
        )


BY_NAME = {"stage0 forward": 1.0, "stage1 forward": 2.0, "stage1 backward": 3.0, "stage0 backward": 4.0}
SENT = 2 * 16 * 4  # bytes of an activation between the two stages


def spans(timeline, name) -> list[tuple[float, float]]:
    return [(e.start, e.end) for e in timeline.events if e.name == name]


# By hand, two stages and two microbatches


def test_gpipe_by_hand():
    timeline = chain(2, 2, "gpipe").simulate(mm.Costs({**BY_NAME, "outside": 0.0}))
    assert spans(timeline, "stage0 forward") == [(0, 1), (1, 2)]
    assert spans(timeline, "stage1 forward") == [(1, 3), (3, 5)]
    assert spans(timeline, "stage1 backward") == [(5, 8), (8, 11)]
    assert spans(timeline, "stage0 backward") == [(8, 12), (12, 16)]
    assert timeline.makespan == timeline.period == 16
    assert timeline.bubble == pytest.approx(1 - (10 + 10) / (2 * 16))


def test_1f1b_by_hand():
    timeline = chain(2, 2, "1f1b").simulate(mm.Costs({**BY_NAME, "outside": 0.0}))
    assert spans(timeline, "stage0 forward") == [(0, 1), (1, 2)]
    assert spans(timeline, "stage1 forward") == [(1, 3), (6, 8)]
    assert spans(timeline, "stage1 backward") == [(3, 6), (8, 11)]
    assert spans(timeline, "stage0 backward") == [(6, 10), (11, 15)]
    assert timeline.makespan == 15


@pytest.mark.parametrize(
    "costs, makespan",
    [
        ({"latency": 0.5}, 17.0),  # once there and once back
        ({"bandwidth": SENT}, 18.0),  # each array takes one unit
        ({"bandwidth": SENT / 2, "latency": 1.0}, 23.0),  # three: the second waits for one, there; none back
        ({"bandwidth": SENT / 4}, 26.0),  # four: the second waits until the way is free, there and back
    ],
)
def test_transfers_by_hand(costs, makespan):
    timeline = chain(2, 2, "gpipe").simulate(mm.Costs({**BY_NAME, "outside": 0.0}, **costs))
    assert timeline.makespan == makespan
    took = costs.get("latency", 0.0) + SENT / costs.get("bandwidth", float("inf"))
    assert [e.end - e.start for e in timeline.transfers] == [took] * 4
    assert {e.mesh for e in timeline.transfers} == {"stage0 -> stage1", "stage1 -> stage0"}
    for way in ("stage0 -> stage1", "stage1 -> stage0"):
        one, two = (e for e in timeline.transfers if e.mesh == way)
        assert one.end <= two.start and (one.microbatch, two.microbatch) == (0, 1)


def test_a_host_that_is_slow_to_start_work():
    """The n-th instruction starts at n times what it takes to start one, and nothing overlaps."""
    program = chain(2, 2, "1f1b")
    timeline = program.simulate(mm.Costs({**BY_NAME, "outside": 0.0}, dispatch=10.0))
    starts = sorted(e.start for e in (*timeline.events, *timeline.transfers))
    assert starts == [10.0 * n for n in range(1, len(program.instructions) + 1)]
    assert timeline.makespan == starts[-1] + BY_NAME["stage0 backward"]


def test_a_fragment_that_is_slow_to_start():
    """Its own time to start is in the place of that of others, for each of its two calls."""
    program = chain(2, 2, "1f1b")
    costs = mm.Costs(
        {**BY_NAME, "outside": 0.0}, dispatch=10.0, dispatches={"stage1 forward": 15.0, "stage0 forward": 0.0}
    )
    timeline = program.simulate(costs)
    starts = sorted(e.start for e in (*timeline.events, *timeline.transfers))
    assert starts[-1] == 10.0 * (len(program.instructions) - 4) + 2 * 15.0


def test_what_is_slow_to_start_is_there():
    costs = mm.Costs({**BY_NAME, "outside": 0.0}, dispatches={"stage9 forward": 1.0})
    with pytest.raises(ValueError, match="there is no 'stage9 forward'; there are"):
        chain(2, 2, "1f1b").simulate(costs)


def test_each_process_starts_what_is_on_its_devices():
    """Two hosts with a stage each, as a described machine has them: transfers are started by both."""
    mesh = mm.MultiMesh(devices=mm.target("v5p:2x2x2"), axis_sizes=(2, 4), axis_names=("stage", "model"))
    tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(2)]
    placement = place(tasks, [("layers", 0)], [("layers", 1)])
    loop = mm.microbatch(nnx.value_and_grad(models.squared_error), 0, 2, argnum=1, schedule="gpipe")
    with mesh:
        model = nnx.eval_shape(make(models.MLP, layers=2))
        batch = jax.eval_shape(lambda: models.vectors(rows=8))
        step = mm.jit(lambda model, batch: loop(model, batch), in_shardings=(placement, None))
        program = step.program(model, batch)
    timeline = program.simulate(mm.Costs(dict.fromkeys([*UNIT_COSTS, "outside"], 0.0), dispatch=1.0))
    calls = [sum(e.mesh == name for e in timeline.events) for name in ("stage0", "stage1")]
    assert min(calls) >= 8 and len(timeline.transfers) >= 8
    started = max(e.start for e in (*timeline.events, *timeline.transfers))
    assert started == max(calls) + len(timeline.transfers) < len(program.instructions)


def test_meshes_that_share_devices_take_turns():
    """Three stages on devices 0, 0 and 1, and 1: the first and the last have none in common."""
    mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",))
    tasks = [
        mm.Task(name, mesh=mm.TaskMesh(devices=devices, axis_sizes=(len(devices),), axis_names=(name,)))
        for name, devices in (("first", [0]), ("both", [0, 1]), ("last", [1]))
    ]
    program = chain_of(mesh, tasks, 2, "gpipe")
    forward, backward = 1.0, 2.0
    timeline = program.simulate(mm.Costs({"forward": forward, "backward": backward, "outside": 0.0}))
    assert spans(timeline, "first forward") == [(0, 1), (1, 2)]
    assert spans(timeline, "both forward") == [(2, 3), (3, 4)]  # not at 1: device 0 is busy
    assert spans(timeline, "last forward") == [(4, 5), (5, 6)]
    assert spans(timeline, "last backward") == [(6, 8), (10, 12)]
    assert spans(timeline, "both backward") == [(8, 10), (12, 14)]  # each as soon as it can be
    assert spans(timeline, "first backward") == [(10, 12), (14, 16)]
    assert timeline.period == 16  # of device 0
    assert timeline.bubble == pytest.approx(1 - (6 + 2 * 6 + 6) / (2 * 16))


def test_tasks_on_one_device_leave_it_no_bubble():
    mesh = mm.MultiMesh(axis_sizes=(1,), axis_names=("stage",))
    meshes = [mm.TaskMesh(devices=[0], axis_sizes=(1,) * n) for n in (1, 2)]
    program = chain_of(mesh, [mm.Task(f"stage{n}", mesh=m) for n, m in enumerate(meshes)], 4, "1f1b")
    timeline = program.simulate(mm.Costs({**BY_NAME, "outside": 0.0}))
    assert timeline.period == timeline.makespan == 4 * sum(BY_NAME.values())
    assert timeline.bubble == pytest.approx(0)


def test_a_mapping_is_by_phase_or_name():
    """A name goes before its phase; what is not named has one unit, or two for a whole backward."""
    program = chain(2, 2, "gpipe")
    assert program.simulate({"outside": 0.0}).makespan == 3 * (2 + 1)
    assert program.simulate({"outside": 0.0, "forward": 3.0}).makespan == 5 * (2 + 1)
    assert program.simulate({"outside": 0.0, **BY_NAME}).makespan == 16
    assert program.simulate({"outside": 0.0, **BY_NAME, "forward": 100.0}).makespan == 16
    assert program.simulate({"outside": 5.0}).makespan == 5 + 3 * (2 + 1)


def test_what_a_mapping_leaves_out_is_as_without_one():
    """Also what is outside the loop, which then takes no time."""
    program = chain(2, 2, "gpipe")
    assert program.simulate({}).makespan == program.simulate().makespan
    assert program.simulate(dict(UNIT_COSTS)).makespan == program.simulate().makespan
    assert program.simulate({"backward": 4.0}).makespan == 5 * (2 + 1)


def test_costs_that_say_nothing_of_a_phase():
    """They are refused by the name of what they lack."""
    with pytest.raises((KeyError, ValueError), match="backward"):
        chain(2, 2, "gpipe").simulate(mm.Costs({"forward": 1.0, "outside": 0.0}))


def test_the_parts_of_a_backward_by_hand():
    """Two stages, two microbatches: the first stage's weights, one late, fill the time that it would wait."""
    costs = {"forward": 2.0, "backward-input": 3.0, "backward-weight": 1.0, "outside": 0.0}
    timeline = chain(2, 2, "zero-bubble-h1").simulate(costs)
    assert spans(timeline, "stage1 forward") == [(2, 4), (7, 9)]
    assert spans(timeline, "stage1 backward-input") == [(4, 7), (9, 12)]
    assert spans(timeline, "stage1 backward-weight") == [(12, 13), (13, 14)]


def test_events_are_all_calls_and_transfers():
    program = chain(3, 4, "1f1b")
    timeline = program.simulate()
    found = sorted((e.name, e.microbatch or -1, e.stage or -1, e.phase, e.mesh) for e in timeline.events)
    assert found == sorted(
        (c.name, c.microbatch or -1, c.stage or -1, c.phase, program.names[c.mesh]) for c in program.calls
    )
    assert len(timeline.transfers) == len(program.transfers)


# Residuals in flight


@few(5)
@pytest.mark.parametrize("stages, microbatches", [(2, 1), (2, 5), (4, 2), (4, 4), (4, 8)])
@pytest.mark.parametrize(
    "schedule, formula",
    [
        ("gpipe", lambda s, p, m: m),
        ("1f1b", lambda s, p, m: min(s - p, m)),
        ("zero-bubble-h1", lambda s, p, m: min(s, m)),
    ],
)
def test_residuals_in_flight(stages, microbatches, schedule, formula):
    """GPipe M, 1F1B S - s, ZB-H1 at most S on every mesh."""
    found = chain(stages, microbatches, schedule).simulate().in_flight()
    expected = {f"stage{s}": formula(stages, s, microbatches) for s in range(stages)}
    if schedule == "zero-bubble-h1":
        assert found.keys() == expected.keys() and all(found[k] <= expected[k] for k in expected)
        assert found["stage0"] == expected["stage0"]
    else:
        assert found == expected


# Bytes

ONE_BY_ONE = mm.Costs({**UNIT_COSTS, "none": 1.0, "backward": 1.0}, latency=1.0, dispatch=2.0)
"""Each instruction ends before the next starts."""


@functools.cache
def profiled(schedule: str, donate: bool) -> tuple[mm.Program, mm.Profile]:
    """A whole train step over three stages, and what it measures."""
    mesh, tasks = pipeline(3)
    with mesh:
        model = born(make(models.MLP, layers=3), place(tasks, *[[("layers", i)] for i in range(3)]))
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
        options = {"donate_argnums": (0, 1)} if donate else {}
        step = train_step(mm.jit, models.squared_error, microbatch=2, schedule=schedule, **options)
        program = step.program(model, optimizer, models.vectors())
        return program, program.profile(model, optimizer, models.vectors())


SCHEDULES = ["gpipe", "1f1b", "zero-bubble-h1"]
SCALARS = 8  # bytes: counters of the optimizer, of which each mesh has a copy that no caller can give up


@pytest.mark.parametrize("schedule, donate", grid(SCHEDULES, [False, True]))
def test_bytes_are_those_of_the_arrays(schedule, donate):
    """One instruction at a time, in simulation and measured: the same peak on every mesh."""
    program, profile = profiled(schedule, donate)
    simulated = program.simulate(ONE_BY_ONE).peak_bytes
    assert list(simulated) == list(profile.peak_bytes) == list(profile.residual_bytes)
    off = {mesh: profile.peak_bytes[mesh] - n for mesh, n in simulated.items()}
    assert all(abs(n) <= SCALARS for n in off.values()), off
    if not donate:
        assert not any(off.values()), off


@few(2)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_takes_no_time_takes_memory(schedule, donate):
    """By default nothing outside the loop takes time: its arrays are there all the same.

    As many bytes as if it took next to none; the update of Adam's moments is most of them here.
    """
    program, _ = profiled(schedule, donate)
    almost = program.simulate({"outside": 1e-6}).peak_bytes
    assert dict(program.simulate({"outside": 0.0}).peak_bytes) == dict(almost)
    assert dict(program.simulate().peak_bytes) == dict(almost)


@pytest.mark.slow
def test_donation_needs_fewer_bytes():
    for schedule in SCHEDULES:
        kept, given = (profiled(schedule, donate)[1].peak_bytes for donate in (False, True))
        assert all(given[mesh] < kept[mesh] for mesh in ("stage0", "stage1")), schedule


def test_bytes_of_schedules_differ_by_what_they_hold():
    """Of four stages the second holds eight microbatches under GPipe; three under 1F1B, and one arrives."""
    gpipe, other = (chain(4, 8, name).simulate() for name in ("gpipe", "1f1b"))
    assert all(gpipe.peak_bytes[f"stage{s}"] >= other.peak_bytes[f"stage{s}"] for s in range(4))
    assert (gpipe.in_flight()["stage1"], other.in_flight()["stage1"]) == (8, 3)
    each, rest = divmod(gpipe.residual_bytes["stage1"], 8)
    assert each >= SENT and not rest
    assert 3 * each <= other.residual_bytes["stage1"] <= 4 * each
    assert gpipe.peak_bytes["stage1"] - other.peak_bytes["stage1"] >= 4 * each


def test_one_mesh_at_a_time_and_all_in_order():
    """Whatever the costs: a mesh does one thing at a time, and nothing starts before what it reads."""
    program = chain(4, 8, "zero-bubble-h1")
    timeline = program.simulate(mm.Costs({**UNIT_COSTS, "stage2 forward": 3.7}, latency=0.3, bandwidth=640.0))
    for events in timeline.by_mesh().values():
        assert all(a.end <= b.start for a, b in zip(events[:-1], events[1:], strict=True))
    calls, sends = iter(timeline.events), iter(timeline.transfers)
    ready = dict.fromkeys(program.inputs, 0.0)
    for i in program.instructions:
        event = next(calls) if isinstance(i, Call) else next(sends)
        assert event.start >= max((ready[s] for s in i.inputs), default=0.0)
        ready.update(dict.fromkeys(i.outputs, event.end))


def test_each_way_has_its_bandwidth():
    program = chain(3, 2, "gpipe")
    costs = mm.Costs(UNIT_COSTS, bandwidth=1e3, bandwidths={"stage0 -> stage1": 1e2})
    took = {e.mesh: e.end - e.start for e in program.simulate(costs).transfers}
    sent = {f"{t.source} -> {t.target}": t.nbytes for t in program.transfers}
    assert took["stage0 -> stage1"] == pytest.approx(sent["stage0 -> stage1"] / 1e2)
    assert took["stage1 -> stage2"] == pytest.approx(sent["stage1 -> stage2"] / 1e3)
