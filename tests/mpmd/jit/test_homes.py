"""State that is given values from the host stays where it was placed."""

from __future__ import annotations

import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx import _compat
from tests import models
from tests.models import make
from tests.mpmd.parity import (
    ADAMW,
    arrays,
    assert_same,
    born_with_optimizer,
    pipeline,
    place,
    train_step,
)

HALVES = [("layers", (0, 1))], [("layers", (2, 3))]
MLP = make(models.MLP, 4, 8)


def homes_of(*nodes: nnx.Module) -> list[object]:
    """Where every array lives."""
    return [x.sharding for node in nodes for x in arrays(node).values()]


def doubled(node: nnx.Module) -> nnx.State:
    """A State on the host, of other values."""
    return jax.tree.map(lambda x: np.asarray(x) * 2, nnx.state(node))


UPDATES = {
    "a State of NumPy arrays": nnx.update,
    "a pure dict": lambda node, state: nnx.update(node, nnx.to_pure_dict(state)),
    "arrays that JAX put on its default device": lambda node, state: nnx.update(
        node, jax.tree.map(jnp.asarray, state)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES)
def test_an_update_from_the_host(update):
    """The next steps leave state where it was, and do what one device does with these values. Nothing is
    traced or compiled for it."""
    mesh, tasks = pipeline(2, 2)
    batch = models.vectors(rows=8)
    single = MLP()
    single_optimizer = nnx.Optimizer(single, ADAMW, wrt=nnx.Param)
    expected_step = train_step(nnx.jit, models.squared_error, microbatch=2)
    step = train_step(mm.jit, models.squared_error, microbatch=2)
    with mesh:
        model, optimizer = born_with_optimizer(MLP, place(tasks, *HALVES, spec=P("model")), ADAMW)
        homes = homes_of(model, optimizer)
        for n in range(3):
            if n:
                for node, one in ((model, single), (optimizer, single_optimizer)):
                    state = doubled(node)
                    nnx.update(one, state)
                    UPDATES[update](node, state)
                assert step.program(model, optimizer, batch).transfers
            got = step(model, optimizer, batch)
            assert_same(got, expected_step(single, single_optimizer, batch))
            assert homes_of(model, optimizer) == homes
        assert_same(model, single)
        assert_same(optimizer, single_optimizer)
    assert len({id(variant) for variant in step._inner.variants.values()}) == 1


def evaluated(model: nnx.Module, x: np.ndarray) -> np.ndarray:
    return model(x)


def placed_model() -> tuple[mm.MultiMesh, nnx.Module]:
    mesh, tasks = pipeline(2, 2)
    with mesh:
        return mesh, mm.jit(MLP, out_shardings=place(tasks, *HALVES, spec=P("model")))()


@pytest.mark.parametrize("graph", [dict(graph=False), dict(graph_updates=False)])
def test_functions_that_update_nothing(graph):
    mesh, model = placed_model()
    evaluate, homes, x = mm.jit(evaluated, mesh=mesh, **graph), homes_of(model), models.vectors()["x"]
    expected = evaluate(model, x)
    nnx.update(model, jax.device_get(nnx.state(model)))
    assert_same(evaluate(model, x), expected)
    assert homes_of(model) == homes


def test_the_short_way_of_another_model_on_the_host():
    """A call with a model that lives nowhere is repeated for that alone."""
    mesh, model = placed_model()
    evaluate, homes, x = mm.jit(evaluated, mesh=mesh), homes_of(model), models.vectors()["x"]
    host = MLP()
    for _ in range(2):
        evaluate(host, x)
    assert all(not value.committed for value in arrays(host).values())
    nnx.update(model, jax.tree.map(jnp.copy, nnx.state(host)))
    assert_same(evaluate(model, x), host(x))
    assert homes_of(model) == homes


def test_what_somebody_has_put_elsewhere_stays_there():
    mesh, model = placed_model()
    evaluate, x, device = mm.jit(evaluated, mesh=mesh), models.vectors()["x"], jax.devices()[5]
    evaluate(model, x)
    nnx.update(model, jax.device_put(jax.device_get(nnx.state(model)), device))
    assert_same(evaluate(model, x), MLP()(x))
    assert {d for s in homes_of(model) for d in s.device_set} == {device}


def test_a_value_of_another_shape_is_new():
    mesh, model = placed_model()
    bias, x = model.layers[0].bias, models.vectors()["x"]
    bias.set_value(np.zeros((1, 8), np.float32))
    assert_same(mm.jit(evaluated, mesh=mesh)(model, x), MLP()(x))
    assert bias.shape == (1, 8) and bias.get_raw_value().is_fully_replicated


def test_what_is_remembered_is_no_part_of_a_variable():
    """Of two Variables with equal values one is remembered: they are equal in everything that can be seen."""
    _, model = placed_model()
    plain = nnx.clone(model)
    known, new = model.layers[0].kernel, plain.layers[0].kernel
    assert _compat.note(known) is not None and _compat.note(new) is None
    assert known.get_metadata() == new.get_metadata()
    assert nnx.graphdef(model) == nnx.graphdef(plain) and hash(nnx.graphdef(model)) == hash(
        nnx.graphdef(plain)
    )
    assert jax.tree.structure(known) == jax.tree.structure(new)
    assert repr(known) == repr(new)
    assert b"mmnnx" not in pickle.dumps(known)
    for copied in (pickle.loads(pickle.dumps(known)), nnx.clone(known)):
        assert _compat.note(copied) is None
        assert_same(copied.get_value(), new.get_value())


def test_arrays_are_not_kept(fast_gc):
    mesh, model = placed_model()
    evaluate, x = mm.jit(evaluated, mesh=mesh), models.vectors()["x"]
    evaluate(model, x)
    old = [weakref.ref(value) for value in arrays(model).values()]
    nnx.update(model, doubled(model))
    evaluate(model, x)
    gc.collect()
    assert not any(ref() is not None for ref in old)


def test_state_that_device_put_has_put_on_devices_stays_there():
    """A pipeline over devices, without a mesh."""

    class Two(nnx.Module):
        def __init__(self, where):
            put = lambda n: jax.device_put(jnp.full(4, n + 1.0), where[n])
            self.a, self.b = nnx.Param(put(0)), nnx.Param(put(1))

    def step(model, x):
        loss, grads = nnx.value_and_grad(lambda model: ((x * model.a[...]) * model.b[...]).sum())(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), grads))
        return loss

    devices = jax.devices()
    model, alone = Two([devices[3], devices[5]]), Two([devices[0], devices[0]])
    found, expected = mm.jit(step)(model, jnp.ones(4)), nnx.jit(step)(alone, jnp.ones(4))
    assert_same((found, nnx.state(model)), (expected, nnx.state(alone)))
    assert [model.a.get_raw_value().devices(), model.b.get_raw_value().devices()] == [
        {devices[3]},
        {devices[5]},
    ]
