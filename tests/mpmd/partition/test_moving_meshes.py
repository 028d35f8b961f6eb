"""Tasks that run on another slice for each microbatch: `Task.loop_dependent_mesh_slice`."""

from __future__ import annotations

import collections
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.ir.instructions import Call
from mmnnx.mpmd.schedule import schedule_names
from tests import models
from tests.models import make
from tests.mpmd.parity import MOMENTUM, arrays, assert_parity, assert_same, born, pipeline, place, train_step
from tests.slow import all_but, few

VOCAB, WIDTH = 32, 8
COMPILED = "/jax/core/compile/backend_compile_duration"


class Embedded(nnx.Module):
    """An embedding in a task, and layers that know nothing of tasks."""

    def __init__(self, task: mm.Task, layers: int = 4, *, tied: bool = False, rngs: nnx.Rngs):
        self.embed = mm.task(nnx.Embed(VOCAB, WIDTH, rngs=rngs), task=task)
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers))
        self.head = None if tied else nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.embed.attend(x) if self.head is None else self.head(x)


class Front(nnx.Module):
    """State of every kind: parameters, statistics, a running mean, a counter, random keys."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.average = nnx.BatchStat(jnp.zeros((8,)))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        x = self.norm(self.linear(x))
        self.average[...] = 0.5 * self.average[...] + x.max(axis=0)
        return self.dropout(x)


class Fronted(nnx.Module):
    def __init__(self, task: mm.Task, *, rngs: nnx.Rngs):
        self.front = mm.task(Front(rngs=rngs), task=task)
        self.middle = nnx.Linear(8, 8, rngs=rngs)
        self.last = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.middle(self.front(x))))


class Chain(nnx.Module):
    """Three layers, of which one is in a task."""

    def __init__(self, task: mm.Task, scoped: int, *, rngs: nnx.Rngs):
        layers = [nnx.Linear(8, 8, rngs=rngs) for _ in range(3)]
        layers[scoped] = mm.task(layers[scoped], task=task)
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def spread(over) -> mm.Task:
    return mm.Task("embed", loop_dependent_mesh_slice=over)


def embedded(tasks, home=0, layers=4, spec=P()):
    """The embedding at home on one stage, the layers over all, the head on the last."""
    each = layers // len(tasks)
    owned = [[("layers", range(i * each, (i + 1) * each))] for i in range(len(tasks))]
    return place([tasks[home], *tasks], ["embed"], *owned[:-1], [*owned[-1], "head"], spec=spec)


def third_of(m: int) -> dict[str, int]:
    return {"stage": 3 * m % 4}


def embedded_program(over, stages=4, rows=12, schedule="1f1b", home=0, **options) -> mm.Program:
    """Loss and gradients in microbatches of two."""
    mesh, tasks = pipeline(stages)
    with mesh:
        model = born(make(Embedded, spread(over)), embedded(tasks, home))
        grad_fn = nnx.value_and_grad(models.cross_entropy)
        loop = mm.microbatch(grad_fn, 0, 2, argnum=1, schedule=schedule, **options)
        return mm.jit(lambda model, batch: loop(model, batch)).program(model, models.tokens(rows=rows))


@functools.cache
def over_all_stages(rows=12, schedule="1f1b", home=0) -> mm.Program:
    return embedded_program("stage", rows=rows, schedule=schedule, home=home)


def test_each_microbatch_by_itself():
    """They have meshes of their own, and cannot share a call."""
    assert embedded_program("stage", schedule=None).loops[0].per_call == 1
    with pytest.raises(ValueError, match="per_call=2, but each microbatch has a mesh of its own"):
        embedded_program("stage", per_call=2)


def where(program: mm.Program, phase: str) -> list[int]:
    """For each microbatch, the device that runs that phase of the embedding."""
    calls = [c for c in program.calls if c.name == f"embed {phase}"]
    assert sorted(c.microbatch for c in calls) == list(range(len(calls)))
    return [c.mesh.devices.item().id for c in sorted(calls, key=lambda c: c.microbatch)]


# Where it runs


@pytest.mark.parametrize(
    "over, expected",
    [
        ("stage", [0, 1, 2, 3, 0, 1]),
        ({"stage": (0, 2)}, [0, 2, 0, 2, 0, 2]),
        ({"stage": [3]}, [3] * 6),
        (third_of, [0, 3, 2, 1, 0, 3]),
    ],
    ids=["an axis", "some indices", "one index", "a function"],
)
def test_it_runs_on_the_slice_of_its_microbatch(over, expected):
    program = over_all_stages() if over == "stage" else embedded_program(over)
    program.verify()
    assert where(program, "forward") == where(program, "backward") == expected
    events = [e for e in program.simulate().events if e.name == "embed forward"]
    by_microbatch = {e.microbatch: e.mesh for e in events}
    assert [by_microbatch[m] for m in range(6)] == [f"stage{i}" for i in expected]
    assert "embed forward [microbatch 1] on" in str(program)


def test_meshes_that_run_it_take_turns_at_the_same_time():
    """Not one after the other: the first microbatch of each mesh starts at once."""
    events = [e for e in over_all_stages().simulate().events if e.name == "embed forward"]
    assert [e.start for e in sorted(events, key=lambda e: e.microbatch)[:4]] == [0.0] * 4


@pytest.mark.parametrize("rows", [2, 4, 24])
@pytest.mark.parametrize("home", [0, 2])
def test_its_state_is_sent_to_each_mesh_once_a_step_and_its_gradient_home_once(rows, home):
    """However many microbatches; and to no mesh that has none."""
    program = over_all_stages(rows, home=home)
    tables = [t for t in program.transfers if t.shape == (VOCAB, WIDTH)]
    others = sorted({f"stage{m % 4}" for m in range(rows // 2)} - {f"stage{home}"})
    assert sorted(t.target for t in tables if t.source == f"stage{home}") == others
    back = sorted(t.source for t in tables if t.target == f"stage{home}")
    assert back == others and len(tables) == 2 * len(others)


def test_no_mesh_waits_for_the_sum_of_another():
    """Partial sums are summed after the loop: a backward reads that of the last one on its own mesh."""
    program = over_all_stages()
    made = {s: i for i in program.instructions for s in i.outputs}
    for c in program.calls:
        if c.name == "embed backward":
            sums = [
                made[s] for s in c.inputs if s in made and program.values[s][0].aval.shape == (VOCAB, WIDTH)
            ]
            assert len(sums) == 1
            (before,) = sums
            assert isinstance(before, Call) and before.mesh == c.mesh
            assert before.microbatch in (None, c.microbatch - 4)


def test_other_stages_keep_the_order_of_their_schedule():
    """It is no stage: the others are ordered as if it were not there."""
    for schedule in ("1f1b", "zero-bubble-h1"):
        table = over_all_stages(schedule=schedule).table()
        assert table == embedded_program({"stage": (0,)}, schedule=schedule).table()
        assert len(table) == 4 and {a.stage for row in table for a in row} == set(range(4))


# The same result


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule, over, per_stage",
    [
        ("gpipe", "stage", ()),
        ("1f1b", "stage", ()),
        ("gpipe", third_of, (2,)),
        ("1f1b", {"stage": (0, 2)}, (2,)),
        ("zero-bubble-h1", {"stage": (3, 1)}, ()),
    ],
)
def test_an_embedding_spread_over_stages(schedule, over, per_stage):
    """Losses, gradients, updated state and the optimizer's; state stays at home from step to step."""
    mesh, tasks = pipeline(4, *per_stage)
    ran = assert_parity(
        make(Embedded, spread(over)),
        models.cross_entropy,
        models.tokens(rows=12),
        embedded(tasks),
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        steps=3 if over == "stage" and schedule == "1f1b" else 1,
        optimizer=None if over == "stage" else optax.sgd(0.1),
        whole_batch=over == "stage",
    )
    assert len({c.mesh for c in ran.calls if c.name == "embed forward"}) > 1


