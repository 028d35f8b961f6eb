"""Schedules in programs: what is asked for is what runs, by name, as a table, or chosen by simulation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd import schedule as schedules
from mmnnx.mpmd.emit import emit
from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.ir.timeline import Timeline
from mmnnx.mpmd.ir.timetable import Timetable
from mmnnx.mpmd.schedule import Action, Stages, get_schedule, schedule_names
from mmnnx.mpmd.schedule.dispatch_order import order_loop
from tests import models
from tests.models import make
from tests.mpmd.parity import MOMENTUM, assert_parity, assert_same, born, pipeline, place, values
from tests.slow import all_but, grid

ROWS = 2  # of a microbatch


def layers(count: int) -> list[list[tuple[str, int]]]:
    return [[("layers", n)] for n in range(count)]


@functools.cache
def chain(meshes: tuple[int, ...]) -> tuple[mm.MultiMesh, models.MLP]:
    """A chain of linear layers, each on the mesh of its number."""
    mesh, tasks = pipeline(max(meshes) + 1)
    with mesh:
        placement = place([tasks[m] for m in meshes], *layers(len(meshes)))
        return mesh, born(make(models.MLP, layers=len(meshes), width=8), placement)


def chain_program(meshes: Sequence[int], num_microbatches: int, schedule: str | None = None, **loop):
    """The program of loss and gradients of a chain of linear layers."""
    mesh, model = chain(tuple(meshes))
    with mesh:
        grad_fn = mm.microbatch(
            nnx.value_and_grad(models.squared_error), 0, ROWS, argnum=1, schedule=schedule, **loop
        )
        return mm.jit(lambda model, batch: grad_fn(model, batch)).program(
            model, models.vectors(rows=ROWS * num_microbatches)
        )


def trained(**loop: Any) -> mm.Program:
    """The program of three layers on three meshes, which has given what one device gives."""
    mesh, tasks = pipeline(3)
    return assert_parity(
        make(models.MLP, layers=3, width=8),
        models.squared_error,
        models.vectors(),
        place(tasks, *layers(3)),
        mesh=mesh,
        microbatch=ROWS,
        optimizer=MOMENTUM,
        steps=2,
        **{"schedule": None, **loop},
    )


def loop_of(program: mm.Program) -> Timeline:
    """What the meshes do in the loop, at unit costs; what is outside it takes no time."""
    timeline = program.simulate()
    return Timeline(tuple(e for e in timeline.events if e.microbatch is not None))


# In simulation a program is as good as the papers say its schedule is


@pytest.mark.parametrize(
    "sizes, schedule",
    grid([(2, 1), (2, 6), (3, 4), (4, 2), (4, 8)], ["gpipe", "1f1b", "eager-1f1b", "wavefront"]),
)
def test_bubble(sizes, schedule):
    """(P-1)/(M+P-1)"""
    P, M = sizes
    timeline = loop_of(chain_program(range(P), M, schedule))
    assert {e.phase for e in timeline.events} == {"forward", "backward"}
    assert len(timeline.events) == 2 * P * M
    assert timeline.makespan == 3 * (M + P - 1)
    assert timeline.bubble == pytest.approx((P - 1) / (M + P - 1))


@pytest.mark.parametrize("num_meshes, rounds, num_microbatches", [(2, 2, 4), (2, 3, 6), (3, 2, 6), (4, 2, 8)])
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs"])
def test_bubble_of_several_stages_on_each_mesh(schedule, num_meshes, rounds, num_microbatches):
    """(P-1)/(VM+P-1): with V stages on each mesh it is a V-th, of the work of one stage."""
    P, V, M = num_meshes, rounds, num_microbatches
    timeline = loop_of(chain_program([*range(P)] * V, M, schedule))
    assert timeline.makespan == 3 * (V * M + P - 1)
    assert timeline.bubble == pytest.approx((P - 1) / (V * M + P - 1))


@pytest.mark.parametrize("num_meshes, num_microbatches", [(2, 4), (4, 12)])
def test_bubble_of_backwards_in_two_parts(num_meshes, num_microbatches):
    """H1 has a third of 1F1B's bubble; H2 none, but for the part that the first stage does not have."""
    P, M = num_meshes, num_microbatches
    bubbles = {}
    for name in ("1f1b", "zero-bubble-h1", "zero-bubble-h2"):
        # The layers lie so that the first stage has two: of the first of them it has input gradients too.
        timeline = loop_of(chain_program([0, *range(P)], M, name))
        bubbles[name] = timeline.bubble
        assert timeline.makespan >= 3 * M
    assert bubbles["1f1b"] == pytest.approx((P - 1) / (M + P - 1))
    assert bubbles["zero-bubble-h1"] == pytest.approx((P - 1) / (3 * M + P - 1))
    assert bubbles["zero-bubble-h2"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "name, most", [("gpipe", 8), ("1f1b", 4), ("zero-bubble-h1", 4), ("zero-bubble-h2", 7)]
)
def test_residuals_in_a_program(name, most):
    """As many as the schedule's own table holds."""
    program = chain_program([0, 0, 1, 2, 3], 8, name)
    assert max(program.simulate().in_flight().values()) == most


