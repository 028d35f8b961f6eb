"""Scalars of many parameters go to another mesh as one array."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.partition.scalar_packing import FEWEST
from tests import models
from tests.mpmd.parity import assert_parity, assert_same, pipeline, snapshot
from tests.slow import grid

LAYERS, STAGES = 6, 3
RULES = [[("layers", n) for n in range(first, first + 2)] for first in range(0, LAYERS, 2)]
BATCH = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(LAYERS))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def loss(model, batch):
    return (model(batch) ** 2).mean()


OPTIMIZERS = {
    "clip": optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)),
    "finite": optax.apply_if_finite(optax.sgd(1e-2), 3),
}


@pytest.mark.parametrize("optimizer, per_stage", grid([*OPTIMIZERS], [(), (2,)], step=3))
def test_what_all_gradients_are_asked_for_crosses_as_a_vector(optimizer, per_stage):
    mesh, tasks = pipeline(STAGES, *per_stage)
    spec = P(None, "model") if per_stage else P()
    rules = {mm.path(*path, "kernel"): (t, spec) for t, paths in zip(tasks, RULES) for path in paths}
    rules |= {mm.path(*path, "bias"): (t, P()) for t, paths in zip(tasks, RULES) for path in paths}
    program = assert_parity(
        *(models.make(Model), loss, BATCH, mm.TaskSharding(rules)),
        **dict(mesh=mesh, microbatch=2, optimizer=OPTIMIZERS[optimizer]),
    )
    sent = [t for t in program.transfers if t.microbatch is None and t.shape != ()]
    assert sum(t.shape[0] for t in sent) == 2 * 4  # two meshes send what they know of four gradients each
    assert len(sent) <= 3 and len({t.target for t in sent}) == 1


def test_few_are_sent_as_they_are():
    mesh, (first, second) = pipeline(2)

    for count, shapes in (FEWEST - 1, [()] * (FEWEST - 1)), (FEWEST, [(FEWEST,)]):
        fun = mm.jit(functools.partial(_sums, count, first, second), mesh=mesh)
        assert [t.shape for t in fun.program(BATCH).transfers] == shapes
        np.testing.assert_allclose(fun(BATCH), _sums(count, first, second, BATCH), rtol=1e-6)


def _sums(count, first, second, x):
    made = mm.task(lambda x: [jnp.sum(jnp.tanh(x) * n) for n in range(1, count + 1)], task=first)(x)
    return mm.task(lambda made: jnp.stack(made).max(), task=second)(made)


def test_results_and_what_is_read_at_home_stay_what_they_are():
    """Of two types; some are results of the function too, or read again where they were made."""
    mesh, (first, second) = pipeline(2)

    def run(x):
        def head(x):
            sums = [jnp.sum(jnp.tanh(x) * n) for n in range(1, 6)]
            return sums, [jnp.sum(x > n / 4, dtype=jnp.int32) for n in range(5)]

        sums, counts = mm.task(head, task=first)(x)
        most = mm.task(lambda sums, counts: (jnp.stack(sums).max(), sum(counts)), task=second)(sums, counts)
        return sums[0], mm.task(lambda s, x: s * x, task=first)(sums[1], x), most, counts[4]

    split = mm.jit(run, mesh=mesh)
    assert sorted(t.shape for t in split.program(BATCH).transfers) == [(5,), (5,)]
    for got, expected in zip(
        jax.tree.leaves(split(BATCH)), jax.tree.leaves(jax.jit(run)(BATCH)), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.slow
def test_results_on_every_mesh_arrive_as_a_vector():
    """What a step notes of its gradients, in Variables that no filter places."""
    mesh, tasks = pipeline(STAGES)
    make_notes = lambda: nnx.List(nnx.Variable(jnp.zeros(())) for _ in range(FEWEST + 1))

    def step(model, notes, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        last = grads["layers"][LAYERS - 1]["kernel"][...]
        for n, note in enumerate(notes):
            note[...] = jnp.max(last * (n + 1))
        return value

    whole = Model(nnx.Rngs(0)), make_notes()
    with mesh:
        placement = mm.pipeline_sharding(whole[0], tasks, layers="layers")
        state = mm.jit(lambda: Model(nnx.Rngs(0)), out_shardings=placement)(), mm.jit(make_notes)()
        split = mm.jit(step)
        for _ in range(2):
            np.testing.assert_allclose(split(*state, BATCH), nnx.jit(step)(*whole, BATCH), rtol=1e-6)
        sent = [t.shape for t in split.program(*state, BATCH).transfers if t.source == f"stage{STAGES - 1}"]
    assert_same(nnx.state(state), nnx.state(whole))
    assert sent.count((FEWEST + 1,)) == STAGES - 1 and () not in sent


@pytest.mark.slow
def test_counters_that_go_on_where_gradients_are_finite_are_not_sent():
    """Each mesh is told whether they are, and counts by itself."""
    mesh, tasks = pipeline(2)
    optimizer = optax.MultiSteps(optax.adam(1e-2), 2)

    def step(model, state, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        old = snapshot((model, state))
        state.update(model, grads)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), nnx.state((model, state)), old)
        nnx.update((model, state), new)
        return value

    whole = Model(nnx.Rngs(0))
    references = whole, nnx.Optimizer(whole, optimizer, wrt=nnx.Param)
    placement = mm.pipeline_sharding(whole, tasks, layers="layers")
    with mesh:
        model = mm.jit(lambda: Model(nnx.Rngs(0)), out_shardings=placement)()
        state = model, mm.jit(lambda model: nnx.Optimizer(model, optimizer, wrt=nnx.Param))(model)
        split = mm.jit(step)
        for batch in (BATCH, BATCH * np.inf, BATCH):
            split(*state, batch), nnx.jit(step)(*references, batch)
        program = split.program(*state, BATCH)
    assert_same(nnx.state(state), nnx.state(references))
    assert all(call.outputs for call in program.calls)
    assert {t.dtype for t in program.transfers} == {jnp.dtype("float32"), jnp.dtype("bool")}


@pytest.mark.slow
def test_a_loss_that_is_scaled_stays_where_it_is_made():
    """Every mesh has the scale, but the loss is a result of its own, which no Variable keeps."""
    mesh, tasks = pipeline(2)

    def step(model, x, scale):
        grad_fn = nnx.value_and_grad(lambda model, x: loss(model, x) * scale)
        loop = dict(dim=0, size=4, argnum=1, reduce="mean", schedule="1f1b")
        return mm.microbatch(grad_fn, **loop)(model, x)[0] / scale

    whole, scale = Model(nnx.Rngs(0)), jnp.float32(8)
    with mesh:
        placement = mm.pipeline_sharding(whole, tasks, layers="layers")
        model = mm.jit(lambda: Model(nnx.Rngs(0)), out_shardings=placement)()
        found = mm.jit(step)(model, BATCH, scale)
        assert () not in {t.shape for t in mm.jit(step).program(model, BATCH, scale).transfers}
    np.testing.assert_allclose(found, nnx.jit(step)(whole, BATCH, scale), rtol=1e-6)
    assert found.sharding.device_set == {mesh.devices.flat[1]}
