"""Schedules as tables: complete, free of deadlock, and as short and as frugal as their papers say."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmnnx.mpmd import schedule as schedules
from mmnnx.mpmd.ir.timeline import Event, Timeline
from mmnnx.mpmd.schedule import (
    Action,
    Stages,
    Table,
    check_table,
    get_schedule,
    register_schedule,
    schedule_names,
    simulate,
)
from mmnnx.mpmd.schedule.list_scheduling import Jobs, Stuck, play
from tests.slow import all_but

LETTERS = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}
NAMES = [
    "sequential",
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "wavefront",
    "interleaved-1f1b",
    "looped-bfs",
    "zero-bubble-h1",
    "zero-bubble-h2",
    "interleaved-zero-bubble",
    "zbv",
    "dualpipe-v",
]
LOOPING = ["interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble"]
VEES = ["zbv", "dualpipe-v"]
ANYWHERE = [name for name in NAMES if name not in LOOPING + VEES]  # on all stages, wherever they lie


def rounds(num_meshes: int, times: int) -> Stages:
    return Stages.chain(list(range(num_meshes)) * times)


def vee(num_meshes: int) -> Stages:
    return Stages.chain([*range(num_meshes), *reversed(range(num_meshes))])


def stages_for(name: str, num_meshes: int) -> Stages:
    """The usual stages of a schedule: one on each mesh, or two."""
    return vee(num_meshes) if name in VEES else rounds(num_meshes, 2 if name in LOOPING else 1)


def row(text: str) -> list[Action]:
    """Actions from cells such as 0F3."""
    return [Action(int(cell[0]), LETTERS[cell[1]], int(cell[2:])) for cell in text.split()]


def played(name: str, stages: Stages, num_microbatches: int, **options: int) -> Timeline:
    """The timeline of a schedule's table, which is checked."""
    table = get_schedule(name).table(stages, num_microbatches, **options)
    check_table(table, stages, num_microbatches, name)
    return simulate(table, stages)


# What the papers say: P meshes, V stages on each, M microbatches; p is a mesh.

# From so many microbatches on, the bubble is this share of the time.
BUBBLES = {
    "sequential": (lambda P: 1, lambda P, V, M: (P - 1) / P),
    "gpipe": (lambda P: 1, lambda P, V, M: (P - 1) / (M + P - 1)),
    "1f1b": (lambda P: 1, lambda P, V, M: (P - 1) / (M + P - 1)),
    "eager-1f1b": (lambda P: 1, lambda P, V, M: (P - 1) / (M + P - 1)),
    "wavefront": (lambda P: 1, lambda P, V, M: (P - 1) / (M + P - 1)),
    "interleaved-1f1b": (lambda P: P, lambda P, V, M: (P - 1) / (V * M + P - 1)),
    "looped-bfs": (lambda P: P, lambda P, V, M: (P - 1) / (V * M + P - 1)),
    "zero-bubble-h1": (lambda P: P, lambda P, V, M: (P - 1) / (3 * M + P - 1)),
    "zero-bubble-h2": (lambda P: 2 * P - 1, lambda P, V, M: 0),
    "interleaved-zero-bubble": (lambda P: P, lambda P, V, M: (P - 1) / (3 * V * M + P - 1)),
    "zbv": (lambda P: 2 * P - 1, lambda P, V, M: 0),
    "dualpipe-v": (lambda P: 2 * P, lambda P, V, M: (P - 1) / (6 * M + P - 1)),
}