@pytest.mark.parametrize("num_microbatches", [2, 6])
def test_every_stage_runs_its_own_backward(num_microbatches):
    """Also a stage of one small layer: the next stage does not do its backward and send the sum home."""
    program = chain_program(range(2), num_microbatches)
    names = {f.name for f in program.fragments if f.phase != "none"}
    assert {name.split()[0] for name in names} == {"stage0", "stage1"}
    assert all(any(n.startswith(f"stage{s} backward") for n in names) for s in range(2))


# A user's own, by name


@pytest.fixture
def registry(monkeypatch):
    """Whatever a test registers is forgotten after it."""
    monkeypatch.setattr(schedules.base, "_schedules", dict(schedules.base._schedules))


def forwards(stage: int, microbatches) -> list[Action]:
    return [Action(stage, "forward", m) for m in microbatches]


def backwards(stage: int, microbatches) -> list[Action]:
    return [Action(stage, "backward", m) for m in microbatches]


def by_twos(stages: Stages, num_microbatches: int) -> list[list[Action]]:
    """Two forwards and two backwards in turn: as no schedule that is here."""
    pairs = [range(m, min(m + 2, num_microbatches)) for m in range(0, num_microbatches, 2)]
    return [
        [a for pair in pairs for a in forwards(s, pair) + backwards(s, pair)]
        for s in range(stages.num_stages)
    ]


def last_first(stages: Stages, num_microbatches: int) -> list[list[Action]]:
    """All forwards; then all backwards, from the last microbatch to the first, as GPipe's paper draws it."""
    order = range(num_microbatches)
    return [forwards(s, order) + backwards(s, reversed(order)) for s in range(stages.num_stages)]


def test_a_schedule_of_ones_own_is_followed_and_trains_alike(registry):
    assert mm.register_schedule("by-twos")(by_twos) is by_twos
    program = trained(schedule="by-twos")
    assert program.table() == by_twos(Stages.chain(range(3)), 4)
    assert [loop.schedule for loop in program.loops] == ["by-twos"]


def test_microbatches_in_another_order(registry):
    """Where no state is carried, microbatches may come in any order: gradients are sums."""
    mm.register_schedule("last-first")(last_first)
    program = trained(schedule="last-first")
    assert program.table() == last_first(Stages.chain(range(3)), 4)


BACKWARDS = [forwards(s, [1, 0]) + backwards(s, [1, 0]) for s in range(2)]


@pytest.mark.slow
def test_random_numbers_do_not_depend_on_the_order_of_microbatches():
    """Dropout's keys are counted on in order, ahead of the forwards that use them."""
    mesh, tasks = pipeline(2)
    program = assert_parity(
        make(models.ConvNet, batch_norm=False),
        models.cross_entropy,
        models.images(rows=4),
        place(tasks, [("convs", 0), ("dropouts", 0)], [("convs", 1), ("dropouts", 1), "head"]),
        mesh=mesh,
        microbatch=2,
        schedule="custom",
        custom_schedule=BACKWARDS,
        optimizer=MOMENTUM,
        whole_batch=False,
    )
    assert program.table() == BACKWARDS


class Actor(nnx.Module):
    """An action is drawn by a counter; the gradient of a trained scalar is made of it and of other stages."""

    def __init__(self, rngs):
        self.layers = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
        self.log_scale = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        action = self.dropout(self.layers[0](x))
        return self.layers[1](action)[:, :4] - self.log_scale[...] * jax.lax.stop_gradient(action).mean()


