"""Rematerialisation of a stage's forward in its backward: the same gradients from fewer bytes."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import mmnnx as mm
from mmnnx import _compat
from tests import models
from tests.models import in_tasks, make
from tests.mpmd.parity import MOMENTUM, assert_parity, assert_same, born, pipeline, place
from tests.slow import few

POLICIES = jax.checkpoint_policies
PARTS = ("backward-input", "backward-weight")
TRANSFORMER = (["embed", ("blocks", 0)], [("blocks", 1), "norm", "head"])


class Named(nnx.Module):
    """Two layers a stage whose inner activation is twice as large as the others, and has a name."""

    def __init__(self, stages: int = 2, *, rngs: nnx.Rngs):
        self.up = nnx.List(nnx.Linear(8, 16, rngs=rngs) for _ in range(stages))
        self.down = nnx.List(nnx.Linear(16, 8, rngs=rngs) for _ in range(stages))

    def __call__(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(checkpoint_name(jnp.sin(up(x)), "inner"))
        return x


def named_stages(stages: int = 2) -> list[list[tuple]]:
    return [[("up", i), ("down", i)] for i in range(stages)]


def make_program(make_model, loss, batch, owned, **options) -> mm.Program:
    """Loss and gradients in four microbatches of two, all forwards first: what is kept is kept four times."""
    mesh, tasks = pipeline(len(owned))
    with mesh:
        model = born(make_model, place(tasks, *owned))
        grad_fn = mm.microbatch(nnx.value_and_grad(loss), 0, 2, argnum=1, **{"schedule": "gpipe", **options})
        return mm.jit(lambda model, batch: grad_fn(model, batch)).program(model, batch)


@functools.cache
def transformer(remat) -> mm.Program:
    return make_program(
        make(models.Transformer, layers=2), models.cross_entropy, models.tokens(), TRANSFORMER, remat=remat
    )


def named(remat, stages=2) -> mm.Program:
    batch = models.vectors(features_out=8)
    return make_program(make(Named, stages), models.squared_error, batch, named_stages(stages), remat=remat)


def fragment(program, phase, stage=0):
    (found,) = {c.fragment for c in program.calls if c.stage == stage and c.phase == phase}
    return found


def kept(program, stage=0) -> list[str]:
    """The types of what a forward makes for the backward of its microbatch on its mesh."""
    made, read = fragment(program, "forward", stage).outvars, fragment(program, "backward", stage).invars
    loss = [v for v in made if not v.aval.shape]
    return sorted(v.aval.str_short(short_dtypes=True) for v in set(made) & set(read) - set(loss))


def primitives(jaxpr) -> collections.Counter:
    """How often each primitive stands in a jaxpr and those inside it."""
    found = collections.Counter()
    for eqn in _compat.open_jaxpr(jaxpr)[2]:
        found[eqn.primitive.name] += 1
        for inner in _compat.subjaxprs(eqn):
            found += primitives(inner)
    return found


def products(program, phase, stage=0) -> int:
    return primitives(fragment(program, phase, stage).jaxpr)["dot_general"]


# The same result


@few(1)
@pytest.mark.parametrize(
    "remat",
    [
        True,
        False,
        POLICIES.dots_saveable,
        POLICIES.dots_with_no_batch_dims_saveable,
        POLICIES.nothing_saveable,
        POLICIES.everything_saveable,
        [True, None],
    ],
    ids=["True", "False", "dots", "dots without batch", "nothing", "everything", "first stage"],
)
def test_it_trains_as_without(remat):
    mesh, tasks = pipeline(2)
    assert_parity(
        make(Named),
        models.squared_error,
        models.vectors(features_out=8),
        place(tasks, *named_stages()),
        mesh=mesh,
        microbatch=2,
        steps=1,
        optimizer=MOMENTUM,
        remat=remat,
    )


@pytest.mark.slow
def test_a_transformer_trains_as_without():
    """Attention, norms, an embedding; and the backward in two parts at that."""
    mesh, tasks = pipeline(2)
    ran = assert_parity(
        make(models.Transformer, layers=2),
        models.cross_entropy,
        models.tokens(),
        place(tasks, *TRANSFORMER),
        mesh=mesh,
        microbatch=2,
        schedule="zero-bubble-h1",
        steps=1,
        whole_batch=False,
        optimizer=MOMENTUM,
        remat=True,
    )
    parts = [primitives(fragment(ran, phase, 1).jaxpr)["dot_general"] for phase in PARTS]
    whole = products(transformer(True), "backward", 1)
    assert sum(parts) == whole > products(transformer(None), "backward", 1)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_random_bits_that_are_drawn_again_are_the_same(schedule):
    """Dropout and BatchNorm: parameters, statistics and counters as without."""
    mesh, tasks = pipeline(2)
    assert_parity(
        make(models.ConvNet),
        models.cross_entropy,
        models.images(),
        place(
            tasks,
            [("convs", 0), ("norms", 0), ("dropouts", 0)],
            [("convs", 1), ("norms", 1), ("dropouts", 1), "head"],
        ),
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        steps=2,
        optimizer=MOMENTUM,
        whole_batch=False,
        remat=True,
    )


class Dropped(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(8, 64, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.linear(x)))


@few(1)
@pytest.mark.parametrize("remat", [None, True, POLICIES.dots_saveable], ids=["None", "True", "dots"])
def test_gradients_are_nought_where_the_forward_dropped(remat):
    """Each microbatch its own mask, and the backward that of its forward."""
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(make(Dropped), place(tasks, ["linear", "dropout"], ["head"]))
        x = np.ones((4, 8), np.float32)

        def loss(model, x):
            y = model.dropout(model.linear(x))
            return jnp.sum(model.head(y)), y

        grad_fn = nnx.value_and_grad(loss, has_aux=True)
        reduce = (("sum", "concat"), "sum")
        loop = mm.microbatch(grad_fn, 0, 1, argnum=1, schedule="1f1b", reduce=reduce, remat=remat)
        (_, y), grads = mm.jit(lambda model, x: loop(model, x))(model, x)
    masks = np.asarray(y) != 0
    assert 0 < masks.mean() < 1 and (masks[0] != masks[1]).any()
    slopes = np.asarray(model.head.kernel[...]).sum(axis=1)
    np.testing.assert_allclose(
        grads["linear"]["kernel"][...], x.T @ (2 * masks * slopes), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat",
    [pytest.param(True, id="True"), pytest.param(POLICIES.dots_saveable, id="dots")],
)
def test_stacks_of_layers_under_scan(remat):
    mesh, tasks = pipeline(2)
    assert_parity(
        make(models.ScanNet),
        models.squared_error,
        models.vectors(),
        place(tasks, ["first", ("stacks", 0)], [("stacks", 1), "last"]),
        mesh=mesh,
        microbatch=2,
        steps=1,
        optimizer=MOMENTUM,
        remat=remat,
    )


def test_without_microbatches_a_task_has_it():
    mesh, tasks = pipeline(2)
    tasks = [dataclasses.replace(task, remat=True) for task in tasks]
    make_model = in_tasks(make(Named), {(k, i): tasks[i] for k in ("up", "down") for i in range(2)})
    batch = models.vectors(features_out=8)
    assert_parity(make_model, models.squared_error, batch, mesh=mesh, optimizer=MOMENTUM, steps=1)


# Fewer bytes


@pytest.mark.slow
def test_bytes_from_everything_to_nothing():
    """Kept: all, all but what is cheap, products, products of weights, nothing; in this order everywhere."""
    order = [
        POLICIES.everything_saveable,
        None,
        POLICIES.dots_saveable,
        POLICIES.dots_with_no_batch_dims_saveable,
        POLICIES.nothing_saveable,
    ]
    peaks = [transformer(remat).simulate().peak_bytes for remat in order]
    for mesh in ("stage0", "stage1"):
        found = [peak[mesh] for peak in peaks]
        assert found == sorted(found, reverse=True), found
        assert found[0] > found[1] > found[-1] and found[2] > found[-1], found
    assert transformer(True).simulate().peak_bytes == peaks[-1]
    assert transformer(False).simulate().peak_bytes == peaks[1]


@pytest.mark.parametrize("stage", [0, 1])
def test_of_a_forward_that_may_be_repeated_nothing_is_kept(stage):
    assert kept(transformer(True), stage) == []
    assert len(kept(transformer(None), stage)) > 4


def test_products_are_repeated_once_if_at_all():
    """At most each of the forward beside those of the backward; under a policy that saves them, none."""
    for stage in range(2):
        forward, backward = (products(transformer(None), phase, stage) for phase in ("forward", "backward"))
        assert backward < products(transformer(True), "backward", stage) <= backward + forward
        assert products(transformer(POLICIES.dots_saveable), "backward", stage) == backward
        assert products(transformer(True), "forward", stage) == forward


def test_a_policy_by_name():
    """What it names is kept, and nothing else."""
    assert kept(named(POLICIES.save_only_these_names("inner"))) == ["f32[2,16]"]
    assert kept(named(POLICIES.save_only_these_names("other"))) == []


def test_a_scan_is_repeated_where_it_may_be():
    owned = (["first", ("stacks", 0)], [("stacks", 1), "last"])
    none, true = (
        make_program(make(models.ScanNet), models.squared_error, models.vectors(), owned, remat=remat)
        for remat in (None, True)
    )
    scans = [primitives(fragment(p, "backward").jaxpr)["scan"] for p in (none, true)]
    assert scans == [1, 2]
    assert true.simulate().peak_bytes["stage0"] < none.simulate().peak_bytes["stage0"]


# Stage by stage


def text(program, stage) -> list[str]:
    """What the fragments of a stage compute."""
    return [str(fragment(program, phase, stage).jaxpr) for phase in ("forward", "backward")]


def test_a_sequence_is_stage_by_stage():
    none, each, all_ = named(None, 3), named([None, True, POLICIES.nothing_saveable], 3), named(True, 3)
    assert text(each, 0) == text(none, 0) != text(all_, 0)
    assert text(each, 1) == text(all_, 1) != text(none, 1)
    assert text(each, 2) == text(all_, 2)


@pytest.mark.parametrize("remat", [[], [True], (True, None, True)])
def test_a_sequence_of_another_length(remat):
    with pytest.raises(ValueError, match=rf"remat= has {len(remat)} entries, .*2 stages"):
        named(remat)


@pytest.mark.parametrize("remat", ["dots_saveable", 1.5, [True, "dots_saveable"]])
def test_what_is_no_policy(remat):
    """It is refused by its name, not by what calling it raises."""
    with pytest.raises((TypeError, ValueError), match="remat"):
        named(remat)


def scoped(*remats, **options) -> mm.Program:
    """By scope, each task with a policy of its own."""
    mesh, tasks = pipeline(len(remats))
    tasks = [dataclasses.replace(task, remat=remat) for task, remat in zip(tasks, remats, strict=True)]
    owners = {(k, i): task for k in ("up", "down") for i, task in enumerate(tasks)}
    with mesh:
        model = mm.jit(in_tasks(make(Named, len(tasks)), owners))()
        grad_fn = nnx.value_and_grad(models.squared_error)
        grad_fn = mm.microbatch(grad_fn, 0, 2, argnum=1, schedule="gpipe", **options)
        step = mm.jit(lambda model, batch: grad_fn(model, batch))
        return step.program(model, models.vectors(features_out=8))


def test_a_task_has_a_policy_of_its_own():
    found = scoped(None, True)
    assert kept(found, 1) == [] != kept(found, 0)
    assert products(found, "backward", 0) == products(named(None), "backward", 0)


def test_that_of_a_task_comes_before_that_of_the_loop():
    found = scoped(False, None, remat=True)
    assert kept(found, 0) == kept(named(None), 0) != []
    assert kept(found, 1) == []


def test_a_task_that_is_named_by_its_state_alone_has_it_too():
    """A task in a TaskSharding is the same task as in a scope."""
    mesh, tasks = pipeline(2)
    tasks[0] = dataclasses.replace(tasks[0], remat=True)
    with mesh:
        model = born(make(Named), place(tasks, *named_stages()))
        grad_fn = mm.microbatch(nnx.value_and_grad(models.squared_error), 0, 2, argnum=1, schedule="gpipe")
        found = mm.jit(lambda model, batch: grad_fn(model, batch)).program(
            model, models.vectors(features_out=8)
        )
    assert kept(found, 0) == [] != kept(found, 1)


def test_a_step_that_is_called_with_another_policy():
    """Two loops in one program session do not share what was decided for the other."""
    mesh, tasks = pipeline(2)
    batch = models.vectors(features_out=8)
    with mesh:
        model = born(make(Named), place(tasks, *named_stages()))

        @mm.jit(static_argnums=2)
        def step(model, batch, remat):
            grad_fn = nnx.value_and_grad(models.squared_error)
            return mm.microbatch(grad_fn, 0, 2, argnum=1, schedule="gpipe", remat=remat)(model, batch)

        programs = [step.program(model, batch, remat) for remat in (None, True, None)]
        results = [step(model, batch, remat) for remat in (None, True, None)]
    assert [bool(kept(p)) for p in programs] == [True, False, True]
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
