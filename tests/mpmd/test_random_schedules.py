"""Random orders of work: what is valid runs and gives the answer of one device; what is not is refused.

The rows of a mesh are drawn as one order in which all of its actions could run, so that no row asks for what
cannot be there yet. Nothing hangs: every example has a time limit.
"""

from __future__ import annotations

import functools
import random
import re
import signal
from collections.abc import Collection, Iterable, Sequence

import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import mmnnx as mm
from mmnnx.mpmd.schedule import Action, Stages
from mmnnx.mpmd.schedule.list_scheduling import Jobs, Stuck, play
from tests import models
from tests.models import make
from tests.mpmd.parity import assert_same, born, on_meshes, place
from tests.slow import examples

ROWS, WIDTH = 2, 4
PARTS = ("backward-input", "backward-weight")
LIMIT = 60  # seconds for one example, which takes less than two


@pytest.fixture(autouse=True)
def time_limit():
    def late(*_):
        raise TimeoutError(f"an example took more than {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class Network(nnx.Module):
    """Stage s adds up what it reads, the input if nothing, and puts it through its layer."""

    def __init__(self, reads, tasks, *, rngs: nnx.Rngs):
        self.reads, self.tasks = reads, tasks
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in reads)

    def __call__(self, x):
        results = []
        for s, (before, task) in enumerate(zip(self.reads, self.tasks)):
            inputs = [results[r] for r in before] or [x]
            run = lambda layer, *inputs: jnp.tanh(layer(sum(inputs)))
            results.append(mm.task(run, task=task)(self.layers[s], *inputs))
        read = {r for before in self.reads for r in before}
        # The last stage reads all that no other does, and so the loss is its own.
        assert read == set(range(len(results) - 1))
        return results[-1]


@st.composite
def networks(draw):
    """Stages: a chain, or a graph of which the last stage is the only end; on meshes of their own, or not."""
    count = draw(st.integers(2, 4))
    reads = [draw(st.sets(st.integers(0, s - 1), min_size=1)) if s else set() for s in range(count)]
    if draw(st.booleans()):
        reads = [{s - 1} if s else set() for s in range(count)]
    unread = set(range(count - 1)) - set().union(*reads)
    reads[-1] |= unread
    meshes = draw(
        st.lists(st.integers(0, 2), min_size=count, max_size=count).filter(lambda m: len(set(m)) > 1)
    )
    number = {mesh: n for n, mesh in enumerate(dict.fromkeys(meshes))}
    return Stages(tuple(number[m] for m in meshes), tuple(tuple(sorted(r)) for r in reads))


def needed(
    action: Action, stages: Stages, cut: Sequence[bool], in_order: Collection[int] = ()
) -> list[Action]:
    """What must have run before an action. All is of its microbatch, whose order is free.

    Stages in `in_order` hand state from one microbatch to the next, as a BatchNorm does.
    """
    s, phase, m = action
    back = lambda r: Action(r, "backward-input" if cut[r] else "backward", m)
    if phase == "forward":
        before = [Action(s, "forward", m - 1)] if s in in_order and m else []
        return [*before, *(Action(r, "forward", m) for r in stages.reads[s])]
    if phase == "backward-weight":
        return [Action(s, "backward-input", m)]
    readers = [r for r in range(stages.num_stages) if s in stages.reads[r]]
    return [Action(s, "forward", m), *map(back, readers)]


def actions(stages: Stages, num_microbatches: int, cut: Sequence[bool]) -> list[Action]:
    phases = {True: ("forward", "backward-input", "backward-weight"), False: ("forward", "backward")}
    return [
        Action(s, phase, m)
        for s in range(stages.num_stages)
        for phase in phases[cut[s]]
        for m in range(num_microbatches)
    ]