@pytest.mark.parametrize("schedule", all_but(["1f1b", None], ["gpipe", "1f1b", "zero-bubble-h1", None]))
def test_a_counter_waits_for_no_backward(schedule):
    mesh, tasks = pipeline(2)
    program = assert_parity(
        make(Actor),
        models.squared_error,
        models.vectors(rows=8),
        place(tasks, [("layers", 0)], [("layers", 1)]),
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        optimizer=MOMENTUM,
        per_call=1,
        whole_batch=False,
    )
    if schedule == "1f1b":
        assert program.simulate().in_flight() == {"stage0": 2, "stage1": 1}


class Attacked(nnx.Module):
    """Inputs are moved along gradients, in a loop over both stages, from where the last ones came to."""

    def __init__(self, rngs):
        self.layers = nnx.List(nnx.Linear(4, 4, rngs=rngs) for _ in range(2))
        self.start = nnx.Variable(jnp.zeros(4))

    def __call__(self, x):
        return x + jnp.tanh(self.layers[1](x + jnp.tanh(self.layers[0](x))))

    def loss(self, x):
        graph, state = nnx.split(self)
        copy = lambda: nnx.merge(graph, jax.tree.map(jax.lax.stop_gradient, state))
        slope = jax.grad(lambda change: (copy()(x + change) ** 2).mean())
        climb = lambda _, change: jnp.clip(change + 0.1 * jnp.sign(slope(change)), -0.2, 0.2)
        change = jax.lax.fori_loop(0, 2, climb, jnp.zeros_like(x) + self.start[...])
        loss = (self(x + jax.lax.stop_gradient(change)) ** 2).mean()
        self.start[...] = jax.lax.stop_gradient(change).mean(0)
        return loss


def test_what_waits_for_the_microbatch_before_is_sequential_if_no_schedule_is_named():
    mesh, tasks = pipeline(2)
    x = models.vectors(rows=16)["x"][:, :4]
    grad = nnx.value_and_grad(Attacked.loss)
    step = lambda schedule: lambda model, x: mm.microbatch(grad, 0, 4, 1, schedule=schedule)(model, x)
    with mesh:
        model = born(make(Attacked), place(tasks, [("layers", 0)], [("layers", 1), "start"]))
        with pytest.raises(
            ValueError, match="'1f1b' needs microbatches in an order in which they cannot run"
        ):
            mm.jit(step("1f1b")).program(model, x)
        run = mm.jit(step(None))
        assert run.program(model, x).schedule == "sequential"
        whole = make(Attacked)()
        assert_same(values(run(model, x)), values(nnx.jit(step(None))(whole, x)))
        assert_same(values(nnx.state(model)), values(nnx.state(whole)))


def test_a_loop_that_cannot_be_ordered_beside_one_whose_schedule_is_open(monkeypatch):
    """The schedules of the other are not all tried first."""
    tried: list[Any] = []
    build = emit.build_program
    monkeypatch.setattr(emit, "build_program", lambda plan, *rest: tried.append(plan) or build(plan, *rest))
    mesh, tasks = pipeline(2)
    grad = nnx.value_and_grad(Attacked.loss)
    plain = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())

    def step(model, x):
        first = mm.microbatch(grad, 0, 4, 1, schedule="1f1b")(model, x)
        return first, mm.microbatch(plain, 0, 4, 1)(model, x)

    with mesh:
        model = born(make(Attacked), place(tasks, [("layers", 0)], [("layers", 1), "start"]))
        tried.clear()
        with pytest.raises(
            ValueError, match="'1f1b' needs microbatches in an order in which they cannot run"
        ):
            mm.jit(step).program(model, models.vectors(rows=16)["x"][:, :4])
    assert len(tried) == 2


def test_state_that_a_stage_carries_keeps_microbatches_in_order():
    """BatchNorm's statistics after a microbatch are made from those after the one before."""
    mesh, tasks = pipeline(2)
    with mesh:
        placement = place(tasks, [("convs", 0), ("norms", 0)], [("convs", 1), ("norms", 1), "head"])
        model = born(make(models.ConvNet), placement)
        grad_fn = mm.microbatch(nnx.grad(models.cross_entropy), 0, 2, argnum=1, custom_schedule=BACKWARDS)
        with pytest.raises(ValueError, match="'custom' cannot run: .* stage0 forward of microbatch 1"):
            mm.jit(lambda model, batch: grad_fn(model, batch)).program(model, models.images(rows=4))