@pytest.mark.slow
def test_sharded_along_an_axis_within_its_slices():
    """Slices of two devices, the table divided over them wherever it is."""
    mesh, tasks = pipeline(2, 2)
    assert_parity(
        make(Embedded, spread("stage")),
        models.cross_entropy,
        models.tokens(),
        embedded(tasks, spec=P("model")),
        mesh=mesh,
        microbatch=2,
        optimizer=MOMENTUM,
        steps=1,
    )


@pytest.mark.slow
def test_with_virtual_stages():
    mesh, tasks = pipeline(2)
    around = [tasks[i % 2] for i in range(4)]
    placement = place(
        [tasks[0], *around],
        ["embed"],
        [("layers", 0)],
        [("layers", 1)],
        [("layers", 2)],
        [("layers", 3), "head"],
    )
    ran = assert_parity(
        make(Embedded, spread("stage")),
        models.cross_entropy,
        models.tokens(),
        placement,
        mesh=mesh,
        microbatch=2,
        schedule="interleaved-1f1b",
        steps=1,
        optimizer=MOMENTUM,
    )
    assert {c.stage for c in ran.calls} == {None, 0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_a_tied_embedding_that_moves_at_both_ends(schedule):
    """Used by the moving task as an embedding and by the last stage as a head: one gradient."""
    mesh, tasks = pipeline(2)
    assert_parity(
        make(Embedded, spread("stage"), tied=True),
        models.cross_entropy,
        models.tokens(),
        place([tasks[0], *tasks], ["embed"], [("layers", range(2))], [("layers", range(2, 4))]),
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        optimizer=MOMENTUM,
        steps=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_state_that_is_carried_and_is_no_sum(schedule):
    """Statistics, a counter, a running mean and keys go from mesh to mesh in the order of microbatches."""
    mesh, tasks = pipeline(2)
    assert_parity(
        make(Fronted, mm.Task("front", loop_dependent_mesh_slice="stage")),
        models.squared_error,
        models.vectors(rows=12),
        place([tasks[0], *tasks], ["front"], ["middle"], ["last"]),
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        steps=2,
        whole_batch=False,
    )


@pytest.mark.parametrize("scoped, schedule", all_but([(1, "1f1b")], [(1, "1f1b"), (2, "gpipe"), (2, None)]))
def test_in_the_middle_and_at_the_end(scoped, schedule):
    """Wherever the task is in the flow; on meshes of other stages, and on two that have no stage."""
    mesh, tasks = pipeline(4)
    owners = [tasks[0], tasks[1]]
    owners.insert(scoped, tasks[0])
    assert_parity(
        make(Chain, mm.Task("moving", loop_dependent_mesh_slice="stage"), scoped),
        models.squared_error,
        models.vectors(rows=12, features_out=8),
        place(owners, *[[("layers", i)] for i in range(3)]),
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        steps=1,
        optimizer=MOMENTUM,
    )


@few(1)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_forwards_alone(microbatch):
    """Inference; without a loop it runs on its first slice."""
    mesh, tasks = pipeline(4)
    batch = models.tokens()["x"]

    def predict(model, x):
        run = lambda model, x: model(x)
        if microbatch is not None:
            run = mm.microbatch(run, dim=0, size=microbatch, argnum=1, reduce="concat")
        return run(model, x)

    make_model = make(Embedded, spread({"stage": (1, 2)}))
    with mesh:
        model = born(make_model, embedded(tasks))
        step = mm.jit(predict)
        names = [c for c in step.program(model, batch).calls if c.name.startswith("embed")]
        got = step(model, batch)
    assert_same(got, nnx.jit(predict)(make_model(), batch))
    on = {c.mesh.devices.item().id for c in names if c.phase == "forward" or microbatch is None}
    assert on == ({1} if microbatch is None else {1, 2})


class Scoped(nnx.Module):
    """A chain of layers, each in a task of its own."""

    def __init__(self, tasks: tuple[mm.Task, ...], *, rngs: nnx.Rngs):
        self.layers = nnx.List(mm.task(nnx.Linear(8, 8, rngs=rngs), task=task) for task in tasks)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


MOVES = mm.Task("moves", loop_dependent_mesh_slice="stage")
BACK = mm.Task("moves back", loop_dependent_mesh_slice={"stage": (1, 0)})
HALVES = mm.Task("halves", loop_dependent_mesh_slice="stage", remat=True, split_backprop=("one", "two"))
STAYS, LAST = mm.Task("stays", mesh_slice={"stage": 0}), mm.Task("last", mesh_slice={"stage": 1})


@few(1)
@pytest.mark.parametrize(
    "tasks, schedule",
    [
        ((MOVES, BACK, LAST), "1f1b"),
        ((MOVES, LAST, BACK), "zero-bubble-h1"),
        ((STAYS, HALVES, LAST), "zero-bubble-h1"),
        ((MOVES, MOVES, MOVES), "1f1b"),
    ],
    ids=["two in a row", "at both ends", "with halves and remat", "nothing else"],
)
def test_several_and_with_other_options(tasks, schedule):
    """Also where there is no stage at all, so that a schedule has nothing to order."""
    mesh, _ = pipeline(2)
    ran = assert_parity(
        make(Scoped, tasks),
        models.squared_error,
        models.vectors(features_out=8),
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        steps=1,
        optimizer=MOMENTUM,
    )
    assert {f.name for f in ran.fragments} >= {"one", "two"} or HALVES not in tasks
    for task in {task for task in tasks if task.loop_dependent_mesh_slice is not None}:
        assert len({c.mesh for c in ran.calls if c.fragment.task == task.name and c.phase == "forward"}) == 2


@pytest.mark.parametrize("schedule", all_but(["1f1b", "looped-bfs", "zbv"], schedule_names()))
def test_no_stage_at_all(schedule):
    """Every schedule has nothing to order then, or says what it needs."""
    mesh, _ = pipeline(2)
    with mesh:
        model = mm.jit(make(Scoped, (MOVES, MOVES)))()
        grad_fn = nnx.value_and_grad(models.squared_error)
        loop = mm.microbatch(grad_fn, 0, 2, argnum=1, schedule=schedule)
        step = mm.jit(lambda model, batch: loop(model, batch))
        try:
            program = step.program(model, models.vectors(features_out=8))
        except ValueError as error:
            assert repr(schedule) in str(error), error
        else:
            assert {c.microbatch for c in program.calls if c.phase == "backward"} == set(range(4))


# Calls


def trained(donate: tuple[int, ...] = ()):
    """A train step with its arguments; its tasks at home on the second stage."""
    mesh, tasks = pipeline(2)
    stack = contextlib.ExitStack()
    stack.enter_context(mesh)
    with stack:
        model = born(make(Embedded, spread("stage")), embedded(tasks, home=1))
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
    options = {"donate_argnums": donate} if donate else {}
    return mesh, train_step(mm.jit, models.cross_entropy, microbatch=2, **options), model, optimizer


@pytest.mark.slow
def test_donated_state_is_overwritten_and_right():
    """Every array of a donated model is gone after a step, and three steps are as without."""
    results = []
    for donate in ((), (0, 1)):
        mesh, step, model, optimizer = trained(donate)
        with mesh:
            for n in range(3):
                old = list(arrays(model).values())
                loss, _ = step(model, optimizer, models.tokens(seed=n))
                assert all(a.is_deleted() for a in old) == bool(donate)
        results.append((loss, nnx.state(model), nnx.state(optimizer)))
    assert_same(results[1], results[0])


@pytest.mark.slow
def test_a_second_call_compiles_nothing(compiled_anew):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    mesh, step, model, optimizer = trained()
    with mesh:
        step(model, optimizer, models.tokens())
        assert COMPILED in compiled
        compiled.clear()
        step(model, optimizer, models.tokens(seed=1))
    assert COMPILED not in compiled


def test_it_is_compiled_once_for_each_mesh_and_phase():
    program = over_all_stages(24, home=0)
    count = collections.Counter(f.name for f in program.fragments if f.name.startswith("embed "))
    assert count == {"embed forward": 4, "embed backward": 4}


# What is refused


@pytest.mark.parametrize(
    "over, words",
    [
        (lambda m: {"stage": 0} if m == 0 else {"model": 0}, ["'embed'", "microbatch 1", "of one shape"]),
        ({"stage": (0, 5)}, ["'embed'", "index 5", "'stage'"]),
        ("nope", ["'embed'", "'nope'", "'stage', 'model'"]),
        (lambda m: {"stage": m}, ["'embed'", "index 2", "'stage'"]),
    ],
    ids=["unequal", "an index that is not there", "an axis that is not there", "too far for the last"],
)
def test_slices_that_cannot_be(over, words):
    """Before anything runs, by the name of the task."""
    mesh, tasks = pipeline(2, 3)
    with mesh, pytest.raises(ValueError) as error:
        model = born(make(Embedded, spread(over)), embedded(tasks))
        grad_fn = nnx.value_and_grad(models.cross_entropy)
        loop = mm.microbatch(grad_fn, 0, 2, argnum=1, schedule="1f1b")
        mm.jit(lambda model, batch: loop(model, batch)).program(model, models.tokens())
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("over", [5, {}, {"stage": ()}, {"stage": 1}, ["stage", "model"]])
def test_what_is_no_slice(over):
    with pytest.raises(ValueError, match=r"loop_dependent_mesh_slice= of task 'embed' is an axis"):
        spread(over)


def test_only_one_place_at_a_time():
    with pytest.raises(ValueError, match="mesh_slice= and loop_dependent_mesh_slice="):
        mm.Task("embed", mesh_slice={"stage": 0}, loop_dependent_mesh_slice="stage")


def test_the_slices_of_a_task():
    """`to_mesh` gives that of each microbatch."""
    mesh, _ = pipeline(4, 2)
    with mesh:
        ids = [[d.id for d in spread({"stage": (2, 0)}).to_mesh(m).devices.flat] for m in range(3)]
    assert ids == [[4, 5], [0, 1], [4, 5]]
    assert np.array_equal(ids[0], ids[2])