def random_table(
    rng: random.Random,
    stages: Stages,
    num_microbatches: int,
    cut: Sequence[bool],
    in_order: Collection[int] = (),
):
    """An order in which all actions could run one at a time, divided among the meshes or the stages."""
    left, order = set(actions(stages, num_microbatches, cut)), []
    while left:
        ready = sorted(a for a in left if not left.intersection(needed(a, stages, cut, in_order)))
        order.append(rng.choice(ready))
        left.remove(order[-1])
    rows = rng.choice([stages.meshes, range(stages.num_stages)])
    return [[a for a in order if rows[a.stage] == row] for row in sorted(set(rows))]


@st.composite
def tables(draw):
    """(stages, number of microbatches, table): whole backwards and cut ones, stage by stage."""
    stages = draw(networks())
    num_microbatches = draw(st.integers(1, 4))
    cut = draw(st.lists(st.booleans(), min_size=stages.num_stages, max_size=stages.num_stages))
    table = random_table(draw(st.randoms(use_true_random=False)), stages, num_microbatches, cut)
    return stages, num_microbatches, table


@functools.cache
def meshes_of(stages: Stages) -> tuple[mm.MultiMesh, list[mm.Task]]:
    return on_meshes(stages.meshes)


def step_of(stages: Stages, table: Sequence[Sequence[Action]]):
    """A function of (model, batch) to (loss, gradients) that follows the table, and what to call it with."""
    mesh, tasks = meshes_of(stages)
    make_model = make(Network, stages.reads, tuple(tasks))
    with mesh:
        model = born(make_model, place(tasks, *[[("layers", s)] for s in range(stages.num_stages)]))
    run = mm.microbatch(
        nnx.value_and_grad(models.squared_error), 0, ROWS, argnum=1, custom_schedule=table, reduce="mean"
    )
    return mm.jit(lambda model, batch: run(model, batch), mesh=mesh), model, make_model


def data(num_microbatches: int) -> models.Batch:
    return models.vectors(ROWS * num_microbatches, WIDTH, WIDTH)


def flat(table: Sequence[Sequence[Action]]) -> set[Action]:
    return {a for row in table for a in row}


def phases(some: Iterable[Action]) -> set[tuple[int, str]]:
    return {(a.stage, a.phase) for a in some}


def check(stages: Stages, num_microbatches: int, table: Sequence[Sequence[Action]]) -> None:
    """The table is followed, and gives the loss and gradients of one device."""
    step, model, make_model = step_of(stages, table)
    batch = data(num_microbatches)
    program = step.program(model, batch)
    program.verify()
    ran = program.table()
    assert not phases(flat(ran) - flat(table)) & phases(flat(table))
    for row in filter(None, table):
        (found,) = [mine for actions in ran if (mine := [a for a in actions if a in row])]
        assert found == [a for a in row if a in flat(ran)]
    expected = nnx.jit(nnx.value_and_grad(models.squared_error))(make_model(), batch)
    assert_same(step(model, batch), expected, what="loss and gradients")


@examples(8)
@given(tables())
def test_random_valid_tables_run_and_match(drawn):
    signal.alarm(LIMIT)
    check(*drawn)


# What is done to a table, and what is said of it then. In another order it may still run.
REFUSALS = {
    "shuffle a row": "cannot run",
    "swap two": "cannot run",
    "another row": "cannot run|row . has stages of meshes",
    "drop one": "is missing",
    "drop the end": "is missing|has no entries",
    "repeat one": "is there 2 times",
    "drop a row": "is missing|has no entries",
}


def spoil(rng: random.Random, how: str, table: list[list[Action]]) -> list[list[Action]]:
    rows = [list(row) for row in table]
    row = rng.choice([r for r in rows if len(r) > 1])
    match how:
        case "shuffle a row":
            rng.shuffle(row)
        case "swap two":
            i, j = rng.sample(range(len(row)), 2)
            row[i], row[j] = row[j], row[i]
        case "drop one":
            row.pop(rng.randrange(len(row)))
        case "drop the end":
            del row[rng.randrange(len(row)) :]
        case "repeat one":
            row.insert(rng.randrange(len(row)), rng.choice(row))
        case "another row":
            rng.choice([r for r in rows if r is not row]).append(row.pop())
        case "drop a row":
            rows.remove(row)
    return rows