def test_a_schedule_of_ones_own_may_cut_some_backwards(registry):
    """Those of the stages that it names parts of, and no others."""

    @mm.register_schedule("one-cut")
    def one_cut(stages, num_microbatches):
        table = get_schedule("gpipe").table(stages, num_microbatches)
        table[1] = forwards(1, range(num_microbatches))
        for phase in ("backward-input", "backward-weight"):
            table[1] += [Action(1, phase, m) for m in range(num_microbatches)]
        return table

    program = trained(schedule="one-cut")
    assert program.table() == one_cut(Stages.chain(range(3)), 4)


def test_a_schedule_of_ones_own_with_an_option(registry):
    """A keyword of its function that mm.microbatch has is handed on."""
    seen = []

    @mm.register_schedule("with-unrolling")
    def with_unrolling(stages, num_microbatches, unrolling=None):
        seen.append(unrolling)
        return by_twos(stages, num_microbatches)

    chain_program(range(2), 2, "with-unrolling", unrolling=5)
    assert seen == [5]
    with pytest.raises(ValueError, match="interleave=2 means nothing to schedule 'with-unrolling'"):
        chain_program(range(2), 2, "with-unrolling", interleave=2)


def test_a_schedule_that_deadlocks(registry):
    """Backwards before forwards: said before anything runs, with what each mesh waits for."""
    mm.register_schedule("backwards-first")(
        lambda stages, n: [backwards(s, range(n)) + forwards(s, range(n)) for s in range(stages.num_stages)]
    )
    with pytest.raises(ValueError, match=r"'backwards-first' cannot run") as error:
        chain_program(range(2), 3, "backwards-first")
    for words in ("stage0 backward of microbatch 0", "stage1 backward of microbatch 0"):
        assert words in str(error.value)


def test_a_schedule_whose_stages_wait_for_each_other(registry):
    """Each alone is in order; together not: the first wants a gradient the last has yet to make."""

    @mm.register_schedule("impatient")
    def impatient(stages, n):
        first = [a for m in range(n) for a in (Action(0, "forward", m), Action(0, "backward", m))]
        return [first, forwards(1, range(n)) + backwards(1, range(n))]

    with pytest.raises(ValueError, match=r"'impatient' cannot run") as error:
        chain_program(range(2), 3, "impatient")
    assert "stage0 backward of microbatch 0; stage1 forward of microbatch 1" in str(error.value)


def test_a_schedule_of_ones_own_that_raises_is_named(registry):
    @mm.register_schedule("raises")
    def raises(stages, num_microbatches):
        yield [Action(0, "forward", {0: 1}[num_microbatches])]

    message = "schedule 'raises', for 2 stages on meshes 0, 1 and 3 microbatches, raised KeyError: 3"
    with pytest.raises(ValueError, match=message) as error:
        chain_program(range(2), 3, "raises")
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda table: table[1].pop(), "backward of microbatch 2 on stage 1 is missing"),
        (lambda table: table[0].append(table[0][0]), "forward of microbatch 0 on stage 0 is there 2 times"),
        (
            lambda table: table[1].append(Action(1, "forward", 3)),
            "the table has 4 microbatches; forward of microbatch 3 on stage 1 does not",
        ),
        (
            lambda table: table[1].append(Action(2, "forward", 0)),
            "forward of microbatch 0 on stage 2 does not",
        ),
        (lambda table: table[0].append(table[1].pop()), "row 0 has stages of meshes 0, 1"),
    ],
)
def test_a_schedule_that_is_no_schedule(registry, spoil, message):
    """An action left out, asked for twice, that there is not, or in the row of another mesh."""

    @mm.register_schedule("spoilt")
    def spoilt(stages, n):
        table = by_twos(stages, n)
        spoil(table)
        return table

    with pytest.raises(ValueError, match=f"'spoilt' for 2 stages and 3 microbatches: {message}"):
        chain_program(range(2), 3, "spoilt")


# A custom schedule, as rows

PHASES = ("forward", "backward")
NAMES = [[f"stage{s} {phase}" for phase in PHASES for _ in range(4)] for s in range(3)]  # GPipe
GPIPE = get_schedule("gpipe").table(Stages.chain(range(3)), 4)


def as_pairs(table: Sequence[Sequence[Action]]) -> list[list[tuple[int, str]]]:
    return [[(a.microbatch, f"stage{a.stage} {a.phase}") for a in row] for row in table]