def longest_turn(P: int, M: int) -> int:
    return M if M < P else -(-M // (M // P))


# The most (stage, microbatch) pairs of residuals that a mesh holds.
HELD = {
    "sequential": lambda P, V, M, p: 1,
    "gpipe": lambda P, V, M, p: M,
    "1f1b": lambda P, V, M, p: P - p,
    "eager-1f1b": lambda P, V, M, p: 2 * (P - p) - 1,
    "wavefront": lambda P, V, M, p: 2 * (P - p) - 1,
    "interleaved-1f1b": lambda P, V, M, p: (V - 1) * longest_turn(P, M) + 2 * (P - p) - 1,
    "looped-bfs": lambda P, V, M, p: V * M,
    "zero-bubble-h1": lambda P, V, M, p: P,
    "zero-bubble-h2": lambda P, V, M, p: 2 * P - 1,
    "interleaved-zero-bubble": lambda P, V, M, p: (V - 1) * longest_turn(P, M) + P,
    "zbv": lambda P, V, M, p: 2 * P,
    "dualpipe-v": lambda P, V, M, p: 2 * P + 1,
}


def assert_as_published(name: str, stages: Stages, M: int) -> None:
    timeline = played(name, stages, M)
    P = stages.num_meshes
    V = stages.num_stages // P
    assert timeline.makespan >= 3 * M - 1e-6  # the work of a mesh
    enough, bubble = BUBBLES[name]
    if enough(P) <= M:
        assert timeline.bubble == pytest.approx(bubble(P, V, M), abs=1e-9), (P, V, M)
    held = timeline.in_flight()
    for p in range(P):
        bound = HELD[name](P, V, M, p)
        assert held[f"mesh{p}"] <= min(bound, V * M), (P, V, M, p)
        if M >= 4 * P and M % P == 0:  # and it is attained: the formula says no more than there is
            assert held[f"mesh{p}"] == bound, (P, V, M, p)


@pytest.mark.parametrize("num_meshes", all_but(range(1, 6), range(1, 9)))
@pytest.mark.parametrize("name", NAMES)
def test_every_size(name, num_meshes):
    """1 to 20 microbatches: each action is there once, none waits for ever, bubble and memory are right."""
    least = 2 * num_meshes if name == "dualpipe-v" else 1
    for num_microbatches in range(least, 21):
        assert_as_published(name, stages_for(name, num_meshes), num_microbatches)


@pytest.mark.parametrize("times", [1, 3, 4])
@pytest.mark.parametrize("name", LOOPING)
def test_any_number_of_stages_on_a_mesh(name, times):
    for num_meshes, num_microbatches in [(1, 3), (2, 1), (2, 5), (3, 9), (4, 3), (4, 16), (5, 13)]:
        assert_as_published(name, rounds(num_meshes, times), num_microbatches)


@pytest.mark.parametrize("unrolling", [1, 2, 3, 5, 6, 7, 11, 40])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zero-bubble"])
def test_turns_of_any_length(name, unrolling):
    """Also shorter than the pipeline, when no mesh may run far ahead; at best as short as with turns of P."""
    for num_meshes, times, num_microbatches in [(4, 3, 2), (4, 3, 8), (3, 2, 7), (6, 2, 12), (6, 4, 17)]:
        stages = rounds(num_meshes, times)
        timeline = played(name, stages, num_microbatches, unrolling=unrolling)
        best = played(name, stages, num_microbatches)
        if unrolling == num_meshes:
            assert timeline == best
        assert timeline.makespan >= best.makespan - 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_large_one(name):
    assert_as_published(name, stages_for(name, 16), 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zero-bubble-h2", "interleaved-zero-bubble", "zbv"])
def test_a_very_large_one(name):
    """64 stages and 512 microbatches: built, checked and played within seconds of one core."""
    begin = time.process_time()
    stages = stages_for(name, 64 if name in ANYWHERE else 32)
    assert stages.num_stages == 64
    assert_as_published(name, stages, 512)
    assert time.process_time() - begin < 20


def test_all_schedules_are_here():
    """With simple ones first, as lists show them."""
    assert [name for name in schedule_names() if name in NAMES] == NAMES
    assert set(BUBBLES) == set(HELD) == set(NAMES)


# Written out


def test_interleaved_1f1b_written_out():
    """Figure 4 of Narayanan et al. 2021, on two meshes: stages 0 and 2 on mesh 0, 1 and 3 on mesh 1."""
    assert get_schedule("interleaved-1f1b").table(rounds(2, 2), 4) == [
        row("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"),
        row("1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"),
    ]


def test_interleaved_1f1b_with_unrolling():
    """Three microbatches of one stage before the next; of seven, three and then four."""
    table = get_schedule("interleaved-1f1b").table(rounds(2, 2), 7, unrolling=3)
    forwards = [(a.stage, a.microbatch) for a in table[0] if a.phase == "forward"]
    assert forwards[:6] == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2)]
    assert forwards[6:] == [(s, m) for s in (0, 2) for m in (3, 4, 5, 6)]
    backwards = [(a.stage, a.microbatch) for a in table[1] if a.phase == "backward"]
    assert backwards[:6] == [(3, 0), (3, 1), (3, 2), (1, 0), (1, 1), (1, 2)]


