"""Stages that are told apart by the tasks that a TaskSharding names for their state, and by nothing else."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.train.checkpoint import Checkpoints
from tests import models
from tests.models import make
from tests.mpmd.parity import (
    ADAMW,
    MOMENTUM,
    assert_parity,
    assert_same,
    born_with_optimizer,
    pipeline,
    place,
)
from tests.slow import all_but

SMALL = make(models.MLP, 4, 8)
VEE, LOOP, NEIGHBOURS = (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1, 1)
TIED = make(models.Transformer, layers=2, width=8, vocab=16, tied=True)


def tasks_on(meshes: Sequence[int], *per_stage: int) -> tuple[mm.MultiMesh, list[mm.Task]]:
    mesh, _ = pipeline(max(meshes) + 1, *per_stage)
    return mesh, [mm.Task(f"part{n}", mesh_slice={"stage": m}) for n, m in enumerate(meshes)]


def one_layer_each(tasks: Sequence[mm.Task]) -> mm.TaskSharding:
    return place(tasks, *([("layers", n)] for n in range(len(tasks))))


def step_of(schedule: str | None, **options) -> Callable:
    grad_fn = mm.microbatch(
        nnx.value_and_grad(models.squared_error), 0, 2, argnum=1, schedule=schedule, reduce="mean", **options
    )

    def step(model, optimizer, batch):
        loss, grads = grad_fn(model, batch)
        optimizer.update(model, grads)
        return loss

    return step


def stages_of(program: mm.Program) -> list[tuple[int, ...]]:
    """The stages that run on each mesh."""
    return [tuple(sorted({action.stage for action in row})) for row in program.table()]


@pytest.mark.parametrize(
    "schedule, meshes",
    all_but(
        [("zbv", VEE)],
        [
            ("zbv", VEE),
            ("dualpipe-v", VEE),
            ("interleaved-1f1b", LOOP),
            ("looped-bfs", LOOP),
            ("interleaved-zero-bubble", LOOP),
        ],
    ),
)
def test_four_tasks_on_two_meshes(schedule, meshes):
    mesh, tasks = tasks_on(meshes)
    batch = models.vectors(rows=8)
    program = assert_parity(
        SMALL, models.squared_error, batch, one_layer_each(tasks), mesh=mesh, microbatch=2, schedule=schedule
    )
    assert stages_of(program) == [tuple(n for n in range(4) if meshes[n] == m) for m in range(2)]
    assert {f"part{n} forward" for n in range(4)} <= {f.name for f in program.fragments}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zbv", "interleaved-1f1b"])
def test_eight_tasks_on_four_meshes(schedule):
    down = (0, 1, 2, 3)
    mesh, tasks = tasks_on((*down, *(reversed(down) if schedule == "zbv" else down)), 2)
    batch, model = models.vectors(rows=14), make(models.MLP, 8, 8)
    placement = mm.pipeline_sharding(nnx.eval_shape(model), stages=tasks, layers="layers")
    program = assert_parity(
        *(model, models.squared_error, batch, placement),
        **dict(mesh=mesh, microbatch=2, schedule=schedule, optimizer=MOMENTUM, steps=1),
    )
    assert sorted(stages_of(program)) == sorted((n, 7 - n if schedule == "zbv" else n + 4) for n in down)


@pytest.mark.slow
@pytest.mark.parametrize("schedule, meshes", [("zbv", VEE), ("interleaved-1f1b", LOOP)])
def test_a_second_loop_reads_weights_that_were_updated_since_the_first(schedule, meshes):
    """Their new values have the tasks of the old: as where a discriminator takes several steps."""
    mesh, tasks = tasks_on(meshes)
    step = step_of(schedule)

    def twice(model, optimizer, batch):
        step(model, optimizer, batch)
        return step(model, optimizer, batch)

    results = []
    for jit, placement in (nnx.jit, None), (mm.jit, one_layer_each(tasks)):
        with mesh:
            (model, optimizer), run = born_with_optimizer(SMALL, placement, MOMENTUM), jit(twice)
            results.append((run(model, optimizer, models.vectors(rows=8)), model, optimizer))
    assert_same(results[1], results[0])
    with mesh:
        program = run.program(model, optimizer, models.vectors(rows=8))
    for loop in program.loops:
        assert {f"part{n} forward" for n in range(4)} <= {f.name for row in loop.fragments for f in row}


@pytest.mark.slow
def test_weights_of_the_first_stage_that_the_last_uses_too():
    mesh, tasks = tasks_on(VEE)
    placement = place(tasks, ["embed"], [("blocks", 0)], [("blocks", 1)], ["norm"])
    batch = models.tokens(rows=8, length=4, vocab=16)
    program = assert_parity(
        TIED, models.cross_entropy, batch, placement, mesh=mesh, microbatch=2, schedule="zbv", steps=2
    )
    assert stages_of(program) == [(0, 3), (1, 2)]
    # One activation forward and one gradient back for each microbatch and boundary between meshes.
    assert len([t for t in program.transfers if t.microbatch is not None]) == 4 * 2 * 2


@pytest.mark.slow
def test_state_that_changes_with_every_microbatch():
    """BatchNorm's statistics, and Dropout's counters, which no stage owns."""
    mesh, tasks = tasks_on(VEE)
    parts = [("convs", 0)], [("norms", 0)], [("convs", 1)], [("norms", 1), "head", "dropouts"]
    program = assert_parity(
        *(make(models.ConvNet), models.cross_entropy, models.images(rows=8), place(tasks, *parts)),
        **dict(mesh=mesh, microbatch=2, schedule="zbv", steps=2, whole_batch=False),
    )
    assert stages_of(program) == [(0, 3), (1, 2)]


@pytest.mark.parametrize("schedule", all_but(["1f1b"], ["1f1b", "zero-bubble-h1", None]))
def test_neighbours_are_one_stage_where_the_schedule_has_no_use_for_two(schedule):
    """As many transfers, and as many calls, as if one task had the state of both."""
    mesh, tasks = tasks_on(NEIGHBOURS)
    halves = place(pipeline(2)[1], [("layers", (0, 1))], [("layers", (2, 3))])
    batch = models.vectors(rows=8)
    programs = [
        assert_parity(
            SMALL, models.squared_error, batch, placement, mesh=mesh, microbatch=2, schedule=schedule, steps=2
        )
        for placement in (one_layer_each(tasks), halves)
    ]
    assert stages_of(programs[0]) == [(0,), (1,)]
    assert len({len(p.transfers) for p in programs}) == len({len(p.calls) for p in programs}) == 1


@pytest.mark.slow
def test_a_schedule_of_their_names_tells_neighbours_apart():
    mesh, tasks = tasks_on(NEIGHBOURS)
    rows = [
        [f"part{n} {phase}" for phase, order in (("forward", pair), ("backward", pair[::-1])) for n in order]
        for pair in ((0, 1), (2, 3))
    ]
    program = assert_parity(
        *(SMALL, models.squared_error, models.vectors(rows=4), one_layer_each(tasks)),
        **dict(mesh=mesh, microbatch=4, schedule="custom", custom_schedule=rows, steps=1),
    )
    assert {name for row in rows for name in row} <= {f.name for f in program.fragments}


@pytest.mark.parametrize("meshes", [VEE, NEIGHBOURS])
def test_as_many_stages_as_are_asked_for(meshes):
    mesh, tasks = tasks_on(meshes)
    with mesh:
        model, optimizer = born_with_optimizer(SMALL, one_layer_each(tasks), ADAMW)
        batch = models.vectors(rows=8)
        counts = [
            len({n for stages in stages_of(mm.jit(step).program(model, optimizer, batch)) for n in stages})
            for step in (step_of(None), step_of(None, num_stages=4))
        ]
    assert counts == [len(list(itertools.groupby(meshes))), 4]


@pytest.mark.slow
def test_each_stage_has_the_options_of_its_task():
    """Two tasks with state on one mesh, of which one has its forward computed again."""
    mesh, tasks = tasks_on(VEE)
    batch = models.vectors(rows=8)
    saved = []
    for remat in (None, True):
        tasks[2] = dataclasses.replace(tasks[2], remat=remat)
        program = assert_parity(
            *(make(models.MLP, 8, 8), models.squared_error, batch),
            place(tasks, *([("layers", (2 * n, 2 * n + 1))] for n in range(4))),
            **dict(mesh=mesh, microbatch=2, schedule="zbv", optimizer=MOMENTUM, steps=1),
        )
        saved.append(list(program.simulate().residual_bytes.values()))
    (first, second), (same, less) = saved
    assert first == same and less < second


def test_too_few_microbatches_for_stages_told_apart():
    mesh, tasks = tasks_on(VEE)
    with mesh:
        model, optimizer = born_with_optimizer(SMALL, one_layer_each(tasks), ADAMW)
        with pytest.raises(ValueError, match="two microbatches for each mesh, at least 4 here"):
            mm.jit(step_of("dualpipe-v")).program(model, optimizer, models.vectors(rows=4))


@pytest.mark.slow
def test_state_that_went_other_ways_knows_its_task(tmp_path):
    """From the host by in_shardings, as a copy, out of a State, in a tuple, restored to a new MultiMesh."""
    mesh, tasks = tasks_on(VEE)
    batch, step = models.vectors(rows=8), step_of("zbv")
    expected_step = nnx.jit(step_of(None))
    model, expected = SMALL(), SMALL()
    optimizer, expected_optimizer = (nnx.Optimizer(m, ADAMW, wrt=nnx.Param) for m in (model, expected))

    def check(jitted, *arguments):
        assert stages_of(jitted.program(*arguments)) == [(0, 3), (1, 2)]
        assert_same(jitted(*arguments), expected_step(expected, expected_optimizer, batch))

    with mesh:
        placed_step = mm.jit(step)
        check(mm.jit(step, in_shardings=(one_layer_each(tasks), None, None)), model, optimizer, batch)
        model, optimizer = nnx.clone((model, optimizer))
        check(placed_step, model, optimizer, batch)
        graph, state = nnx.split((model, optimizer))
        model, optimizer = nnx.merge(graph, jax.tree.map(jnp.copy, state))
        check(mm.jit(lambda both, batch: step(*both, batch)), (model, optimizer), batch)
    with Checkpoints(tmp_path) as checkpoints, tasks_on(VEE)[0]:
        checkpoints.save(1, {"model": model, "optimizer": optimizer})
        model, optimizer = nnx.eval_shape(lambda: (m := SMALL(), nnx.Optimizer(m, ADAMW, wrt=nnx.Param)))
        nodes = {"model": model, "optimizer": optimizer}
        checkpoints.restore(nodes, sharding=one_layer_each(tasks))
        check(mm.jit(step), model, optimizer, batch)
    assert_same(model, expected)
    assert_same(optimizer, expected_optimizer)