def test_custom_rows_of_names():
    """The k-th time that a name appears is microbatch k."""
    assert trained(schedule="custom", custom_schedule=NAMES).table() == GPIPE


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble-h2"])
def test_custom_rows_of_pairs(name):
    """Names of both halves of a backward cut it in two."""
    table = get_schedule(name).table(Stages.chain(range(3)), 4)
    if name == "zero-bubble-h2":  # the first stage has no input gradients
        table[0] = [a for a in table[0] if a.phase != "backward-input"]
    assert trained(custom_schedule=as_pairs(table)).table() == table


def test_custom_rows_of_actions_in_an_order_of_their_own():
    table = by_twos(Stages.chain(range(3)), 4)
    table[0][:2] = reversed(table[0][:2])  # the first stage, which sums no loss, begins with microbatch 1
    program = trained(schedule="custom", custom_schedule=table)
    assert program.table() == table
    assert [loop.schedule for loop in program.loops] == ["custom"]


@pytest.mark.parametrize("name", ["eager-1f1b", "zero-bubble-h1"])
def test_custom_rows_from_a_file_that_a_program_wrote(tmp_path, name):
    """What a program ran, written and read again, is run again."""
    program = trained(schedule=name)
    mm.write_schedule(program.table(), tmp_path / "schedule.csv")
    read = mm.read_schedule(tmp_path / "schedule.csv")
    assert read == program.table()
    again = chain_program(range(3), 4, "custom", custom_schedule=read)
    assert again.table() == program.table()


def test_the_rows_of_a_program_whose_microbatches_share_calls():
    """They name each microbatch, and run again one to a call."""
    table = trained(schedule="1f1b", per_call=2).table()
    groups = get_schedule("1f1b").table(Stages.chain(range(3)), 2)
    assert table == [
        [Action(a.stage, a.phase, 2 * a.microbatch + n) for a in row for n in (0, 1)] for row in groups
    ]
    assert trained(schedule="custom", custom_schedule=table).table() == table


def test_what_custom_rows_of_names_leave_out_follows_by_dependency():
    """Only the first stage is told what to do."""
    table = trained(custom_schedule=NAMES[:1]).table()
    assert table[0] == GPIPE[0]
    assert [sorted(row) for row in table] == [sorted(row) for row in GPIPE]


PAIRS = as_pairs(GPIPE)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([*NAMES[:2], ["stage9 forward"] * 4], r"'stage9 forward' is not there \(there are 'stage0 forward'"),
        ([NAMES[0][:-1], *NAMES[1:]], "'stage0 backward' of microbatch 3 is there 0 times"),
        ([[*NAMES[0], "stage0 forward"], *NAMES[1:]], "'stage0 forward' of microbatch 4 does not exist"),
        ([[*PAIRS[0], (1, "stage0 forward")]], "'stage0 forward' of microbatch 1 is there 2 times"),
        ([[(-1, "stage0 forward"), *PAIRS[0]]], "'stage0 forward' of microbatch -1 does not exist"),
        (
            [[*NAMES[0], *NAMES[1]]],
            "row 0 names what runs on 2 TaskMeshes: 'stage0 forward', 'stage0 backward', 'stage1 forward'",
        ),
        ([NAMES[0][::-1], *NAMES[1:]], "'custom' cannot run: .*stage0 backward of microbatch 0"),
        ([[*GPIPE[0], NAMES[0][0]], *GPIPE[1:]], "both names and Actions: use one or the other"),
        ([GPIPE[0][:-1], *GPIPE[1:]], "'custom' .* backward of microbatch 3 on stage 0 is missing"),
        ([[*GPIPE[0], *GPIPE[1]], GPIPE[2]], "row 0 has stages of meshes 0, 1"),
        (
            [[*GPIPE[0], Action(3, "forward", 0)], *GPIPE[1:]],
            "forward of microbatch 0 on stage 3 does not exist",
        ),
        ([], "custom_schedule has no entries"),
        ([[], []], "custom_schedule has no entries"),
        (
            ["stage0 forward", "stage1 forward"],
            "each row of custom_schedule is a list for one mesh, not 'stage0",
        ),
        (NAMES[0], "each row of custom_schedule is a list for one mesh, not 'stage0 forward'"),
        ([[0, 1]], "an entry of custom_schedule is a task name, a pair .* not 0"),
        ([[("stage0 forward", 0)]], "an entry of custom_schedule is a task name, a pair .* not"),
    ],
)
def test_custom_rows_that_are_wrong(rows, message):
    with pytest.raises(ValueError, match=message):
        chain_program(range(3), 4, "custom", custom_schedule=rows)


