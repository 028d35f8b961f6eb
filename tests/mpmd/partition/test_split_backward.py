"""A backward in two parts: what is in each, that nothing is in both, and that they make up the whole."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx import _compat
from mmnnx.mpmd.ir.instructions import Call, Transfer
from tests import models
from tests.models import in_tasks, make
from tests.mpmd.parity import MOMENTUM, assert_parity, born, pipeline, place
from tests.slow import all_but, few

DEAR = {"dot_general", "conv_general_dilated", "random_bits", "scan", "while", "scatter-add", "cumsum"}
INPUT, WEIGHT = "backward-input", "backward-weight"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its loss and batch, and the paths that each stage owns."""

    make: Callable[[], nnx.Module]
    loss: Callable
    batch: Any
    stages: tuple[tuple, ...]


class Normed(nnx.Module):
    """A linear layer with a norm of both kinds of parameters after it, three times."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(3))
        self.norms = nnx.List(nnx.LayerNorm(8, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + jnp.tanh(norm(layer(x)))
        return x


class Remat(nnx.Module):
    """Linear layers whose backward computes them again."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(3))
        self.scale = nnx.Param(jnp.ones(8))

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(layer, x)
        return x * self.scale


CASES = {
    "mlp, two layers a stage": Case(
        make(models.MLP, layers=6),
        models.squared_error,
        models.vectors(),
        tuple((("layers", range(i, i + 2)),) for i in (0, 2, 4)),
    ),
    "norms": Case(
        make(Normed),
        models.squared_error,
        models.vectors(features_out=8),
        tuple((("layers", i), ("norms", i)) for i in range(3)),
    ),
    "remat": Case(
        make(Remat),
        models.squared_error,
        models.vectors(features_out=8),
        ((("layers", 0),), (("layers", 1),), (("layers", 2), "scale")),
    ),
    "transformer": Case(
        make(models.Transformer, layers=3),
        models.cross_entropy,
        models.tokens(),
        (("embed", ("blocks", 0)), (("blocks", 1),), (("blocks", 2), "norm", "head")),
    ),
    "tied transformer": Case(
        make(models.Transformer, layers=2, tied=True),
        models.cross_entropy,
        models.tokens(),
        (("embed", ("blocks", 0)), (("blocks", 1), "norm")),
    ),
    "convolutions, batch norm and dropout": Case(
        make(models.ConvNet),
        models.cross_entropy,
        models.images(),
        (
            (("convs", 0), ("norms", 0), ("dropouts", 0)),
            (("convs", 1), ("norms", 1), ("dropouts", 1), "head"),
        ),
    ),
    "stacks of layers under scan": Case(
        make(models.ScanNet),
        models.squared_error,
        models.vectors(),
        (("first", ("stacks", 0)), (("stacks", 1), "last")),
    ),
    "two encoders into one decoder": Case(
        make(models.TwoEncoders),
        models.squared_error,
        models.vectors(),
        (("left",), ("right",), ("decoder",)),
    ),
    "skip from the first stage to the last": Case(
        make(models.SkipNet),
        models.squared_error,
        models.vectors(),
        (("first",), (("middle", 0),), (("middle", 1),), ("last",)),
    ),
}

# The other transformer is run under other such schedules by tests/mpmd/test_every_schedule.py.
QUICK = CASES.keys() - {"tied transformer"}


@functools.cache
def program(name: str, schedule: str) -> mm.Program:
    """Loss and gradients in four microbatches of two."""
    case = CASES[name]
    mesh, tasks = pipeline(len(case.stages))
    with mesh:
        model = born(case.make, place(tasks, *case.stages))
        grad_fn = mm.microbatch(nnx.value_and_grad(case.loss), 0, 2, argnum=1, schedule=schedule)
        return mm.jit(lambda model, batch: grad_fn(model, batch)).program(model, case.batch)


def primitives(jaxpr) -> collections.Counter:
    """How often each primitive stands in a jaxpr and those inside it."""
    found = collections.Counter()
    for eqn in _compat.open_jaxpr(jaxpr)[2]:
        found[eqn.primitive.name] += 1
        for inner in _compat.subjaxprs(eqn):
            found += primitives(inner)
    return found


