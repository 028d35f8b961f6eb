"""Several microbatches in one call: fewer of all that the host starts, and the same results."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.compile.rewrites import rewrite
from tests import models
from tests.models import make
from tests.mpmd.parity import MOMENTUM, assert_parity, assert_same, born, pipeline, place, values
from tests.slow import all_but, few

mesh, tasks = pipeline(2)


def two_layers_each(tasks, spec=None):
    own = [mm.path("layers", range(2 * n, 2 * n + 2)) for n in range(len(tasks))]
    return mm.TaskSharding({path: (task, spec) for path, task in zip(own, tasks)})


def program(per_call, schedule="1f1b", rows=16, **loop):
    grad = nnx.value_and_grad(models.squared_error)
    with mesh:
        model = born(make(models.MLP, width=8), two_layers_each(tasks))
        step = mm.jit(
            lambda model, batch: mm.microbatch(
                grad, 0, 2, argnum=1, schedule=schedule, per_call=per_call, **loop
            )(model, batch)
        )
        return step.program(model, models.vectors(rows=rows))


def in_loop(program):
    return [i for i in program.instructions if i.microbatch is not None]


def test_a_quarter_of_the_calls():
    """No value is computed twice, and none is sent more often."""
    one, four = program(1), program(4)
    calls = [[i for i in in_loop(p) if hasattr(i, "fragment")] for p in (one, four)]
    assert len(calls[1]) * 4 == len(calls[0]) > 0
    assert len(one.fragments) == len(four.fragments)
    assert sum(t.nbytes for t in one.transfers) == sum(t.nbytes for t in four.transfers)
    equations = [sum(len(c.fragment.jaxpr.eqns) for c in cs) for cs in calls]
    assert equations[1] <= equations[0]
    assert [loop.per_call for loop in (*one.loops, *four.loops)] == [1, 4]
    assert four.loops[0].length == 2 and four.schedule == "1f1b of 4 microbatches a call"
    assert "[microbatch n] stands for 4n to 4n + 3, of 8" in str(four)


def test_sums_of_gradients_stay_in_place():
    """The calls of a stage add to one buffer for each weight, in turn."""
    p = rewrite(program(4)).program
    for f in {c.fragment for c in p.calls if c.phase == "backward"}:
        taken = [(v, p.successors[v]) for v in f.invars if v in p.successors and v.aval.shape]
        assert len(taken) == 4, f
        assert {after for _, after in taken} <= set(f.outvars)


def test_saved_activations_are_those_of_so_many():
    """A call saves what its microbatches save."""
    one, four = (p.simulate().residual_bytes["stage0"] for p in (program(1, "gpipe"), program(4, "gpipe")))
    assert one == four


@few(1)
@pytest.mark.parametrize("reduce", ["concat", "last", "max", "mean"])
def test_reductions(reduce):
    """In the order of the microbatches."""
    with mesh:
        model = born(make(models.MLP, width=8), two_layers_each(tasks))
        x = models.vectors(rows=12)["x"]
        found = [
            mm.jit(mm.microbatch(lambda m, x: m(x), 0, 2, 1, schedule="gpipe", per_call=k, reduce=reduce))(
                model, x
            )
            for k in (1, 3)
        ]
    assert_same(found[1], found[0])


@pytest.mark.parametrize("reduce", all_but(["concat"], ["concat", "last", "max"]))
def test_outputs_that_the_backward_reads(reduce):
    """The last stage's forward and backward are one program, and its outputs leave it all the same."""

    def loss(model, x):
        out = jnp.tanh(model(x))
        return (out**2).mean(), out

    grad = nnx.value_and_grad(loss, has_aux=True)
    loop = dict(dim=0, size=2, argnum=1, reduce=(("mean", reduce), "mean"), schedule="1f1b")
    with mesh:
        model = born(make(models.MLP, width=8), two_layers_each(tasks))
        x = models.vectors(rows=12)["x"]
        found = [mm.jit(mm.microbatch(grad, per_call=k, **loop))(model, x) for k in (1, 3)]
    assert_same(values(found[1]), values(found[0]))
    assert found[1][0][1].shape[0] == (12 if reduce == "concat" else 2)


@pytest.mark.slow
def test_sums_over_a_data_axis():
    """Gradients are still reduced over the axis once a step, and not once a call."""
    mesh, tasks = pipeline(2, 2)
    tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(2)]
    found = assert_parity(
        make(models.MLP, width=8),
        models.squared_error,
        models.vectors(rows=16),
        two_layers_each(tasks, P()),
        mesh=mesh,
        optimizer=MOMENTUM,
        microbatch=4,
        per_call=2,
        arg_shardings=P(mesh.axis_names[-1]),
        steps=2,
    )
    assert found.loops[0].per_call == 2
    assert not found.notes


def test_a_memory_limit_has_fewer_to_a_call():
    """Without a schedule all is open; what fits is taken."""
    free = program(None, None)
    assert free.loops[0].per_call == 4
    peak = max(free.simulate().peak_bytes.values())
    fits = program(None, None, memory_limit=peak - 1)
    assert max(fits.simulate().peak_bytes.values()) < peak
    assert program("auto").loops[0].per_call == 4


