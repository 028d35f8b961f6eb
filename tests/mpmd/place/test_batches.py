"""Placed arguments that no Variable holds: a batch goes through the model, averages stay where they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from tests import models
from tests.models import make
from tests.mpmd.parity import assert_same, born, pipeline, place
from tests.slow import few


def two_stages(layers: int = 4, width: int = 16):
    """A MultiMesh of two stages, and a model whose layers are half on each."""
    mesh, tasks = pipeline(2)
    halves = range(layers // 2), range(layers // 2, layers)
    placement = place(tasks, *([("layers", n) for n in half] for half in halves))
    with mesh:
        return mesh, born(make(models.MLP, layers, width), placement)


def sent(program: mm.Program) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(t.source, t.target, program.values[t.outputs[0]][0].aval.shape) for t in program.transfers]


@pytest.mark.parametrize("by_rule", [False, True])
@pytest.mark.parametrize("rows", [4, 64])  # activations that are smaller than a kernel, and larger
def test_a_batch_on_the_first_stage_moves_no_weights_there(rows, by_rule):
    mesh, model = two_stages()
    batch, first = np.ones((rows, 8), np.float32), model.layers[0].kernel.get_raw_value().sharding
    batch = batch if by_rule else jax.device_put(batch, first)
    with mesh:
        f = mm.jit(lambda model, x: model(x), **(dict(in_shardings=(None, first)) if by_rule else {}))
        program = f.program(model, batch)
        np.testing.assert_allclose(f(model, batch), model_on_host(model)(np.asarray(batch)), rtol=1e-5)
    assert sent(program) == [("stage0", "stage1", (rows, 16))]


def test_a_batch_on_the_last_stage_goes_to_the_first():
    mesh, model = two_stages()
    batch = jax.device_put(np.ones((64, 8), np.float32), model.layers[3].kernel.get_raw_value().sharding)
    with mesh:
        program = mm.jit(lambda model, x: model(x)).program(model, batch)
    assert sent(program) == [("stage1", "stage0", (64, 8)), ("stage0", "stage1", (64, 16))]


@few(1)
@pytest.mark.parametrize("kept", ["as an argument", "in a Variable"])
def test_labels_go_to_where_the_loss_is(kept):
    """Not the logits to the labels, nor one-hot rows that are made of them."""
    mesh, tasks = pipeline(2)
    labels = np.arange(8, dtype=np.int32) % 4

    class Labelled(models.MLP):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.labels = nnx.Variable(jnp.asarray(labels))

    def loss_fn(model, batch):
        of_row = jax.nn.log_softmax(model(batch["x"]))
        return -jnp.take_along_axis(of_row, batch["y"][:, None], 1).mean()

    def step(model, batch):
        if kept == "in a Variable":
            batch = batch | {"y": model.labels[...]}
        loop = dict(dim=0, size=2, argnum=1, reduce="mean", schedule="1f1b")
        return mm.microbatch(nnx.value_and_grad(loss_fn), **loop)(model, batch)

    first, second = ([("layers", n) for n in half] for half in (range(2), range(2, 4)))
    batch = {"x": models.vectors()["x"][:8], "y": labels}
    with mesh:
        model = born(make(Labelled), place(tasks, [*first, "labels"], second))
        on_first = model.layers[0].bias.get_raw_value().sharding
        placed, split = batch | {"y": jax.device_put(labels, on_first)}, mm.jit(step)
        shapes = {t.shape for t in split.program(model, placed).transfers}
        found = split(model, placed)
    assert_same(found, nnx.jit(step)(make(Labelled)(), batch))
    assert shapes <= {(2, 16), (2,), (2, 1)}


class Tied(nnx.Module):
    """A table of fewer bytes than the activations, which the last layer reads as well."""

    def __init__(self):
        self.table = nnx.Param(jnp.asarray(np.random.default_rng(0).normal(size=(24, 16)), jnp.float32))
        self.layers = nnx.List(nnx.Linear(16, 16, rngs=nnx.Rngs(n)) for n in range(2))

    def __call__(self, tokens):
        x = self.table[...][tokens]
        for layer in self.layers:
            x = x + jnp.sin(layer(x))
        return x @ self.table[...].T


def test_what_is_made_of_labels_counts_as_the_labels():
    """Where a step sends the fewest bytes is the same with tokens on the first stage, but for these."""

    def loss_fn(model, tokens):
        wanted = jax.nn.one_hot(jnp.roll(tokens, -1, 1), 24)
        return -(jax.nn.log_softmax(model(tokens)) * wanted).mean()

    mesh, tasks = pipeline(2)
    tokens = jnp.arange(64, dtype=jnp.int32).reshape(4, 16) % 24
    with mesh:
        model = born(Tied, place(tasks, ["table", ("layers", 0)], [("layers", 1)]))
        step = mm.jit(nnx.value_and_grad(loss_fn))
        there = jax.device_put(tokens, model.table.get_raw_value().sharding)
        alone = [t.shape for t in step.program(model, tokens).transfers]
        placed = [t.shape for t in step.program(model, there).transfers]
        assert_same(step(model, there), nnx.jit(nnx.value_and_grad(loss_fn))(Tied(), tokens))
    assert sorted(placed) == sorted([*alone, tokens.shape]) and (24, 16) in alone


def test_averages_in_plain_arrays_stay_with_their_weights():
    mesh, model = two_stages()
    average = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model)))

    def update(average, model):
        now = nnx.to_pure_dict(nnx.state(model))
        return jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, now)

    with mesh:
        f = mm.jit(update, donate_argnums=0)
        assert not f.program(average, model).transfers
        expected = jax.device_get(average)
        found = f(average, model)
    assert_same(found, expected, 1e-6)
    for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(nnx.state(model)), strict=True):
        assert new.devices() == old.devices()


def model_on_host(model: nnx.Module) -> nnx.Module:
    """The same on JAX's default device."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(jnp.asarray, jax.device_get(state)))