def dear(program: mm.Program) -> dict[tuple[str, str], int]:
    """By mesh and primitive: how many equations that are not cheap all calls of the loop run."""
    found = collections.Counter()
    for call in program.calls:
        if call.microbatch is not None:
            counts = primitives(call.fragment.jaxpr).items()
            found.update({(program.names[call.mesh], k): n for k, n in counts if k in DEAR})
    return dict(found)


def products(program: mm.Program, stage: int) -> dict[str, int]:
    """By phase: the matrix products in the fragments of a stage."""
    found = collections.Counter()
    for f in {c.fragment for c in program.calls if c.stage == stage}:
        found[f.phase] += primitives(f.jaxpr)["dot_general"]
    return dict(found)


def makers(program: mm.Program) -> dict[int, Call | Transfer]:
    return {s: i for i in program.instructions for s in i.outputs}


# What is in which part


@pytest.mark.parametrize("name", all_but(QUICK - {"transformer"}, CASES))
def test_nothing_is_computed_twice(name):
    """On every mesh the parts hold as many products, convolutions and draws as the whole backward, and loops
    too, but for those over layers: each gradient of these has its own."""
    split = program(name, "zero-bubble-h1")
    assert {c.phase for c in split.calls if c.microbatch is not None} >= {"forward", INPUT, WEIGHT}
    parts, whole = dear(split), dear(program(name, "1f1b"))
    if name == "stacks of layers under scan":
        parts, whole = ({k: n for k, n in found.items() if k[1] != "scan"} for found in (parts, whole))
    assert parts == whole


@pytest.mark.parametrize("name", all_but(QUICK, CASES))
def test_other_meshes_wait_for_the_input_part_alone(name):
    """What weight parts make is read by later weight parts of their mesh and after the loop, no sooner."""
    split = program(name, "zero-bubble-h1")
    made = makers(split)
    seen = 0
    for i in split.instructions:
        for s in i.inputs:
            if made.get(s) is not None and isinstance(made[s], Call) and made[s].phase == WEIGHT:
                seen += 1
                assert i.microbatch is None or (isinstance(i, Call) and i.phase == WEIGHT), split.describe(i)
    assert seen


@pytest.mark.parametrize("name", all_but(QUICK, CASES))
def test_weight_parts_read_nothing_that_is_under_way(name):
    """A weight part needs nothing but what its mesh has when the input part is done."""
    split = program(name, "zero-bubble-h1")
    made = makers(split)
    done: dict[Any, int] = {}
    for n, i in enumerate(split.instructions):
        if isinstance(i, Call) and i.phase == INPUT:
            done[i.mesh, i.microbatch, i.stage] = n
    numbers = {s: n for n, i in enumerate(split.instructions) for s in i.outputs}
    for c in split.calls:
        after = done.get((c.mesh, c.microbatch, c.stage))
        if c.phase == WEIGHT and after is not None:
            for s in c.inputs:
                other = not isinstance(made.get(s), Call) or made[s].phase != WEIGHT
                assert not other or numbers.get(s, -1) <= after, split.describe(c)


@pytest.mark.parametrize("schedule", ["zero-bubble-h1", "zero-bubble-h2"])
def test_one_product_for_each_linear_layer_in_each_part(schedule):
    """The middle stage: two to go on down the chain, two for weights. The first goes not on to its data."""
    split = program("mlp, two layers a stage", schedule)
    assert products(split, 1) == {"forward": 2, INPUT: 2, WEIGHT: 2}
    assert products(split, 0) == {"forward": 2, INPUT: 1, WEIGHT: 2}
    assert products(split, 2) == {"forward": 2, INPUT: 2, WEIGHT: 2}


def test_the_products_of_an_attention_block():
    """Four linear layers, each once in each part; both gradients of both products of attention go on."""
    split = program("transformer", "zero-bubble-h1")
    assert products(split, 1) == {"forward": 6, INPUT: 8, WEIGHT: 4}


