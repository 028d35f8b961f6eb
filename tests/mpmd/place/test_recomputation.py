"""Cheap work that several stages need: done by each, or by one and sent (`mm.enable_recomputation`)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mmnnx as mm
from tests import models
from tests.models import make
from tests.mpmd.parity import MOMENTUM, assert_parity, assert_same, born, pipeline, place
from tests.slow import grid


class Masked(nnx.Module):
    """Layers that act where the batch says, each with the same mask and scale."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        mask = jnp.cumsum(x, axis=-1) > 0
        scale = jnp.sin(x)
        for layer in self.layers:
            x = jnp.where(mask, jnp.tanh(layer(x)), x) * scale
        return x


BATCH = models.vectors(features_out=8)
OWNED = [[("layers", i)] for i in range(3)]


def grad_step(jit, microbatch: int | None = 2, schedule: str = "1f1b"):
    grad_fn = nnx.value_and_grad(models.squared_error)
    if microbatch is not None:
        grad_fn = mm.microbatch(grad_fn, 0, microbatch, argnum=1, schedule=schedule)
    return jit(lambda model, batch: grad_fn(model, batch))


@functools.cache
def placed():
    mesh, tasks = pipeline(3)
    with mesh:
        return mesh, born(make(Masked), place(tasks, *OWNED))


def sent(program: mm.Program) -> set[tuple[str, str, str]]:
    """What crosses between meshes: source, target, and the type of one microbatch's array."""
    return {(t.source, t.target, f"{t.dtype}{list(t.shape)}") for t in program.transfers}


CHAIN = {(f"stage{a}", f"stage{b}", "float32[2, 8]") for a, b in ((0, 1), (1, 2), (2, 1), (1, 0))}


def test_by_default_each_mesh_does_it():
    """Activations and their gradients cross, from stage to stage, and nothing else."""
    mesh, model = placed()
    with mesh:
        program = grad_step(mm.jit).program(model, BATCH)
    assert sent(program) == CHAIN
    assert len(program.transfers) == 4 * 4


def test_switched_off_it_is_done_once_and_sent():
    """By the first stage, mask and scale, to each of the others once a microbatch."""
    mesh, model = placed()
    with mesh, mm.enable_recomputation(False):
        program = grad_step(mm.jit).program(model, BATCH)
    program.verify()
    masks = [(t.source, t.target, t.microbatch) for t in program.transfers if t.dtype == jnp.bool_]
    assert sorted(masks) == [("stage0", f"stage{i}", m) for i in (1, 2) for m in range(4)]
    scales = {("stage0", f"stage{i}", "float32[2, 8]") for i in (1, 2)}
    assert sent(program) - CHAIN >= {t for t in scales if t not in CHAIN}
    sums = [f for f in program.fragments if any(e.primitive.name == "cumsum" for e in f.jaxpr.eqns)]
    assert {program.names[f.mesh] for f in sums} == {"stage0"}


def test_done_by_each_it_is_in_the_fragments_of_each():
    mesh, model = placed()
    with mesh:
        program = grad_step(mm.jit).program(model, BATCH)
    sums = [f for f in program.fragments if any(e.primitive.name == "cumsum" for e in f.jaxpr.eqns)]
    assert {program.names[f.mesh] for f in sums} == {"stage0", "stage1", "stage2"}


@pytest.mark.parametrize(
    "options, recompute",
    grid([{"schedule": "1f1b"}, {"microbatch": None}, {"schedule": "zero-bubble-h1"}], [True, False], step=3),
)
def test_it_trains_as_whole(recompute, options):
    mesh, tasks = pipeline(3)
    with mm.enable_recomputation(recompute):
        ran = assert_parity(
            make(Masked),
            models.squared_error,
            BATCH,
            place(tasks, *OWNED),
            mesh=mesh,
            optimizer=MOMENTUM,
            steps=1,
            **{"microbatch": 2, **options},
        )
    assert any(t.dtype == jnp.bool_ for t in ran.transfers) != recompute


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "convnet"])
def test_models_train_as_whole_where_it_is_switched_off(name):
    """Masks and positions that no batch has a part in, keys and counters, dropout."""
    mesh, tasks = pipeline(2)
    first, second = ([(k, i) for k in ("convs", "norms", "dropouts")] for i in range(2))
    cases = {
        "transformer": (
            make(models.Transformer, layers=2, tied=True),
            models.cross_entropy,
            models.tokens(),
            place(tasks, ["embed", ("blocks", 0)], [("blocks", 1), "norm"]),
        ),
        "convnet": (
            make(models.ConvNet),
            models.cross_entropy,
            models.images(),
            place(tasks, first, [*second, "head"]),
        ),
    }
    with mm.enable_recomputation(False):
        assert_parity(
            *cases[name],
            mesh=mesh,
            microbatch=2,
            steps=1,
            optimizer=MOMENTUM,
            whole_batch=False,
        )


def test_switched_off_forwards_alone_send_too():
    mesh, model = placed()
    predict = lambda model, x: model(x)
    loop = mm.microbatch(predict, 0, 2, argnum=1, reduce="concat", per_call=1)
    step = mm.jit(lambda model, x: loop(model, x))
    counts, results = [], []
    with mesh:
        for enable in (True, False):
            with mm.enable_recomputation(enable):
                counts.append(len(step.program(model, BATCH["x"]).transfers))
                results.append(step(model, BATCH["x"]))
    assert counts == [2 * 4, 2 * 4 + 2 * 2 * 4]
    for got in results:
        assert_same(got, predict(make(Masked)(), BATCH["x"]))


# The setting


@pytest.mark.slow
def test_a_function_is_divided_anew_for_each_setting():
    """Called under one setting and then under the other it runs what that asks for, again and again.

    What a call ran is known from its profile.
    """
    mesh, model = placed()
    step = grad_step(mm.jit)
    expected = grad_step(nnx.jit)(make(Masked)(), BATCH)
    ran = []
    with mesh:
        for enable in (True, False, True, False):
            with mm.enable_recomputation(enable):
                assert_same(step(model, BATCH), expected)
                ran.append(len(step.program(model, BATCH).profile(model, BATCH).timeline.transfers))
    assert ran[0] < ran[1]
    assert ran == [ran[0], ran[1]] * 2


def test_settings_nest_and_end_with_errors():
    mesh, model = placed()
    step = grad_step(mm.jit)

    def masks() -> bool:
        with mesh:
            return any(t.dtype == jnp.bool_ for t in step.program(model, BATCH).transfers)

    with mm.enable_recomputation(False):
        with mm.enable_recomputation():
            assert not masks()
        with pytest.raises(ZeroDivisionError), mm.enable_recomputation(True):
            raise ZeroDivisionError
        assert masks()
    assert not masks()


def test_outside_mm_jit_it_means_nothing():
    with mm.enable_recomputation(False):
        got = grad_step(nnx.jit)(make(Masked)(), BATCH)
    assert_same(got, grad_step(nnx.jit)(make(Masked)(), BATCH))
    assert len(jax.tree.leaves(got)) == 7
