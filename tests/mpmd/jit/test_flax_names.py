"""Names of Flax that need no counterpart in mmnnx: used with mm.jit they do what they do with nnx.jit."""

import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.modes import Pair
from tests.mpmd.parity import assert_same, homes, pipeline
from tests.slow import few

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    model.count[...] += 1
    return loss


def make_optimizer(model):
    return nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


@few(1)
def test_cached_partial(mode):
    """State is updated in the model that was bound, also when its arrays are replaced between calls."""
    whole = Pair()
    whole_optimizer = make_optimizer(whole)
    model = mode.make(Pair)
    optimizer = mode.jit(make_optimizer)(model)
    bound = nnx.cached_partial(mode.jit(train_step), model, optimizer)
    for n in range(3):
        if n == 2:
            for each in (whole, model):
                each.second.bias[...] = each.second.bias[...] + 1
        assert_same(bound(X + n), nnx.jit(train_step)(whole, whole_optimizer, X + n))
    assert_same(model, whole)
    assert int(model.count[...]) == 3


def test_state_sharding():
    """It places what has no task; a TaskSharding places what has one."""
    mesh, _ = pipeline(2, 2)
    here = mesh.slice(stage=1)
    kernels = NamedSharding(here, P("model"))
    sharding = nnx.StateSharding({nnx.PathContains("kernel"): kernels, ...: NamedSharding(here, P())})
    model = mm.jit(Pair, out_shardings=sharding, mesh=mesh)()
    assert set(map(frozenset, homes(model).values())) == {frozenset(here.devices.flat)}
    assert model.first.kernel[...].sharding.spec == P("model")


def test_jit_partial_is_a_jit_of_its_own():
    """It calls `jax.jit`, not `mm.jit`: it is for models of one submesh."""
    mesh, tasks = pipeline(2)
    with mesh:
        placement = mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]})
        model = mm.jit(Pair, out_shardings=placement)()
    run = nnx.jit_partial(lambda model, x: model(x), model, graph=False)
    with pytest.raises(ValueError, match="incompatible devices"):
        run(X)
    run = nnx.cached_partial(mm.jit(lambda model, x: model(x)), model)
    np.testing.assert_allclose(run(X), Pair()(X), rtol=1e-5)
    assert run(X).devices() == {mesh.devices.flat[1]}