@pytest.mark.parametrize("name", ["mlp, two layers a stage", "norms", "transformer"])
def test_sums_of_gradients_are_in_the_weight_part(name):
    """Of the gradients of weights, biases, scales and shifts none is finished before it need be."""
    split = program(name, "zero-bubble-h1")
    sums = set(split.successors.values())
    for f in split.fragments:
        carried = sums & set(f.outvars)
        assert not (f.phase == INPUT and carried), f"{f.name} sums {carried}"
        assert f.phase != WEIGHT or carried, f"{f.name} sums nothing"


def test_the_parts_of_a_norm():
    """Sums over rows that are the gradients of scale and shift wait; the means of its own backward do not.

    Its two means are over features; the sums for the parameters leave the features.
    """
    split = program("norms", "zero-bubble-h1")
    (weight,) = {c.fragment for c in split.calls if c.stage == 1 and c.phase == WEIGHT}
    over = [e.params["axes"] for e in weight.jaxpr.eqns if e.primitive.name == "reduce_sum"]
    assert over == [(0,), (0,)]


@pytest.mark.parametrize("schedule", ["zero-bubble-h1", "zero-bubble-h2"])
def test_gradients_that_are_there_are_not_kept(schedule):
    """The backward of what is computed again makes the gradients, too: they are added up at once."""
    split = program("remat", schedule)
    made = makers(split)
    sums = set(split.successors.values())
    assert any(c.phase == INPUT and sums & set(c.fragment.outvars) for c in split.calls)
    for c in split.calls:
        if c.phase == WEIGHT:
            shapes = [split.values[s][0].aval.shape for s in c.inputs if made[s].phase == INPUT]
            assert (8, 8) not in shapes, split.describe(c)


# That it makes no difference to the result


@few(1)
@pytest.mark.parametrize(
    "name, schedule",
    [
        ("norms", "zero-bubble-h2"),
        ("remat", "zero-bubble-h2"),
        ("tied transformer", "zero-bubble-h1"),
        ("convolutions, batch norm and dropout", "zero-bubble-h1"),
    ],
)
def test_it_trains_as_the_whole(name, schedule):
    case = CASES[name]
    mesh, tasks = pipeline(len(case.stages))
    ran = assert_parity(
        case.make,
        case.loss,
        case.batch,
        place(tasks, *case.stages),
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        steps=1,
        optimizer=MOMENTUM,
        whole_batch=name == "norms",
    )
    assert {c.phase for c in ran.calls} >= {INPUT, WEIGHT}


# Of one task


NAMES = ("middle grad", "middle weights")


def scoped(tasks):
    """Three stages of two layers, by scope; the middle one has halves with names of their own."""
    middle = dataclasses.replace(tasks[1], split_backprop=NAMES)
    owners = [tasks[0]] * 2 + [middle] * 2 + [tasks[2]] * 2
    make_model = CASES["mlp, two layers a stage"].make
    return in_tasks(make_model, {("layers", i): task for i, task in enumerate(owners)})


def scoped_program(microbatch: int | None = 2, **options) -> mm.Program:
    mesh, tasks = pipeline(3)
    with mesh:
        model = mm.jit(scoped(tasks))()
        grad_fn = nnx.value_and_grad(models.squared_error)
        if microbatch is not None:
            grad_fn = mm.microbatch(grad_fn, 0, microbatch, argnum=1, **options)
        return mm.jit(lambda model, batch: grad_fn(model, batch)).program(model, models.vectors())