def test_looped_bfs_written_out():
    assert get_schedule("looped-bfs").table(rounds(2, 2), 2) == [
        row("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"),
        row("1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"),
    ]


def test_zero_bubble_h1_written_out():
    """Figure 2 of Qi et al. 2023, with three stages."""
    assert get_schedule("zero-bubble-h1").table(rounds(3, 1), 4) == [
        row("0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"),
        row("1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3"),
        row("2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"),
    ]


def test_zero_bubble_h2_written_out():
    """Figure 3 of Qi et al. 2023, with two stages: one more forward ahead, and weights later by as much."""
    assert get_schedule("zero-bubble-h2").table(rounds(2, 1), 4) == [
        row("0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"),
        row("1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"),
    ]


def test_zbv_written_out():
    assert get_schedule("zbv").table(vee(2), 3) == [
        row("0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2"),
        row("1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"),
    ]


def test_dualpipe_v_written_out():
    """Whole backwards in the middle, cut ones at both ends."""
    assert get_schedule("dualpipe-v").table(vee(2), 4) == [
        row("0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3"),
        row("1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3"),
    ]


def test_wavefront_follows_the_longest_way():
    """Two encoders, one with a stage more, and a decoder: the shorter one is a diagonal early, both ways."""
    stages = Stages(meshes=(0, 1, 2, 3), reads=((), (), (1,), (0, 2)))
    assert get_schedule("wavefront").table(stages, 4) == [
        row("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"),
        row("1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"),
        row("2F0 2F1 2F2 2B0 2F3 2B1 2B2 2B3"),
        row("3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3"),
    ]


def test_what_a_microbatch_reads_of_the_one_before():
    """Where the first stage waits for the last, nothing overlaps; and backwards cannot come later."""
    chain = Stages.chain(range(3))
    after_forward = dataclasses.replace(chain, carried=(((2, "forward"), (0, "forward")),))
    forwards = [[Action(s, "forward", m) for m in range(4)] for s in range(3)]
    assert simulate(forwards, chain, {"forward": 1}).makespan == 6
    assert simulate(forwards, after_forward, {"forward": 1}).makespan == 12
    after_backward = dataclasses.replace(chain, carried=(((0, "backward"), (0, "forward")),))
    assert simulate(get_schedule("sequential").table(chain, 4), after_backward).makespan > 0
    halves = get_schedule("zero-bubble-h1").table(chain, 4)
    for table in (get_schedule("1f1b").table(chain, 4), halves):
        with pytest.raises(ValueError, match="wait for each other.*forward of microbatch 1 on stage 0"):
            simulate(table, after_backward)


def test_eager_1f1b_hides_transfers():
    """Where a value is under way for as long as a forward takes, 1F1B waits and eager 1F1B does not.

    Transfers are stages of their own, on meshes of their own.
    """
    stages = Stages.chain(range(5))
    costs = dict(forward=1.0, backward=1.0)
    spans = {}
    for name in ("1f1b", "eager-1f1b"):
        table = get_schedule(name).table(rounds(3, 1), 24)
        real = [[a._replace(stage=2 * a.stage) for a in row] for row in table]
        wires = [
            [Action(s, phase, m) for m in range(24)] for s in (1, 3) for phase in ("forward", "backward")
        ]
        spans[name] = simulate(real + wires, stages, costs).makespan
    assert spans["eager-1f1b"] < 2 * 24 + 10 < 3 * 24 < spans["1f1b"]


# Stages that are not one on each mesh, in a chain

