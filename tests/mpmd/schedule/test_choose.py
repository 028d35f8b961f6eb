"""What a loop leaves open: its schedule, and how many microbatches go into a call."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import mmnnx as mm
from mmnnx.mpmd.ir.loop_spec import LoopSpec
from mmnnx.mpmd.ir.timetable import Stages
from mmnnx.mpmd.schedule import choose, get_schedule, schedule_names
from mmnnx.mpmd.schedule.choose import Durations, Way, ways
from mmnnx.mpmd.schedule.table import simulate
from tests.mpmd.parity import born, pipeline, place

BOTH = {"backward-input", "backward-weight"}
ON_DEVICES, ON_THE_HOST = Durations(unit=1.0, dispatch=0.0), Durations(unit=1e-3, dispatch=1.0)


class Two(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.second(jax.numpy.tanh(self.first(x)))


def make():
    return Two(nnx.Rngs(0))


mesh, tasks = pipeline(2)
placement = place(tasks, ["first"], ["second"])


def found(meshes, length, durations=ON_DEVICES, backward=BOTH, **spec):
    parts = dict.fromkeys(range(len(meshes)), backward)
    return list(ways(LoopSpec(length=length, **spec), Stages.chain(meshes), parts, lambda: durations))


def test_one_for_forwards_alone_and_one_that_is_named():
    assert found((0, 1), 4, backward=set(), per_call=1) == [Way("gpipe", 1)]
    assert found((0, 1), 4, schedule="zbv", per_call=1) == [Way("zbv", 1)]
    assert len(found((0, 1), 4, per_call=1)) > 3


@pytest.mark.parametrize(
    "meshes, length",
    [((0, 1, 2, 3), 8), ((0, 1, 2, 3), 2), ((0, 1, 0, 1), 4), ((0, 1), 1), ((0, 0, 1, 2, 3), 8)],
)
def test_the_shortest_in_simulation(meshes, length):
    """Of tables that are equally short, the one that holds fewest residuals. The host takes no time here: one
    microbatch to a call."""
    stages, cost = Stages.chain(meshes), {}
    for name in schedule_names():
        try:
            timeline = simulate(get_schedule(name).table(stages, length), stages)
        except ValueError:
            continue
        cost[name] = (round(timeline.makespan, 6), max(timeline.in_flight().values()))
    chosen = found(meshes, length)[0]
    assert cost[chosen.schedule] == min(cost.values()), cost
    assert chosen.per_call == 1


@pytest.mark.slow
@given(
    meshes=st.sampled_from([(0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 2)]),
    length=st.sampled_from([1, 4, 6, 8]),
    durations=st.builds(Durations, *[st.sampled_from([0.0, 1e-3, 0.3, 1.0])] * 2),
)
def test_all_ways_in_the_order_of_their_latency(meshes, length, durations):
    stages, latency = Stages.chain(meshes), {}
    for name, per_call in itertools.product(schedule_names(), range(1, max(2, length // 2 + 1))):
        if length % per_call or not get_schedule(name).is_builtin:
            continue
        calls = length // per_call
        try:
            timeline = simulate(get_schedule(name).table(stages, calls), stages)
        except ValueError:
            continue
        work = timeline.makespan * per_call * durations.unit
        latency[name, per_call] = work + len(timeline.events) * durations.dispatch
    order = found(meshes, length, durations)
    assert {*order} == {*latency}
    assert [latency[way] for way in order] == pytest.approx(sorted(latency.values()))


def test_few_are_played_through_where_stages_are_many():
    """Each takes a tenth of a second with 64 stages: of the 40 ways or so, none that cannot be the first."""
    before = choose._play.cache_info().misses
    forty = ways(LoopSpec(length=160), Stages.chain(range(20)), {0: BOTH}, lambda: ON_DEVICES)
    assert next(forty).per_call == 1
    assert choose._play.cache_info().misses - before <= len(schedule_names())


def test_the_fewest_calls_where_the_host_is_waited_for():
    """Backwards in two parts are more calls. A stage has two calls at least, or none would overlap."""
    assert found((0, 1, 2, 3), 512, ON_THE_HOST)[0] == Way("1f1b", 8)
    assert found((0, 1, 2, 3), 6, ON_THE_HOST)[0] == Way("1f1b", 3)
    assert found((0, 1, 2, 3), 5, ON_THE_HOST)[0] == Way("1f1b", 1)
    assert found((0, 1, 2, 3), 8, ON_THE_HOST, set())[0] == Way("gpipe", 4)


def test_between_the_two():
    """The longer the work, the fewer microbatches to a call: each stage waits for a whole call."""
    units = 0.1, 1.0, 3.0, 30.0
    counts = [found((0, 1, 2, 3), 16, Durations(u, 1.0), schedule="1f1b")[0].per_call for u in units]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 8 and counts[-1] == 1 and len({*counts}) > 2


@pytest.mark.parametrize("rows, expected", [(1, 4), (1_000_000, 1)])
@pytest.mark.parametrize("options", [{}, {"schedule": "gpipe", "per_call": "auto"}])
def test_small_work_goes_together(rows, expected, options):
    """It is told by shapes alone."""
    grad = nnx.value_and_grad(lambda m, x: (m(x) ** 2).mean())
    x = jax.ShapeDtypeStruct((8, rows, 8), jnp.float32)
    with mesh:
        step = mm.jit(lambda model, x: mm.microbatch(grad, 0, 1, 1, **options)(model, x))
        (loop,) = step.program(born(make, placement), x).loops
    assert (loop.per_call, loop.length) == (expected, 8 // expected)


def test_a_schedule_that_is_named_has_one_microbatch_to_a_call():
    grad = nnx.value_and_grad(lambda m, x: (m(x) ** 2).mean())
    with mesh:
        step = mm.jit(lambda model, x: mm.microbatch(grad, 0, 1, 1, schedule="1f1b")(model, x))
        (loop,) = step.program(born(make, placement), np.ones((8, 8), np.float32)).loops
    assert (loop.per_call, loop.length) == (1, 8)


def test_a_limit_that_a_loop_without_backward_cannot_keep():
    """There is nothing else to try: it is said, and not looked for for ever."""
    with mesh:
        model = born(make, placement)
        run = mm.jit(mm.microbatch(lambda m, x: m(x).sum(), dim=0, size=1, argnum=1, memory_limit=8))
        with pytest.raises(ValueError, match=r"memory_limit=8 bytes for one TaskMesh is too little: stage"):
            run.program(model, np.ones((4, 8), np.float32))


def test_options_that_no_schedule_has_for_such_stages():
    with mesh:
        model = born(make, placement)
        grad = nnx.value_and_grad(lambda m, x: (m(x) ** 2).sum())
        run = mm.jit(mm.microbatch(grad, dim=0, size=1, argnum=1, interleave=3))
        with pytest.raises(
            ValueError, match=r"no schedule is for 2 stages on meshes 0, 1 and 4 micro.*interleave=3"
        ):
            run.program(model, np.ones((4, 8), np.float32))