def test_a_custom_schedule_without_rows_and_rows_for_another():
    with pytest.raises(ValueError, match="schedule='custom' without custom_schedule"):
        chain_program(range(2), 2, "custom")
    with pytest.raises(ValueError, match="schedule='gpipe' with custom_schedule"):
        chain_program(range(2), 2, "gpipe", custom_schedule=NAMES)


# Options


def test_options_that_are_right():
    program = chain_program([0, 1, 0, 1], 6, "interleaved-1f1b", interleave=2, unrolling=3, num_stages=4)
    asked = get_schedule("interleaved-1f1b").table(Stages.chain([0, 1, 0, 1]), 6, unrolling=3)
    assert program.table() == asked


@pytest.mark.parametrize(
    "schedule, options, message",
    [
        ("interleaved-1f1b", {"interleave": 3}, "interleave=3, but each mesh has 2 of the stages"),
        ("interleaved-1f1b", {"num_stages": 3}, "num_stages=3, but the loop runs through 4 stages"),
        (
            "1f1b",
            {"num_stages": 5},
            "num_stages=5, but the loop runs through 4 stages: task 'stage0', task 'stage1'",
        ),
        ("interleaved-1f1b", {"unrolling": 0}, "unrolling must be a positive int, got 0"),
        ("interleaved-1f1b", {"unrolling": 1.5}, "unrolling must be a positive int, got 1.5"),
        ("looped-bfs", {"interleave": "2"}, "interleave must be a positive int, got '2'"),
        (
            "1f1b",
            {"interleave": 2},
            "interleave=2 means nothing to schedule '1f1b'; it is for 'interleaved-1f1b'",
        ),
        ("looped-bfs", {"unrolling": 2}, "unrolling=2 means nothing to schedule 'looped-bfs'; it is for"),
        ("zigzag", {}, "unknown schedule 'zigzag'; there are '1f1b'"),
        ("1f1bb", {}, "unknown schedule '1f1bb' \\(did you mean '1f1b'\\?\\); there are '1f1b'"),
        (len, {}, "a schedule is given by its name, not as <built-in function len>: mm.register_schedule"),
    ],
)
def test_options_that_are_wrong(schedule, options, message):
    with pytest.raises(ValueError if isinstance(schedule, str) else TypeError, match=message):
        chain_program([0, 1, 0, 1], 4, schedule, **options)


def loop_program(fun: Callable[..., Any], meshes: tuple[int, ...], schedule: str) -> mm.Program:
    """The program of a loop over 4 microbatches that runs a function on a chain of layers."""
    mesh, _ = pipeline(2)
    tasks = [mm.Task(f"t{n}", mesh_slice={"stage": m}) for n, m in enumerate(meshes)]
    with mesh:
        model = born(make(models.MLP, layers=len(meshes), width=8), place(tasks, *layers(len(meshes))))
    loop = lambda model, x: mm.microbatch(fun, dim=0, size=ROWS, argnum=1, schedule=schedule)(model, x)
    return mm.jit(loop, mesh=mesh).program(model, jax.numpy.ones((4 * ROWS, 8)))


def gradients(model: nnx.Module, x: jax.Array) -> Any:
    return nnx.grad(lambda model, x: (model(x) ** 2).mean())(model, x)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_step_in_each_microbatch_is_for_sequential(schedule):
    def step(model, x):
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), gradients(model, x)))

    with pytest.raises(ValueError, match="what the backward of the one before leaves: schedule='sequential'"):
        loop_program(step, (0, 1), schedule)
    assert loop_program(step, (0, 1), "sequential").loops[0].schedule == "sequential"


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe-v"])
def test_gradients_of_a_microbatch_that_their_norm_scales(schedule):
    def scaled(model, x):
        grads = gradients(model, x)
        return jax.tree.map(lambda g: g / optax.tree.norm(grads), grads)

    with pytest.raises(ValueError, match="wait for other stages, as they do where their common norm"):
        loop_program(scaled, (0, 1, 1, 0), schedule)
    assert loop_program(scaled, (0, 1, 1, 0), "1f1b").loops[0].schedule == "1f1b"