GRAPHS = {
    "two encoders": Stages((0, 1, 2), ((), (), (0, 1))),
    "a skip": Stages((0, 1, 2, 3), ((), (0,), (1,), (0, 2))),
    "a fork": Stages((0, 1, 1, 0), ((), (0,), (0,), (1, 2))),
    "two ends": Stages((1, 0, 2), ((), (0,), (0,))),
    "apart": Stages((0, 1), ((), ())),
    "one mesh": Stages.chain((0, 0, 0)),
    "rounds": rounds(3, 3),
    "a V": vee(4),
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", ANYWHERE)
def test_any_graph(name, graph):
    stages = GRAPHS[graph]
    for num_microbatches in (1, 2, 3, 8):
        timeline = played(name, stages, num_microbatches)
        assert len(timeline.by_mesh()) == stages.num_meshes
        for num, events in timeline.by_mesh().items():  # each stage is its share of the mesh
            assert sum(e.end - e.start for e in events) == pytest.approx(3 * num_microbatches), num


@pytest.mark.parametrize("name, most", [("1f1b", 4), ("zero-bubble-h1", 4), ("zero-bubble-h2", 7)])
def test_memory_of_a_graph(name, most):
    """The depth of the graph counts: with a skip, four stages are still four deep."""
    assert max(played(name, GRAPHS["a skip"], 16).in_flight().values()) == most


# Refusals


@pytest.mark.parametrize("name", LOOPING + VEES)
@pytest.mark.parametrize("meshes", [(0, 0, 1, 1), (0, 1, 0), (1, 0, 1, 0)])
def test_stages_that_lie_otherwise(name, meshes):
    shown = ", ".join(map(str, meshes))
    with pytest.raises(ValueError, match=f"schedule '{name}' needs .* such as .*on meshes {shown}"):
        get_schedule(name).table(Stages.chain(meshes), 8)


@pytest.mark.parametrize("name", LOOPING + VEES)
def test_a_graph_where_a_chain_is_needed(name):
    stages = Stages((0, 1, 1, 0) if name in VEES else (0, 1, 0, 1), ((), (0,), (0,), (1, 2)))
    with pytest.raises(ValueError, match=f"'{name}' is for a chain, .*here stage 2 reads stage 0. Leave"):
        get_schedule(name).table(stages, 8)


@pytest.mark.parametrize("name", LOOPING + VEES)
def test_interleave_is_checked(name):
    stages = stages_for(name, 2)
    schedule = get_schedule(name)
    assert schedule.table(stages, 4, interleave=2) == schedule.table(stages, 4)
    with pytest.raises(ValueError, match="interleave=3, but .* two stages|interleave=3, but each mesh has 2"):
        schedule.table(stages, 4, interleave=3)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zero-bubble"])
def test_unrolling_none_at_all(name):
    with pytest.raises(ValueError, match="unrolling=0: a mesh runs at least one microbatch"):
        get_schedule(name).table(rounds(2, 2), 4, unrolling=0)


def test_dualpipe_v_with_few_microbatches():
    with pytest.raises(ValueError, match="two microbatches for each mesh, at least 8 here; there are 7"):
        get_schedule("dualpipe-v").table(vee(4), 7)
    assert played("dualpipe-v", vee(4), 8).bubble == pytest.approx(3 / 51)


@pytest.mark.parametrize("name", VEES)
def test_more_stages_than_a_v_has_are_explained(name):
    with pytest.raises(ValueError, match="on meshes 0, 1, 1, 0, 1. A further stage begins wherever"):
        get_schedule(name).table(Stages.chain((0, 1, 1, 0, 1)), 4)


def test_an_unknown_name():
    with pytest.raises(ValueError, match="'zigzag'; there are '1f1b', 'dualpipe-v'"):
        get_schedule("zigzag")


def test_options_are_known():
    assert {name: get_schedule(name).options for name in NAMES if get_schedule(name).options} == {
        "interleaved-1f1b": ("interleave", "unrolling"),
        "looped-bfs": ("interleave",),
        "interleaved-zero-bubble": ("interleave", "unrolling"),
        "zbv": ("interleave",),
        "dualpipe-v": ("interleave",),
    }


def test_a_schedule_of_ones_own(monkeypatch):
    monkeypatch.setattr(schedules.base, "_schedules", dict(schedules.base._schedules))

    @register_schedule("forwards-first")
    def forwards_first(stages, num_microbatches):
        order = range(num_microbatches)
        return [
            [(s, phase, m) for phase in ("forward", "backward") for m in order]  # as good as Actions
            for s in range(stages.num_stages)
        ]

    table = get_schedule("forwards-first").table(rounds(2, 1), 2)
    assert table == get_schedule("gpipe").table(rounds(2, 1), 2)
    assert table[1][3].phase == "backward"


# Properties


@st.composite
def sizes(draw):
    """(name, stages, number of microbatches, options) that a schedule is for."""
    name = draw(st.sampled_from(NAMES))
    num_meshes = draw(st.integers(1, 10))
    least = 2 * num_meshes if name == "dualpipe-v" else 1
    num_microbatches = draw(st.integers(least, 30))
    stages, options = stages_for(name, num_meshes), {}
    if name in LOOPING:
        stages = rounds(num_meshes, draw(st.integers(1, 4)))
    if name in ("interleaved-1f1b", "interleaved-zero-bubble"):
        options = {"unrolling": draw(st.integers(1, 2 * num_meshes))}
    return name, stages, num_microbatches, options


@given(sizes())
def test_every_schedule_plays(size):
    name, stages, num_microbatches, options = size
    timeline = played(name, stages, num_microbatches, **options)
    assert timeline.makespan >= 3 * num_microbatches - 1e-6  # the work of a mesh
    pairs = stages.num_stages // stages.num_meshes * num_microbatches
    assert max(timeline.in_flight().values()) <= pairs


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 7))
    meshes = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    reads = [tuple(sorted(draw(st.sets(st.integers(0, s - 1))))) if s else () for s in range(count)]
    return Stages(tuple(meshes), tuple(reads))