class Remembers(nnx.Module):
    """The first layer reads what the second made of the microbatch before."""

    def __init__(self, rngs):
        self.first, self.second = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
        self.seen = nnx.BatchStat(jnp.zeros(8))

    def __call__(self, x):
        x = jnp.tanh(self.second(jnp.tanh(self.first(x + self.seen[...]))))
        self.seen[...] = jnp.mean(x, axis=0)
        return x


def make_remembers():
    return Remembers(nnx.Rngs(0))


@few(2)
@pytest.mark.parametrize("per_call", [None, "auto", 2])
@pytest.mark.parametrize(
    "is_seen, why",
    [
        (
            True,
            "per_call=2, but the forward of task 'stage0' waits for state that the forward of task "
            "'stage1' leaves after the microbatch before: leave",
        ),
        # Whatever the look at the stages should miss, the fragments tell.
        (False, "per_call=2, but 'stage. forward' and 'stage. forward' wait for one another"),
    ],
)
def test_state_that_goes_back_to_an_earlier_stage(is_seen, why, per_call, monkeypatch):
    """A microbatch waits for the one before it to end: none shares a call."""
    if not is_seen:
        monkeypatch.setattr("mmnnx.mpmd.partition.timetable._one_by_one", lambda *_: None)
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    run = mm.microbatch(lambda m, x: m(x), 0, 2, 1, reduce="concat", per_call=per_call)
    with mesh:
        model = born(make_remembers, place(tasks, ["first", "seen"], ["second"]))
        step = mm.jit(lambda model, x: run(model, x))
        if per_call == 2:
            with pytest.raises(ValueError, match=why):
                step.program(model, x)
            return
        assert step.program(model, x).loops[0].per_call == 1
        assert_same(step(model, x), run(make_remembers(), x))


class Drops(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + self.dropout(jnp.tanh(layer(x)))
        return x[:, :4]


@pytest.mark.parametrize("remat", all_but([True], [None, True]))
def test_a_counter_that_the_backward_reads(remat):
    """A mask is drawn again in the backward, with the counter as it was for that microbatch."""
    found = assert_parity(
        make(Drops),
        models.squared_error,
        models.vectors(rows=16),
        two_layers_each(tasks),
        mesh=mesh,
        microbatch=4,
        per_call=2,
        remat=remat,
        optimizer=MOMENTUM,
        schedule="1f1b",
        steps=2,
        whole_batch=False,
    )
    assert found.loops[0].per_call == 2


class Contrast(nnx.Module):
    """A queue of earlier outputs, which scores are made of (MoCo, He et al. 2020)."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        self.queue, self.at = nnx.Variable(jnp.ones((12, 8))), nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        scores = x @ self.queue[...].T
        self.queue[...] = lax.dynamic_update_slice(self.queue[...], x, (self.at[...], 0))
        self.at[...] = (self.at[...] + len(x)) % len(self.queue[...])
        return scores[:, :4]


@pytest.mark.parametrize("schedule", all_but(["1f1b"], ["1f1b", "gpipe", None]))
def test_state_that_forward_and_backward_of_a_stage_read(schedule):
    found = assert_parity(
        make(Contrast),
        models.squared_error,
        models.vectors(rows=16),
        place(tasks, [("layers", range(2))], [("layers", range(2, 4)), "queue", "at"]),
        mesh=mesh,
        microbatch=4,
        per_call=2,
        optimizer=MOMENTUM,
        schedule=schedule,
        steps=2,
        whole_batch=False,
    )
    assert found.loops[0].per_call == 2


@pytest.mark.parametrize(
    "schedule, name",
    [
        ("1f1b", "stage1 forward and stage1 backward"),
        ("zero-bubble-h1", "stage1 forward and stage1 backward-input"),
        ("zero-bubble-h1", "stage0 backward-input and stage0 backward-weight"),
    ],
)
def test_calls_that_follow_each_other_are_one_scan(schedule, name):
    """What goes from one to the other is of one microbatch: nothing of it is stacked."""
    p = rewrite(program(4, schedule)).program
    (whole,) = {c.fragment for c in p.calls if c.fragment.name == name}
    assert len([e for e in whole.jaxpr.eqns if e.primitive.name == "scan"]) == 1
    assert whole.scan.microbatches.count == 4


CUSTOM = {"schedule": "custom", "custom_schedule": [["stage0"]]}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"per_call": 3}, "per_call=3 does not divide 8 microbatches"),
        ({"per_call": 0}, 'per_call must be a positive int or "auto", got 0'),
        ({"per_call": "all"}, "per_call must be a positive int or \"auto\", got 'all'"),
        ({"per_call": True}, "got True"),
        ({**CUSTOM, "per_call": 2}, "per_call=2 means nothing to a custom schedule"),
        ({**CUSTOM, "per_call": "auto"}, "per_call='auto' means nothing to a custom"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        mm.microbatch(lambda x: x, 0, 2, **options)(jnp.ones(16))