def test_a_custom_schedule_has_no_options():
    with pytest.raises(ValueError, match="interleave means nothing to a custom schedule"):
        chain_program(range(3), 4, "custom", custom_schedule=NAMES, interleave=1)


def test_an_option_without_a_schedule_chooses_among_those_that_have_it():
    program = chain_program([0, 1, 0, 1], 4, unrolling=2)
    assert program.loops[0].schedule in ("interleaved-1f1b", "interleaved-zero-bubble")


# None asked for: the fastest


@pytest.fixture(scope="module")
def wide() -> Callable[..., mm.Program]:
    """Makes programs of a model whose residuals are more than its weights."""
    mesh, tasks = pipeline(3)
    with mesh:
        model = born(make(models.MLP, layers=4, width=64), place([tasks[0], *tasks], *layers(4)))

    def program(**loop: Any) -> mm.Program:
        with mesh:
            grad_fn = mm.microbatch(nnx.value_and_grad(models.squared_error), 0, 32, argnum=1, **loop)
            return mm.jit(lambda model, batch: grad_fn(model, batch)).program(model, models.vectors(rows=256))

    return program


def peak(program: mm.Program) -> int:
    return max(program.simulate().peak_bytes.values())


def test_a_memory_limit(wide):
    """Under the peak of the first choice: the shortest of those that fit is taken instead."""
    free = wide()
    programs = {name: wide(schedule=name) for name in ("gpipe", "1f1b", "zero-bubble-h1", "zero-bubble-h2")}
    assert peak(programs["1f1b"]) < peak(free)
    limit = peak(free) - 1
    chosen = wide(memory_limit=limit)
    assert chosen.loops[0].schedule != free.loops[0].schedule
    assert peak(chosen) <= limit
    fit = [p.simulate().makespan for p in programs.values() if peak(p) <= limit]
    assert free.simulate().makespan <= chosen.simulate().makespan <= min(fit)
    assert wide(memory_limit=float(peak(free))).loops[0].schedule == free.loops[0].schedule
    assert wide(memory_limit=peak(programs["1f1b"])).simulate().peak_bytes


@pytest.mark.slow
def test_a_memory_limit_that_nothing_fits(wide):
    """The one that comes closest is named, with what it takes."""
    with pytest.raises(ValueError, match="memory_limit=1,000 bytes for one TaskMesh is too little") as error:
        wide(memory_limit=1_000)
    least = min(peak(wide(schedule=name)) for name in [*schedule_names()[:4], "zero-bubble-h1"])
    named = str(error.value).split("holds ")[1]
    assert int(named.split(" bytes")[0].replace(",", "")) <= least
    name = named.split("under '")[1].split("'")[0]
    assert f"holds {peak(wide(schedule=name)):,} bytes" in str(error.value)


def test_a_memory_limit_for_a_schedule_that_was_asked_for(wide):
    """No other is tried."""
    with pytest.raises(ValueError, match="too little: .* bytes under 'gpipe'"):
        wide(schedule="gpipe", memory_limit=peak(wide(schedule="gpipe")) - 1)
    assert wide(schedule="gpipe", memory_limit=peak(wide(schedule="gpipe"))).loops[0].schedule == "gpipe"


# Forwards alone


@pytest.mark.parametrize("schedule", all_but([None, "1f1b"], [None, *schedule_names()]))
def test_evaluation(schedule):
    """Every schedule orders the forwards of a loop that has no backwards."""
    meshes = (0, 1, 0, 1) if schedule and ("looped" in schedule or "inter" in schedule) else (0, 1, 2, 3)
    vee = schedule in ("zbv", "dualpipe-v")
    meshes = (0, 1, 1, 0) if vee else meshes
    mesh, _ = pipeline(max(meshes) + 1)
    tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": m}) for n, m in enumerate(meshes)]
    model = make(models.MLP, layers=4, width=8)
    if vee:
        model = models.in_tasks(model, {("layers", n): task for n, task in enumerate(tasks)})
    batch = models.vectors(rows=8)["x"]
    run = mm.microbatch(
        lambda model, x: model(x), dim=0, size=2, argnum=1, schedule=schedule, reduce="concat", per_call=1
    )
    with mesh:
        placed = born(model, place(tasks, *layers(4)))
        evaluate = mm.jit(lambda model, x: run(model, x))
        assert_same(evaluate(placed, batch), make(models.MLP, layers=4, width=8)()(batch))
        program = evaluate.program(placed, batch)
    assert {a for row in program.table() for a in row} == {
        Action(s, "forward", m) for s in range(4) for m in range(4)
    }