@given(st.sampled_from(ANYWHERE), graphs(), st.integers(1, 10))
def test_every_graph_plays(name, stages, num_microbatches):
    timeline = played(name, stages, num_microbatches)
    start = {(e.stage, e.microbatch, e.phase): e.start for e in timeline.events}
    end = {(e.stage, e.microbatch, e.phase): e.end for e in timeline.events}
    back = next(e.phase for e in timeline.events if e.phase in ("backward", "backward-input"))
    for s, m in itertools.product(range(stages.num_stages), range(num_microbatches)):
        assert start[s, m, back] >= end[s, m, "forward"]
        assert all(start[s, m, "forward"] >= end[r, m, "forward"] for r in stages.reads[s])
        assert all(start[r, m, back] >= end[s, m, back] for r in stages.reads[s])


@given(sizes(), st.data())
def test_one_action_too_few_or_too_many(size, data):
    name, stages, num_microbatches, options = size
    table = get_schedule(name).table(stages, num_microbatches, **options)
    actions = data.draw(st.sampled_from([row for row in table if row]))
    place = data.draw(st.integers(0, len(actions) - 1))
    a = actions[place]
    actions.insert(data.draw(st.integers(0, len(actions))), a)
    with pytest.raises(ValueError, match=f"{a.phase} of microbatch {a.microbatch} on stage .* 2 times"):
        check_table(table, stages, num_microbatches, name)
    actions[:] = [b for b in actions if b != a]
    with pytest.raises(ValueError, match="missing"):
        check_table(table, stages, num_microbatches, name)


@given(sizes(), st.randoms(use_true_random=False))
def test_shuffled_rows_play_or_are_refused(size, random):
    """In whatever order: nothing hangs, and what plays respects all that actions wait for."""
    name, stages, num_microbatches, options = size
    table = get_schedule(name).table(stages, num_microbatches, **options)
    random.shuffle(random.choice(table))
    check_table(table, stages, num_microbatches, name)  # all are there
    try:
        timeline = simulate(table, stages)
    except ValueError as e:
        assert "wait for each other" in str(e)
    else:
        begin = {(e.stage, e.microbatch): e.start for e in timeline.events if e.phase == "forward"}
        ends = {(e.stage, e.microbatch): e.end for e in timeline.events if e.phase.startswith("backward")}
        assert all(ends[key] > begin[key] for key in begin)
        assert len(timeline.events) == sum(map(len, table))


