"""`jax.set_mesh` around functions of one mesh: PartitionSpecs name its axes, as under nnx.jit."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import assert_same
from tests.slow import few

X = np.arange(64, dtype=np.float32).reshape(8, 8)
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])


def make_mesh(kind=AxisType.Auto, devices=None):
    return jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=devices or jax.devices()[:4]
    )


def same_places(got, expected):
    """Equal values, with equal shardings."""
    assert_same(got, expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.sharding.mesh == b.sharding.mesh and a.sharding.is_equivalent_to(b.sharding, a.ndim), (a, b)
        assert jax.typeof(a) == jax.typeof(b)


SPECS = {
    "in": dict(in_shardings=(P("data"), None)),
    "out": dict(out_shardings=(P("data", "model"), P())),
    "both": dict(in_shardings=(P("data"), P(None, "model")), out_shardings=(P("data", "model"), P("model"))),
    "one for all": dict(out_shardings=P("model")),
}


@few(3)
@KINDS
@pytest.mark.parametrize("options", SPECS.values(), ids=SPECS)
def test_specs_name_axes_of_the_mesh(options, kind):
    f = lambda x, y: (x @ y, x + 1)
    with jax.set_mesh(make_mesh(kind)):
        expected = nnx.jit(f, **options)(X, X)
        got = mm.jit(f, **options)
        same_places(got(X, X), expected)
        same_places(got(X + 1, X), nnx.jit(f, **options)(X + 1, X))


@KINDS
def test_a_function_without_arguments(kind):
    with jax.set_mesh(make_mesh(kind)):
        make = lambda: jnp.ones((8, 8))
        same_places(mm.jit(make, out_shardings=P("data"))(), nnx.jit(make, out_shardings=P("data"))())


def test_equal_meshes_of_other_devices():
    """What was compiled for one is not used for the other."""
    f = mm.jit(lambda x: 2 * x, out_shardings=P("data"))
    for n in (0, 4, 0):
        mesh = make_mesh(devices=jax.devices()[n : n + 4])
        with jax.set_mesh(mesh):
            assert f(X).sharding == NamedSharding(mesh, P("data"))


def test_the_mesh_of_a_with_statement():
    """nnx.jit takes it from there too."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    with pytest.warns(DeprecationWarning), mesh:
        got = mm.jit(lambda x: 2 * x, out_shardings=P("model"))(X)
    assert got.sharding == NamedSharding(mesh, P("model"))


def test_constraints_in_a_train_step():
    """A model born under a mesh, trained with a constraint and a sharded batch."""
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))

    def train(jit):
        model = jit(lambda: nnx.Linear(8, 8, kernel_init=kernel_init, rngs=nnx.Rngs(0)))()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        def loss_fn(model, x):
            return (jax.lax.with_sharding_constraint(model(x), P("data", "model")) ** 2).mean()

        @jit
        def step(model, optimizer, x):
            loss, grads = nnx.value_and_grad(loss_fn)(model, x)
            optimizer.update(model, grads)
            return loss

        losses = [step(model, optimizer, jax.device_put(X, P("data"))) for _ in range(3)]
        return losses, nnx.state(model), nnx.state(optimizer)

    with jax.set_mesh(make_mesh()):
        got, expected = train(mm.jit), train(nnx.jit)
    assert_same(got, expected)
    assert got[1]["kernel"].get_value().sharding.spec == P(None, "model")


def test_without_a_mesh():
    for around in (contextlib.nullcontext(), mm.MultiMesh(axis_sizes=(2,), axis_names=("other",))):
        with around, pytest.raises(ValueError, match=r"jax\.set_mesh|'?data'? .*not found"):
            mm.jit(lambda x: x, in_shardings=P("data"))(X)


def test_an_axis_that_the_mesh_lacks():
    with jax.set_mesh(make_mesh()), pytest.raises(ValueError, match=r"nope.*not found in mesh.*data.*model"):
        mm.jit(lambda x: x, in_shardings=P("nope"))(X)
