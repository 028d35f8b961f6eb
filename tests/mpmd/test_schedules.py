"""Schedules: the tables themselves, what they cost on a chain, and schedules of a user's own."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd import schedule as schedules
from mmnnx.mpmd.microbatch import LoopSpec
from mmnnx.mpmd.order import order_loop
from mmnnx.mpmd.program import Timeline
from mmnnx.mpmd.schedule import Action, get_schedule, register_schedule
from tests import models
from tests.models import make
from tests.mpmd.parity import assert_parity, born, pipeline, place

SIZES = [(1, 1), (1, 4), (2, 1), (2, 5), (3, 2), (4, 3), (4, 4), (4, 16), (8, 3)]


@pytest.fixture
def registry(monkeypatch):
    """Whatever a test registers is forgotten after it."""
    monkeypatch.setattr(schedules.base, "_schedules", dict(schedules.base._schedules))


def tables(name: str, num_stages: int, num_microbatches: int) -> list[list[Action]]:
    schedule = get_schedule(name)
    return [list(schedule(stage, num_stages, num_microbatches)) for stage in range(num_stages)]


@pytest.mark.parametrize("num_stages, num_microbatches", SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_each_action_once_and_in_order(name, num_stages, num_microbatches):
    """Every stage runs each forward and each backward once, the backward later, each kind in order."""
    for table in tables(name, num_stages, num_microbatches):
        order = list(range(num_microbatches))
        assert [a.microbatch for a in table if a.phase == "forward"] == order
        assert [a.microbatch for a in table if a.phase == "backward"] == order
        assert len(table) == 2 * num_microbatches
        assert all(table.index(("forward", m)) < table.index(("backward", m)) for m in order)


@pytest.mark.parametrize("num_stages, num_microbatches", SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_microbatches_whose_residuals_a_stage_holds(name, num_stages, num_microbatches):
    """1F1B: at most as many as there are stages from this one on, however many microbatches; GPipe: all."""
    for stage, table in enumerate(tables(name, num_stages, num_microbatches)):
        held = most = 0
        for action in table:
            held += 1 if action.phase == "forward" else -1
            most = max(most, held)
        bound = num_stages - stage if name == "1f1b" else num_microbatches
        assert most == min(bound, num_microbatches)
        assert held == 0


def test_1f1b_written_out():
    f, b = (lambda m: ("forward", m)), (lambda m: ("backward", m))
    assert tables("1f1b", 3, 4) == [
        [f(0), f(1), f(2), b(0), f(3), b(1), b(2), b(3)],
        [f(0), f(1), b(0), f(2), b(1), f(3), b(2), b(3)],
        [f(0), b(0), f(1), b(1), f(2), b(2), f(3), b(3)],
    ]


def test_fewer_microbatches_than_stages():
    """The early stages have no steady phase at all; nothing is asked for that does not exist."""
    f, b = (lambda m: ("forward", m)), (lambda m: ("backward", m))
    assert tables("1f1b", 4, 2)[:3] == [[f(0), f(1), b(0), b(1)]] * 3
    assert tables("1f1b", 4, 2)[3] == [f(0), b(0), f(1), b(1)]


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"'zigzag'.*'1f1b', 'gpipe'"):
        get_schedule("zigzag")


# On a chain


def chain_program(num_stages: int, num_microbatches: int, schedule: str) -> mm.Program:
    """Loss and gradients of a chain of linear layers, two layers a stage."""
    mesh, tasks = pipeline(num_stages)
    placement = place(tasks, *[[("layers", (2 * i, 2 * i + 1))] for i in range(num_stages)])
    with mesh:
        model = born(make(models.MLP, layers=2 * num_stages), placement)
        grad_fn = mm.microbatch(
            nnx.value_and_grad(models.squared_error), 0, 2, argnum=1, schedule=schedule, reduce="sum"
        )
        return mm.jit(lambda model, batch: grad_fn(model, batch)).program(
            model, models.vectors(rows=2 * num_microbatches)
        )


@pytest.mark.parametrize("num_stages, num_microbatches", [(2, 1), (2, 6), (3, 4), (4, 2), (4, 8)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble(schedule, num_stages, num_microbatches):
    """Of the time of the loop, each mesh idles (S - 1) of (M + S - 1) parts."""
    program = chain_program(num_stages, num_microbatches, schedule)
    loop = [e for e in program.simulate().events if e.microbatch is not None]
    assert {e.phase for e in loop} == {"forward", "backward"}
    assert len(loop) == 2 * num_stages * num_microbatches
    begin = min(e.start for e in loop)
    assert begin == 1  # the sums start from nought
    loop = [type(e)(e.mesh, e.start - begin, e.end - begin, e.phase, e.microbatch, e.name) for e in loop]
    timeline = Timeline(tuple(loop))
    assert timeline.makespan == 2 * (num_microbatches + num_stages - 1)
    assert timeline.bubble == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


@pytest.mark.parametrize("num_microbatches", [2, 6])
def test_every_stage_runs_its_own_backward(num_microbatches):
    """Also a stage of one small layer: the next stage does not do its backward and send the sum home."""
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(make(models.MLP, layers=2), place(tasks, [("layers", 0)], [("layers", 1)]))
        grad_fn = mm.microbatch(nnx.value_and_grad(models.squared_error), 0, 2, argnum=1)
        program = mm.jit(lambda model, batch: grad_fn(model, batch)).program(
            model, models.vectors(rows=2 * num_microbatches)
        )
    names = {f.name for f in program.fragments if f.phase != "none"}
    assert names == {f"stage{s} {phase}" for s in range(2) for phase in ("forward", "backward")}


# A user's own


def early(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """1F1B that runs twice as far ahead."""
    ahead = min(2 * (num_stages - stage - 1), num_microbatches)
    actions = [Action("forward", m) for m in range(ahead)]
    for m in range(num_microbatches - ahead):
        actions += [Action("forward", ahead + m), Action("backward", m)]
    return actions + [Action("backward", m) for m in range(num_microbatches - ahead, num_microbatches)]


def test_a_schedule_of_ones_own_is_followed(registry):
    assert register_schedule("early")(early) is early
    program = chain_program(3, 6, "early")
    for stage in range(2):  # the last stage is done with a microbatch as soon as it has it
        calls = [c for c in program.calls if c.name.startswith(f"stage{stage} ")]
        assert [(c.phase, c.microbatch) for c in calls] == early(stage, 3, 6)


def test_a_schedule_of_ones_own_trains_alike(registry):
    register_schedule("early")(early)
    mesh, tasks = pipeline(3)
    assert_parity(
        make(models.MLP, layers=3),
        models.squared_error,
        models.vectors(),
        place(tasks, [("layers", 0)], [("layers", 1)], [("layers", 2)]),
        mesh=mesh,
        microbatch=2,
        schedule="early",
        steps=2,
    )


def order(num_microbatches: int) -> list[Action]:
    return list(get_schedule("gpipe")(0, 1, num_microbatches))


def test_a_schedule_that_deadlocks(registry):
    """Backwards before forwards: said before anything runs, with what each mesh waits for."""
    register_schedule("backwards-first")(lambda stage, num_stages, n: order(n)[::-1])
    with pytest.raises(ValueError, match=r"'backwards-first' cannot run") as error:
        chain_program(2, 3, "backwards-first")
    for words in ("stage0 backward of microbatch 2", "stage1 backward of microbatch 2"):
        assert words in str(error.value)


def test_a_schedule_whose_stages_wait_for_each_other(registry):
    """Each alone is in order; together not: the first wants a gradient the last has yet to make."""

    def impatient(stage, num_stages, n):
        if stage == 0:
            return [Action(phase, m) for m in range(n) for phase in ("forward", "backward")]
        return order(n)

    register_schedule("impatient")(impatient)
    with pytest.raises(ValueError, match=r"'impatient' cannot run") as error:
        chain_program(2, 3, "impatient")
    assert "stage0 backward of microbatch 0; stage1 forward of microbatch 1" in str(error.value)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("forgets", lambda n: order(n)[:-1]),
        ("repeats", lambda n: [order(n)[0], *order(n)]),
        ("repeats-and-forgets", lambda n: [order(n)[0], *order(n)[:-1]]),
        ("one-too-many", lambda n: order(n + 1)),
    ],
)
def test_a_schedule_that_is_no_schedule(registry, name, wrong):
    """An action left out, asked for twice, or of a microbatch there is not: refused by name."""
    register_schedule(name)(lambda stage, num_stages, n: wrong(n))
    with pytest.raises(ValueError, match=f"'{name}'"):
        chain_program(2, 3, name)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_follows_by_dependency_never_waits_in_line(schedule):
    """Much that follows by dependency alone does not hide what it depends on, however many microbatches."""
    a, b, c, d = (object() for _ in range(4))
    here, there = (jax.sharding.Mesh(jax.devices()[i : i + 1], ("x",)) for i in range(2))

    def fragment(mesh, phase, position, invars, outvars):
        return SimpleNamespace(
            name=phase, mesh=mesh, phase=phase, position=position, invars=invars, outvars=outvars
        )

    fragments = (
        fragment(here, "forward", 0, [], [a]),
        fragment(there, "none", None, [a], [b]),
        fragment(here, "forward", 0, [b], [c]),  # the rest of the same action
        fragment(here, "none", None, [c], [d]),
    )
    body = SimpleNamespace(fragments=fragments, homes={a: here, b: there, c: here, d: here})
    loop = SimpleNamespace(spec=LoopSpec(schedule, length=64), carry_in=(), carry_out=())
    order = order_loop(SimpleNamespace(loop=loop, body=body, depths={0: 0}))
    assert sorted(order) == [(f, m) for f in range(4) for m in range(64)]
    place = {instance: n for n, instance in enumerate(order)}
    assert all(place[f, m] < place[f + 1, m] for f in range(3) for m in range(64))