# check_table

TWO = rounds(2, 1)
GOOD: Table = [row("0F0 0F1 0B0 0B1"), row("1F0 1I0 1F1 1I1 1W0 1W1")]


def test_a_table_with_whole_and_cut_backwards():
    check_table(GOOD, TWO, 2)
    assert simulate(GOOD, TWO).makespan == 7  # the last backward of mesh 0 waits for 1F1, 1I1


@pytest.mark.parametrize(
    "table, message",
    [
        ([row("0F0 0F1 0B0"), GOOD[1]], "backward of microbatch 1 on stage 0 is missing"),
        ([row("0F0 0B0 0B1"), GOOD[1]], "forward of microbatch 1 on stage 0 is missing"),
        ([GOOD[0], row("1F0 1I0 1F1 1I1 1W0")], "backward-weight of microbatch 1 on stage 1 is missing"),
        ([GOOD[0], row("1F0 1I0 1F1 1W1 1W0")], "backward-input of microbatch 1 on stage 1 is missing"),
        ([row("0F0 0F1 0F1 0B0 0B1"), GOOD[1]], "forward of microbatch 1 on stage 0 is there 2 times"),
        ([*GOOD, row("0B0")], "backward of microbatch 0 on stage 0 is there 2 times"),
        (
            [row("0F0 0F1 0F2 0B0 0B1"), GOOD[1]],
            "the table has 3 microbatches; forward of microbatch 2 on stage 0 does not exist",
        ),
        ([*GOOD, row("2F0")], "forward of microbatch 0 on stage 2 does not exist"),
        ([*GOOD, [Action(0, "sideways", 0)]], "sideways of microbatch 0 on stage 0 does not exist"),
        ([row("0F0 0F1 0B0 1W1 0B1"), row("1F0 1I0 1F1 1I1 1W0")], "row 0 has stages of meshes 0, 1"),
        (
            [*GOOD, row("0W0")],
            "backward-weight of microbatch 0 on stage 0 is there beside the whole backward",
        ),
    ],
)
def test_what_is_wrong_with_a_table(table, message):
    with pytest.raises(ValueError, match=f"'mine' for 2 stages and 2 microbatches: {message}$"):
        check_table(table, TWO, 2, "mine")


def test_a_table_with_a_huge_number():
    with pytest.raises(ValueError, match="backward of microbatch 0 on stage 0 is missing"):
        check_table([row("0F0 0F99999999999")], TWO, 10**11)


def test_much_is_wrong_with_a_table():
    with pytest.raises(ValueError, match="stage 0 is missing; .*; and more$"):
        check_table([], TWO, 2)


def test_meshes_that_wait_for_each_other():
    """Mesh 0 wants the second backward first, mesh 1 the first forward's."""
    table = [row("0F0 0B0 0F1 0B1"), row("1F0 1F1 1B0 1B1")]
    check_table(table, TWO, 2)
    with pytest.raises(
        ValueError, match="backward of microbatch 0 on stage 0; forward of microbatch 1 on stage 1"
    ):
        simulate(table, TWO)


# play


def test_jobs_that_wait_for_each_other():
    """Job 2 has run; 0 and 1, first of their rows, wait for 3 and 4, which come after them."""
    jobs = Jobs(
        meshes=["a", "b", "a", "b", "a"],
        costs=[1.0] * 5,
        waits=[[3], [4], [], [], []],
        rows=[[2, 0, 4], [1, 3]],
    )
    with pytest.raises(Stuck, match="4 jobs wait for each other") as stuck:
        play(jobs)
    assert stuck.value.heads == [0, 1]
    assert stuck.value.left == [0, 1, 3, 4]