@examples(20)
@given(tables(), st.sampled_from(sorted(REFUSALS)), st.randoms(use_true_random=False))
def test_spoilt_tables_are_refused_or_still_right(drawn, how, rng):
    """In another order work may still be possible, and then the answer is right.

    With something missing, there twice or in a row of another mesh it is not, and that is said before
    anything runs. Only if a table has a stage's backwards by one of their parts alone, as if it had no other,
    the other follows by dependency.
    """
    signal.alarm(LIMIT)
    stages, num_microbatches, table = drawn
    spoilt = spoil(rng, how, table)
    step, model, _ = step_of(stages, spoilt)
    gone = phases(flat(table)) - phases(flat(spoilt))
    may_run = "cannot run" in REFUSALS[how] or any((s, part) in gone for s, part in cut_parts(spoilt))
    try:
        step.program(model, data(num_microbatches))
    except ValueError as error:
        assert re.search(REFUSALS[how] + ("|cannot run" if may_run else ""), str(error)), str(error)
    else:
        assert may_run
        check(stages, num_microbatches, spoilt)


def cut_parts(table: Sequence[Sequence[Action]]) -> set[tuple[int, str]]:
    """Both parts of the backwards of each stage that a table has by at least one of them."""
    cut = {a.stage for a in flat(table) if a.phase in PARTS}
    return {(s, part) for s in cut for part in PARTS}


# play, without running anything


@st.composite
def jobs(draw):
    """Jobs that wait for earlier ones; rows in any order; some early, some in no row."""
    count = draw(st.integers(1, 12))
    meshes = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    waits = [sorted(draw(st.sets(st.integers(0, n - 1), max_size=3))) if n else [] for n in range(count)]
    costs = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)) | st.just(list(range(count))))
    where = draw(
        st.lists(st.sampled_from(["row", "other row", "early", "late"]), min_size=count, max_size=count)
    )
    rows = [
        row
        for mesh in range(3)
        for kind in ("row", "other row")
        if (row := [n for n in order if meshes[n] == mesh and where[n] == kind])
    ]
    return Jobs(meshes, costs, waits, rows, frozenset(n for n in range(count) if where[n] == "early"))


@given(jobs())
def test_play(drawn):
    """Every job once, after what it waits for, rows in their order, one job at a time on each mesh; or stuck,
    and then no row has a next job that could start.
    """
    count = len(drawn.meshes)
    try:
        played = play(drawn)
    except Stuck as stuck:
        assert stuck.heads and set(stuck.heads) <= set(stuck.left)
        done = set(range(count)) - set(stuck.left)
        for row in drawn.rows:
            left = [n for n in row if n not in done]
            assert row[len(row) - len(left) :] == left
            assert not left or left[0] in stuck.heads
        assert all(set(drawn.waits[n]) - done for n in stuck.heads)
        return
    assert sorted(n for _, n in played) == list(range(count))
    start = {n: begin for begin, n in played}
    place = {n: i for i, (_, n) in enumerate(played)}
    end = {n: start[n] + drawn.costs[n] for n in start}
    assert [begin for begin, _ in played] == sorted(start.values())
    for n in range(count):
        assert all(start[n] >= end[w] and place[n] > place[w] for w in drawn.waits[n])
    for row in drawn.rows:
        assert [place[n] for n in row] == sorted(place[n] for n in row)
    for mesh in set(drawn.meshes):
        mine = [n for _, n in played if drawn.meshes[n] == mesh]
        assert all(start[b] >= end[a] for a, b in zip(mine, mine[1:]))


@given(jobs())
def test_jobs_in_the_order_of_their_numbers_are_never_stuck(drawn):
    """Each waits for earlier ones alone."""
    rows = [sorted(row) for row in drawn.rows]
    assert len(play(drawn._replace(rows=rows))) == len(drawn.meshes)