@few(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_task_has_its_backward_split(schedule):
    """That of the others is whole; names are those that were given, also in print; nothing is done twice."""
    found = scoped_program(schedule=schedule)
    names = {f.name: f.phase for f in found.fragments if f.phase != "none"}
    assert names == {
        **{f"stage{i} forward": "forward" for i in range(3)},
        "stage0 backward": "backward",
        "stage2 backward": "backward",
        NAMES[0]: INPUT,
        NAMES[1]: WEIGHT,
    }
    assert products(found, 1) == {"forward": 2, INPUT: 2, WEIGHT: 2}
    assert dear(found) == dear(program("mlp, two layers a stage", schedule))
    assert all(f"{name} [microbatch 3] on stage1 (devices [1])" in str(found) for name in NAMES)
    first = next(c for c in found.calls if c.name == NAMES[0])
    assert found.describe(first) == f"{NAMES[0]} [microbatch 0] on stage1 (devices [1])"
    assert [a.phase for a in found.table()[1]].count(WEIGHT) == 4
    assert all(a.phase in ("forward", "backward") for row in (0, 2) for a in found.table()[row])


@few(1)
@pytest.mark.parametrize(
    "options", [{"schedule": "zero-bubble-h1"}, {"schedule": "1f1b"}, {"microbatch": None}]
)
def test_a_task_with_a_split_backward_trains_as_the_whole(options):
    mesh, tasks = pipeline(3)
    options = {"microbatch": 2, **options}
    ran = assert_parity(
        *(scoped(tasks), models.squared_error, models.vectors()),
        **dict(mesh=mesh, optimizer=MOMENTUM, steps=1, **options),
    )
    assert {f.name for f in ran.fragments} >= set(NAMES)


def test_a_task_is_split_where_there_are_no_microbatches():
    found = scoped_program(microbatch=None)
    assert {f.name: f.phase for f in found.fragments if f.name in NAMES} == {
        NAMES[0]: INPUT,
        NAMES[1]: WEIGHT,
    }


def test_a_task_that_is_named_by_its_state_alone_is_split():
    """A task in a TaskSharding is the same task as in a scope."""
    mesh, tasks = pipeline(3)
    tasks[1] = dataclasses.replace(tasks[1], split_backprop=NAMES)
    case = CASES["mlp, two layers a stage"]
    with mesh:
        model = born(case.make, place(tasks, *case.stages))
        grad_fn = mm.microbatch(nnx.value_and_grad(case.loss), 0, 2, argnum=1, schedule="1f1b")
        found = mm.jit(lambda model, batch: grad_fn(model, batch)).program(model, case.batch)
    assert {f.name for f in found.fragments if f.mesh.devices.item().id == 1} >= set(NAMES)


# In schedules of one's own


@pytest.mark.slow
def test_a_custom_schedule_names_the_halves():
    """Weights before the next gradient, or all at the end: as asked, and alike."""
    mesh, tasks = pipeline(3)
    make_model = scoped(tasks)
    ends = [[f"stage{i} forward"] * 4 + [f"stage{i} backward"] * 4 for i in (0, 2)]
    for middle in ([NAMES[0]] * 4 + [NAMES[1]] * 4, [*NAMES] * 4):
        rows = [ends[0], ["stage1 forward"] * 4 + middle, ends[1]]
        ran = assert_parity(
            make_model,
            models.squared_error,
            models.vectors(),
            mesh=mesh,
            microbatch=2,
            schedule="custom",
            custom_schedule=rows,
            steps=1,
            optimizer=MOMENTUM,
        )
        on_the_middle = [c.name for c in ran.calls if c.stage == 1]
        assert on_the_middle == ["stage1 forward"] * 4 + middle


def test_a_custom_schedule_of_a_task_whose_halves_have_names():
    """Its whole backward is not there, and what is there is said."""
    rows = [["stage1 forward"] * 4 + ["stage1 backward"] * 4]
    with pytest.raises(ValueError, match=rf"'stage1 backward' is not there .*'{NAMES[0]}'.*'{NAMES[1]}'"):
        scoped_program(custom_schedule=rows)


def test_a_custom_schedule_may_split_what_no_task_does():
    """Names of halves that nobody gave: those of the phases."""
    mesh, tasks = pipeline(2)
    rows = [
        [f"stage{i} forward"] * 4 + [f"stage{i} {INPUT}"] * 4 + [f"stage{i} {WEIGHT}"] * 4 for i in range(2)
    ]
    ran = assert_parity(
        make(models.MLP),
        models.squared_error,
        models.vectors(),
        place(tasks, [("layers", range(2))], [("layers", range(2, 4))]),
        mesh=mesh,
        microbatch=2,
        schedule="custom",
        custom_schedule=rows,
        steps=1,
        optimizer=MOMENTUM,
    )
    assert [[a.phase for a in row] for row in ran.table()] == [
        ["forward"] * 4 + [INPUT] * 4 + [WEIGHT] * 4
    ] * 2