def test_a_row_keeps_its_order():
    """Job 1 could start at once, but comes after 0, which waits for 2."""
    jobs = Jobs(["a", "a", "b"], [1.0, 1.0, 5.0], [[2], [], []], [[0, 1], [2]])
    assert play(jobs) == [(0.0, 2), (5.0, 0), (6.0, 1)]


def test_rows_of_a_mesh_take_turns():
    """Two rows on mesh a: while 0 waits for 4, the other row runs."""
    jobs = Jobs(["a"] * 4 + ["b"], [1.0] * 5, [[4], [], [], [], []], [[0, 1], [2, 3], [4]])
    assert play(jobs) == [(0.0, 2), (0.0, 4), (1.0, 0), (2.0, 1), (3.0, 3)]


def test_early_jobs_go_ahead_of_rows():
    """Job 3 becomes ready at 1, and runs before 1 and 2, which are ready as well."""
    jobs = Jobs(["a", "a", "a", "a", "b"], [1.0] * 5, [[], [], [], [4], []], [[0, 1, 2], [4]], frozenset({3}))
    assert play(jobs) == [(0.0, 0), (0.0, 4), (1.0, 3), (2.0, 1), (3.0, 2)]


def test_other_jobs_fill_idle_time():
    """Job 2, of no row, runs while the row waits for 3; job 4 only after the row, which has no gap for it."""
    jobs = Jobs(
        ["a", "a", "a", "b", "a"],
        [1.0, 1.0, 1.0, 2.0, 1.0],
        [[], [3], [], [], []],
        [[0, 1], [3]],
    )
    assert play(jobs) == [(0.0, 0), (0.0, 3), (1.0, 2), (2.0, 1), (3.0, 4)]


# Timeline


def event(
    mesh: str, start: float, end: float, phase: str = "none", m: int | None = None, s: int | None = None
):
    return Event(mesh, start, end, phase, m, "work", s)


def test_bubble_and_period():
    """Mesh a is at it from 0 to 6 and b from 2 to 8: a period of 6, in which b idles for 3 of 12."""
    timeline = Timeline((event("a", 0, 6), event("b", 2, 3), event("b", 6, 8), event("c", 9, 9)))
    assert timeline.makespan == 9
    assert timeline.period == 6
    assert timeline.bubble == pytest.approx(3 / 12)
    assert [e.start for e in timeline.by_mesh()["b"]] == [2, 6]
    assert "c" not in timeline.by_mesh()  # it does nothing that takes time


def test_a_timeline_of_nothing():
    assert (Timeline(()).makespan, Timeline(()).period, Timeline(()).bubble) == (0, 0, 0)
    assert Timeline(()).in_flight() == {}


def test_residuals_in_flight():
    """PlacedVar from the start of a forward to the end of the last part of its backward, stage by stage."""
    events = [
        event("a", 0, 1, "forward", 0, 0),
        event("a", 1, 2, "forward", 0, 1),
        event("a", 2, 3, "backward-input", 0, 1),
        event("a", 3, 4, "forward", 1, 0),  # the third: (0, 0), (1, 0), (0, 1)
        event("a", 4, 5, "backward-weight", 0, 1),
        event("a", 5, 6, "forward", 1, 1),  # no fourth: one has gone at 5
        *(event("a", 6 + n, 7 + n, "backward", m, s) for n, (m, s) in enumerate([(1, 1), (1, 0), (0, 0)])),
        event("b", 0, 1, "forward", 0, 2),
        event("b", 1, 2, "none"),  # neither stage nor microbatch
    ]
    assert Timeline(tuple(events)).in_flight() == {"a": 3, "b": 1}


def test_costs_of_a_mesh_are_shared_by_its_stages():
    timeline = simulate(get_schedule("gpipe").table(vee(1), 1), vee(1), dict(forward=3.0, backward=8.0))
    assert [(e.start, e.end) for e in timeline.events] == [(0, 1.5), (1.5, 3), (3, 7), (7, 11)]
    assert [e.name for e in timeline.events][:3] == ["stage0 forward", "stage1 forward", "stage1 backward"]