def test_evaluation_by_rows_of_forwards():
    """As `Program.table` gives them."""
    mesh, tasks = pipeline(2)
    rows = [forwards(s, [1, 0, 2, 3]) for s in range(2)]
    run = mm.microbatch(
        lambda model, x: model(x), dim=0, size=2, argnum=1, custom_schedule=rows, reduce="concat"
    )
    batch = models.vectors(rows=8)["x"]
    with mesh:
        model = born(make(models.MLP, layers=2, width=8), place(tasks, *layers(2)))
        evaluate = mm.jit(lambda model, x: run(model, x))
        assert_same(evaluate(model, batch), make(models.MLP, layers=2, width=8)()(batch))
        assert evaluate.program(model, batch).table() == rows


# The order of what is in no row


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_follows_by_dependency_never_waits_in_line(schedule):
    """Much that follows by dependency alone does not hide what it depends on, however many microbatches."""
    a, b, c, d = (object() for _ in range(4))
    here, there = (jax.sharding.Mesh(jax.devices()[i : i + 1], ("x",)) for i in range(2))

    def fragment(mesh, phase, position, invars, outvars):
        return SimpleNamespace(
            name=phase, task=phase, mesh=mesh, phase=phase, position=position, invars=invars, outvars=outvars
        )

    fragments = (
        fragment(here, "forward", 0, [], [a]),
        fragment(there, "none", None, [a], [b]),
        fragment(here, "forward", 0, [b], [c]),  # the rest of the same action
        fragment(here, "none", None, [c], [d]),
    )
    stages = Stages.chain((0,))
    times = Timetable(schedule, stages, (0,), get_schedule(schedule).table(stages, 64), frozenset(), {})
    body = SimpleNamespace(fragments=fragments, homes={a: here, b: there, c: here, d: here})
    loop = SimpleNamespace(spec=LoopSpec(schedule, length=64), carry_in=(), carry_out=(), ys=(), body=())
    order = order_loop(SimpleNamespace(loop=loop, body=body, timetable=times, carried=()), {})
    assert sorted(order) == [(f, m) for f in range(4) for m in range(64)]
    place = {instance: n for n, instance in enumerate(order)}
    assert all(place[f, m] < place[f + 1, m] for f in range(3) for m in range(64))


@pytest.mark.parametrize("name", ["gpipe", "custom"])
def test_names_that_are_taken(registry, name):
    with pytest.raises(ValueError, match=f"there is a schedule '{name}' already"):
        mm.register_schedule(name)(last_first)


def test_a_schedule_without_a_name():
    with pytest.raises(TypeError, match="registered by name"):
        mm.register_schedule(last_first)


def test_the_default_is_none_of_ones_own(registry):
    """However short, or broken, it may be."""
    mm.register_schedule("broken")(lambda stages, num_microbatches: None)
    assert chain_program(range(3), 4, None).loops[0].schedule in schedule_names()[:-1]


def test_one_that_gives_no_rows(registry):
    mm.register_schedule("broken")(lambda stages, num_microbatches: None)
    with pytest.raises(TypeError, match="schedule 'broken' gave None, and not a row of actions for each"):
        chain_program(range(3), 4, "broken")


@pytest.mark.parametrize("limit", [0, -1, "1MB"])
def test_a_memory_limit_that_is_none(limit):
    with pytest.raises(ValueError, match="memory_limit must be a number of bytes"):
        mm.microbatch(models.squared_error, 0, 2, argnum=1, memory_limit=limit)


def test_a_file_is_read_before_it_is_a_schedule():
    with pytest.raises(ValueError, match="mm.read_schedule"):
        mm.microbatch(models.squared_error, 0, 2, argnum=1, custom_schedule="mine.csv")


def test_only_actions_are_written(tmp_path):
    with pytest.raises(TypeError, match=r"not \(0, 'stage0 forward'\)"):
        mm.write_schedule([[(0, "stage0 forward")]], tmp_path / "schedule.csv")
    assert not list(tmp_path.iterdir())
