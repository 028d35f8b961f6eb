"""What nnx.jit does, mm.jit does: each test below is one body, run with nnx.jit, with mm.jit on one device,
and with mm.jit over a model whose layers live on two meshes."""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.modes import Pair
from tests.mpmd.parity import arrays, assert_same, born, homes, pipeline, place
from tests.slow import few


@pytest.fixture
def model(mode):
    return mode.make(Pair)


X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


# Updates and references


def test_updates_in_place(mode, model):
    kernel, variable = np.asarray(model.first.kernel[...]), model.first.kernel

    @mode.jit
    def f(model, x):
        model.first.kernel[...] += 1.0
        model.count[...] += 1
        return model(x)

    y = f(model, X)
    assert model.first.kernel is variable
    np.testing.assert_array_equal(model.first.kernel[...], kernel + 1.0)
    assert int(model.count[...]) == 1
    assert_same(y, model(X) if not mode.split else mode.jit(lambda m, x: m(x))(model, X))


def test_only_what_changed_is_changed(mode, model):
    before = {path: np.asarray(leaf) for path, leaf in arrays(model).items()}

    @mode.jit
    def f(model):
        model.second.bias[...] = model.second.bias[...] + 2.0

    assert f(model) is None
    for path, leaf in arrays(model).items():
        np.testing.assert_array_equal(
            leaf, before[path] + (2.0 if "second" in path and "bias" in path else 0)
        )


def test_references_shared_between_arguments(mode, model):
    """Two arguments that hold one Variable: an update through one is seen through the other, inside and
    after.
    """

    @mode.jit
    def f(model, second):
        second.kernel[...] = second.kernel[...] * 2.0
        return jnp.sum(model.second.kernel[...])

    kernel, layer = np.asarray(model.second.kernel[...]), model.second
    total = f(model, layer)
    assert model.second is layer
    np.testing.assert_array_equal(layer.kernel[...], 2 * kernel)
    np.testing.assert_allclose(total, 2 * kernel.sum(), rtol=1e-5)


def test_references_shared_inside_a_model(mode):
    class Tied(Pair):
        def __init__(self):
            super().__init__()
            self.alias = self.first

        def __call__(self, x):
            return super().__call__(self.alias(x))

    model = mode.make(Tied)
    assert model.alias is model.first

    @mode.jit
    def step(model, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.sum(m(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    expected = Tied()
    losses = [float(step(model, X)) for _ in range(2)]
    reference = nnx.jit(step.fun if hasattr(step, "fun") else step.__wrapped__)
    np.testing.assert_allclose(losses, [float(reference(expected, X)) for _ in range(2)], rtol=1e-5)
    assert model.alias is model.first
    assert_same(model, expected)


def test_references_created_inside(mode, model):
    """A reference that is shared only from inside the jit on is shared afterwards."""

    @mode.jit
    def f(model):
        model.alias = model.first
        model.first.bias[...] += 1.0

    f(model)
    assert model.alias is model.first
    np.testing.assert_array_equal(model.alias.bias[...], np.ones(4))


def test_returns_the_module_it_was_given(mode, model):
    @mode.jit
    def f(model):
        model.count[...] += 1
        return model, model.first

    same, first = f(model)
    assert same is model and first is model.first
    assert int(model.count[...]) == 1


def test_returns_a_new_module(mode, model):
    @mode.jit
    def f(model):
        new = Pair(seed=1)
        new.first.kernel[...] = model.first.kernel[...]
        return {"new": new, "sum": jnp.sum(new.second.kernel[...])}

    out = f(model)
    assert isinstance(out["new"], Pair) and out["new"].mode == "plain"
    np.testing.assert_array_equal(out["new"].first.kernel[...], model.first.kernel[...])
    assert_same(out["new"].second, Pair(seed=1).second)


def test_swapped_variables(mode, model):
    """Two submodules of one shape change places inside the jit."""
    model.left, model.right = nnx.Param(jnp.zeros(3)), nnx.Param(jnp.ones(3))
    left, right = model.left, model.right

    @mode.jit
    def f(model):
        model.left, model.right = model.right, model.left

    f(model)
    assert model.left is right and model.right is left
    np.testing.assert_array_equal(model.left[...], np.ones(3))


# Graph changes


def test_variables_and_submodules_added_inside(mode, model):
    @mode.jit
    def f(model, x):
        model.hits = nnx.BatchStat(jnp.sum(x))
        model.third = nnx.Linear(3, 2, rngs=nnx.Rngs(3))
        model.mode = "grown"
        return model.third(model(x))

    assert f(model, X).shape == (2, 2)
    assert model.mode == "grown"
    np.testing.assert_allclose(model.hits[...], X.sum(), rtol=1e-5)
    assert_same(model.third, nnx.Linear(3, 2, rngs=nnx.Rngs(3)))


def test_variables_removed_inside(mode, model):
    @mode.jit
    def f(model):
        del model.count

    f(model)
    assert not hasattr(model, "count")


def test_a_changed_model_is_traced_again(mode, model):
    traces = []

    @mode.jit
    def f(model, x):
        traces.append(model.mode)
        return model(x)

    f(model, X), f(model, X)
    model.mode = "changed"
    f(model, X)
    model.extra = nnx.Param(jnp.zeros(2))
    f(model, X)
    assert traces == ["plain", "changed", "changed"]


def test_traced_once_per_shape(mode, model):
    traces = []

    @mode.jit
    def f(model, x):
        traces.append(x.shape)
        model.count[...] += 1
        return model(x)

    for x in (X, X + 1, X[:1], X):
        f(model, x)
    assert traces == [(2, 4), (1, 4)]
    assert int(model.count[...]) == 4


# Arguments


def test_static_argnums(mode, model):
    traces = []

    def f(model, scale, x):
        traces.append(scale)
        assert isinstance(scale, int)
        return scale * model(x)

    g = mode.jit(f, static_argnums=1)
    two, three, again = g(model, 2, X), g(model, 3, X), g(model, 2, X)
    assert traces == [2, 3]
    np.testing.assert_allclose(np.asarray(two) * 1.5, three, rtol=1e-5)
    np.testing.assert_array_equal(two, again)


def test_a_static_module_is_refused_in_a_few_words(model):
    with pytest.raises(ValueError, match="static argument 0 cannot .* let no NNX object be static") as error:
        mm.jit(lambda model, x: model(x), static_argnums=0)(model, X)
    assert len(str(error.value)) < 300


def test_static_argnames(mode, model):
    @mode.jit(static_argnames=("kind",))
    def f(model, x, *, kind="sum"):
        return getattr(jnp, kind)(model(x))

    total, largest = f(model, X), f(model, X, kind="max")
    y = np.asarray(mode.jit(lambda m, x: m(x))(model, X))
    np.testing.assert_allclose(total, y.sum(), rtol=1e-4)
    np.testing.assert_allclose(largest, y.max(), rtol=1e-5)


@pytest.mark.parametrize("static", [{"static_argnames": "n"}, {"static_argnums": 1}])
def test_a_static_argument_after_one_that_has_no_name(mode, model, static):
    def f(model, /, n):
        return model(X) * len(range(n))

    f = mode.jit(f, **static)
    assert_same(f(model, 3), f(model, n=3))


def test_keyword_arguments(mode, model):
    @mode.jit
    def f(model, x, *, shift, options):
        model.count[...] += options["by"]
        return model(x) + shift

    plain = f(model, X, shift=0.0, options={"by": 1})
    shifted = f(model=model, x=X, shift=1.0, options={"by": 2})
    np.testing.assert_allclose(np.asarray(plain) + 1.0, shifted, rtol=1e-5)
    assert int(model.count[...]) == 3


def test_pytrees_of_arrays_and_scalars(mode, model):
    @mode.jit
    def f(model, tree):
        return {
            "a": tree["x"][0] * 2,
            "none": None,
            "scalar": tree["s"],
            "static": 3,
            "y": model(tree["x"][0]),
        }

    out = f(model, {"x": [X], "s": 1.5})
    assert out["none"] is None and int(out["static"]) == 3 and float(out["scalar"]) == 1.5
    np.testing.assert_array_equal(out["a"], 2 * X)


def test_unused_arguments(mode, model):
    for keep in (False, True):
        f = mode.jit(lambda model, x, unused: jnp.sum(x), keep_unused=keep)
        np.testing.assert_allclose(f(model, X, np.ones(3)), X.sum(), rtol=1e-5)


def test_decorators_with_and_without_arguments(mode, model):
    @mode.jit
    def plain(model, x):
        """Doc."""
        return model(x)

    @mode.jit(donate_argnums=())
    def called(model, x):
        return model(x)

    assert plain.__name__ == "plain" and plain.__doc__ == "Doc."
    np.testing.assert_array_equal(plain(model, X), called(model, X))


def test_methods(mode):
    class Stepper(Pair):
        @mode.jit
        def step(self, x):
            self.count[...] += 1
            return self(x)

        @mode.jit(static_argnums=(2,))
        def scaled(self, x, scale):
            return scale * self(x)

    model = mode.make(Stepper)
    y = model.step(X)
    assert int(model.count[...]) == 1
    np.testing.assert_allclose(model.scaled(X, 2), 2 * np.asarray(y), rtol=1e-5)


def test_bound_methods_are_refused(mode, model):
    with pytest.raises(ValueError, match="bound method"):
        mode.jit(model.__call__)
    with pytest.raises(ValueError, match="bound method"):
        mode.jit(functools.partial(model.__call__))


def test_a_model_that_holds_a_function_is_copied():
    """With one of `nnx.jit` it can not be (flax 0.12)."""
    model = Pair()
    model.shifted = mm.jit(lambda x: x + 1)
    np.testing.assert_array_equal(copy.deepcopy(model).shifted(X), X + 1)


def test_donation(mode, model):
    """A donated model is updated in place, and its old arrays can no longer be used."""

    @mode.jit(donate_argnums=0)
    def f(model):
        nnx.update(model, jax.tree.map(lambda p: p + 1, nnx.state(model)))

    old = arrays(model)
    before = {path: np.array(leaf) for path, leaf in old.items()}
    f(model)
    for path, leaf in arrays(model).items():
        np.testing.assert_array_equal(leaf, before[path] + 1)
        assert old[path].is_deleted(), path
    with pytest.raises((RuntimeError, ValueError), match=r"[Dd]eleted|donated"):
        mode.jit(lambda x: x + 1)(next(iter(old.values())))


def test_donation_by_name(mode, model):
    @mode.jit(donate_argnames=("buffer",))
    def f(model, buffer):
        return buffer + jnp.sum(model.first.kernel[...])

    buffer, other = jnp.ones((8, 8)), jnp.ones((8, 8))
    if mode.split:
        buffer = jax.device_put(buffer, model.first.kernel[...].sharding)
    f(model, buffer=buffer)
    assert buffer.is_deleted() and not other.is_deleted()
    assert not any(leaf.is_deleted() for leaf in arrays(model).values())


def test_a_donated_array_used_again(mode, model):
    @mode.jit(donate_argnums=1)
    def f(model, x):
        return x + jnp.sum(model.second.bias[...])

    x = jnp.ones((4, 4))
    if mode.split:
        x = jax.device_put(x, model.second.bias[...].sharding)
    f(model, x)
    with pytest.raises((RuntimeError, ValueError), match=r"[Dd]eleted|donated"):
        f(model, x)


# Stages of compilation


def test_eval_shape(mode, model):
    @mode.jit
    def f(model, x):
        model.count[...] += 1
        return model(x)

    out = f.eval_shape(model, X)
    assert (out.shape, out.dtype) == ((2, 3), jnp.float32)
    assert int(model.count[...]) == 0


def test_eval_shape_of_a_model_with_dropout():
    """Its keys are on the mesh of their task, and what counts them is on all meshes."""

    class Dropped(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
            self.drops = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer, drop in zip(self.layers, self.drops):
                x = drop(layer(x))
            return x

    mesh, tasks = pipeline(2)
    places = {mm.path({"layers", "drops"}, n): task for n, task in enumerate(tasks)}
    with mesh:
        model = born(Dropped, mm.TaskSharding(places))
        f = mm.jit(lambda model, x: model(x))
        out, made = f.eval_shape(model, X), f(model, X)
    assert (out.shape, out.dtype) == (made.shape, made.dtype)


def test_trace_lower_compile(mode, model):
    @mode.jit
    def f(model, x):
        model.count[...] += 1
        return model(x)

    expected = np.asarray(mode.jit(lambda m, x: m(x))(model, X))
    for lowered in (f.lower(model, X), f.trace(model, X).lower()):
        assert isinstance(lowered.as_text(), str) and len(lowered.as_text()) > 0
        compiled = lowered.compile()
        positional, by_name = compiled.input_shardings
        assert len(positional) == 2 and not by_name
        figures = lowered.cost_analysis, lowered.compiler_ir, compiled.memory_analysis
        assert all(figure() is not None for figure in figures)
        count = int(model.count[...])
        np.testing.assert_allclose(compiled(model, X), expected, rtol=1e-5)
        assert int(model.count[...]) == count + 1


# Modes of nnx.jit


def test_tree_mode(mode, model):
    @mode.jit(graph=False)
    def f(model, x):
        model.count[...] += 1
        return model(x)

    y = f(model, X)
    np.testing.assert_allclose(y, mode.jit(lambda m, x: m(x))(model, X), rtol=1e-5)
    assert int(model.count[...]) == 1


def test_tree_mode_refuses_shared_references(mode, model):
    with pytest.raises(ValueError, match=r"[Dd]uplicate|alias|shared"):
        mode.jit(lambda a, b: jnp.sum(a.kernel[...]) + jnp.sum(b.kernel[...]), graph=False)(
            model.first, model.first
        )


def test_without_graph_updates(mode, model):
    """Updates of Variables come back; changes of structure do not."""

    @mode.jit(graph_updates=False)
    def f(model, x):
        model.count[...] += 1
        return model(x)

    y = f(model, X)
    np.testing.assert_allclose(y, mode.jit(lambda m, x: m(x))(model, X), rtol=1e-5)
    assert int(model.count[...]) == 1


# What goes wrong


def test_an_exception_leaves_the_state_as_it_was(mode, model):
    before = {path: np.asarray(leaf) for path, leaf in arrays(model).items()}

    @mode.jit
    def f(model, x):
        model.first.kernel[...] += 1.0
        model.new = nnx.Param(jnp.zeros(1))
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        f(model, X)
    assert not hasattr(model, "new")
    assert_same({path: np.asarray(leaf) for path, leaf in arrays(model).items()}, before, rtol=0)
    mode.jit(lambda m, x: m(x))(model, X)


def test_a_captured_variable_cannot_be_changed(mode, model):
    @mode.jit
    def f(x):
        model.count[...] += 1
        return x

    with pytest.raises(TraceContextError):
        f(X)


def test_wrong_shapes_are_reported_as_by_jax(mode, model):
    with pytest.raises((TypeError, ValueError), match="dot_general|shape"):
        mode.jit(lambda model, x: model(x))(model, np.ones((2, 5), np.float32))


# With the rest of NNX


def test_random_streams(mode):
    class Noisy(Pair):
        def __init__(self):
            super().__init__()
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=7))

        def __call__(self, x):
            return self.dropout(super().__call__(x))

    f = mode.jit(lambda model, x: model(x))
    model, expected = mode.make(Noisy), Noisy()
    reference = nnx.jit(lambda model, x: model(x))
    for _ in range(3):
        assert_same(f(model, X), reference(expected, X))
    assert_same(model, expected)


def test_metrics_and_optimizer(mode, model):
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    @mode.jit
    def step(model, optimizer, metrics, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        metrics.update(loss=loss)
        return loss

    optimizer = mode.jit(lambda model: nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param))(model)
    losses = [float(step(model, optimizer, metrics, X)) for _ in range(3)]
    assert losses[2] < losses[0]
    average = mode.jit(lambda metrics: metrics.compute()["loss"])(metrics)
    np.testing.assert_allclose(average, np.mean(losses), rtol=1e-5)
    assert int(optimizer.step[...]) == 3


def test_nested_jits(mode, model):
    inner = nnx.jit(lambda layer, x: jnp.tanh(layer(x)))

    @mode.jit
    def f(model, x):
        return jax.jit(lambda x: 2 * x)(model.second(inner(model.first, x)))

    np.testing.assert_allclose(f(model, X), 2 * np.asarray(mode.jit(lambda m, x: m(x))(model, X)), rtol=1e-5)


def test_inside_another_jit(mode):
    """Inside another jit there is one program, and this one is part of it."""
    model = Pair()
    f = mode.jit(lambda model, x: model(x))
    np.testing.assert_allclose(nnx.jit(lambda model, x: 2 * f(model, x))(model, X), 2 * model(X), rtol=1e-5)


@few(1)
def test_under_grad_and_vmap(mode):
    model = Pair()
    f = mode.jit(lambda model, x: jnp.sum(model(x) ** 2))
    assert_same(nnx.grad(f)(model, X), nnx.grad(lambda model, x: jnp.sum(model(x) ** 2))(model, X))
    kernel = np.asarray(model.second.kernel[...])
    rows = jax.vmap(mode.jit(lambda kernel, x: x @ kernel), in_axes=(None, 0))(kernel, X)
    np.testing.assert_allclose(rows, X @ kernel, rtol=1e-5)


def test_random_keys_as_arguments(mode, model):
    @mode.jit
    def f(model, key):
        a, b = jax.random.split(key)
        return a, model(jax.random.normal(b, (2, 4)))

    key, y = f(model, jax.random.key(3))
    a, b = jax.random.split(jax.random.key(3))
    assert jax.random.key_data(key).tolist() == jax.random.key_data(a).tolist()
    np.testing.assert_allclose(y, mode.jit(lambda m, x: m(x))(model, jax.random.normal(b, (2, 4))), rtol=1e-5)


# Shardings


@pytest.mark.parametrize("jit", [nnx.jit, mm.jit])
def test_an_argument_that_is_returned_is_where_in_shardings_wants_it(jit):
    sharding = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("model",)), P("model"))
    x = jnp.arange(32.0).reshape(16, 2)
    for f in (lambda x: x, lambda x: (x, x + 1), lambda x: [x, x]):
        for out in jax.tree.leaves(jit(f, in_shardings=sharding)(x)):
            assert out.sharding == sharding
    np.testing.assert_array_equal(jit(lambda x: x, in_shardings=sharding)(x), x)
    assert x.sharding.num_devices == 1 and not x.is_deleted()
    with pytest.raises(ValueError, match="evenly divide|divisible"):
        jit(lambda x: x, in_shardings=sharding)(x[:15])


def test_state_sharding_of_one_mesh():
    """in_shardings and out_shardings take what nnx.jit takes: StateSharding, shardings, prefixes."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    sharding = nnx.StateSharding(
        {
            mm.path(..., "kernel"): jax.sharding.NamedSharding(mesh, jax.P("model")),
            ...: jax.sharding.NamedSharding(mesh, jax.P()),
        }
    )
    for jit in (nnx.jit, mm.jit):
        model = jit(Pair, out_shardings=sharding)()
        assert model.first.kernel[...].sharding.spec == jax.P("model")
        f = jit(lambda model, x: model(x), in_shardings=(sharding, None), out_shardings=None)
        np.testing.assert_allclose(f(model, X), Pair()(X), rtol=1e-5)


def test_what_is_no_sharding_or_mesh():
    """Said when the function is made."""
    mesh, (task, _) = pipeline(2)
    for wrong in (task, mesh, mesh.mesh, "model", (task, P()), {"y": task}):
        for option in ("in_shardings", "out_shardings"):
            with pytest.raises(TypeError, match=f"{option}= has .*, which is no sharding: mm.TaskSharding"):
                mm.jit(Pair, **{option: wrong})
    for rules in ({mm.path("first"): task, ...: task}, ({nnx.Param: (task, P())}, None)):
        with pytest.raises(TypeError, match="in_shardings= has a dict from filters to tasks: wrap it in"):
            mm.jit(Pair, in_shardings=rules)
    for wrong in (task, "x", mesh.mesh):
        with pytest.raises(TypeError, match="mesh= is a MultiMesh, not"):
            mm.jit(mesh=wrong)(Pair)
    with pytest.raises(TypeError, match="mm.jit compiles a function, not 3"):
        mm.jit(3)


def test_in_shardings_bring_state_home():
    """A model born on one device is moved to where in_shardings says, and stays there when it was changed."""
    mesh, tasks = pipeline(2)
    placement = place(tasks, ["first"], ["second", "count"])
    model = Pair()
    expected = np.asarray(model(X))
    with mesh:

        @mm.jit(in_shardings=(placement, None))
        def f(model, x):
            y = model(x)
            nnx.update(model, jax.tree.map(lambda p: p + 1, nnx.state(model)))
            return y

        np.testing.assert_allclose(f(model, X), expected, rtol=1e-5)
    for path, devices in homes(model).items():
        assert devices == {mesh.devices.flat[0 if "first" in path else 1]}, path


def test_out_shardings_place_results():
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]})
    on_first = jax.sharding.NamedSharding(mesh.slice(stage=0), jax.P())
    with mesh:
        model = mm.jit(Pair, out_shardings=placement)()
        f = mm.jit(lambda model, x: {"y": model(x), "x": x + 1}, out_shardings={"y": on_first, "x": None})
        out = f(model, X)
    assert out["y"].sharding.device_set == {mesh.devices.flat[0]}
    np.testing.assert_allclose(out["y"], Pair()(X), rtol=1e-5)


def test_mesh_argument_in_place_of_the_context():
    """mesh= does what the MultiMesh's context does."""
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]})
    model = mm.jit(Pair, out_shardings=placement, mesh=mesh)()
    assert homes(model.first)["['kernel'].value"] == {mesh.devices.flat[0]}
    y = mm.jit(lambda model, x: model(x), mesh=mesh)(model, X)
    np.testing.assert_allclose(y, Pair()(X), rtol=1e-5)


@pytest.mark.slow
def test_shard_map():
    """mm.shard_map is nnx.shard_map, and takes a TaskSharding's specs."""
    mesh, tasks = pipeline(1, 2)
    specs = mm.TaskSharding(
        {
            mm.path("first", "kernel"): (tasks[0], jax.P(None, "model")),
            mm.path("first"): (tasks[0], jax.P("model")),
            mm.path("second", "kernel"): (tasks[0], jax.P("model")),
            mm.path(...): (tasks[0], jax.P()),
        }
    )
    model = Pair()

    def f(model, x):
        hidden = jnp.tanh(model.first(x))
        return jax.lax.psum(hidden @ model.second.kernel[...], "model")

    submesh = mesh.slice(stage=0)
    with mesh:
        g = mm.shard_map(f, mesh=submesh, in_specs=(specs, jax.P()), out_specs=jax.P())
        np.testing.assert_allclose(g(model, X), model(X), rtol=1e-5)
        # Inside a task its mesh defaults to the task's.
        h = mm.jit(mm.task(mm.shard_map(f, in_specs=(specs, jax.P()), out_specs=jax.P()), task=tasks[0]))
        np.testing.assert_allclose(h(model, X), model(X), rtol=1e-5)


def test_one_value_returned_several_times_can_have_several_shardings():
    mesh, _ = pipeline(3)
    shardings = [NamedSharding(mesh.slice(stage=n), P()) for n in range(3)]
    shared = mm.jit(lambda x: [x, x, x], out_shardings=shardings, mesh=mesh)(jnp.ones(4))
    made = mm.jit(lambda: [jnp.zeros(4)] * 3, out_shardings=shardings, mesh=mesh)()
    for x, y, sharding in zip(shared, made, shardings):
        assert x.sharding == y.sharding == sharding


def test_what_is_compiled_takes_what_it_was_lowered_for():
    """Over two meshes: not the same arrays under other names, nor another static argument or attribute."""

    def step(model, b, a, times):
        return (model.first(b) * times).sum() + model.second(model.first(a)).sum()

    mesh, tasks = pipeline(2)
    with mesh:
        model = born(Pair, mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]}))
        one, two = jnp.ones((2, 4)), jnp.full((2, 4), 2.0)
        run = mm.jit(step, static_argnums=3).lower(model, one, two, 2).compile()
        np.testing.assert_allclose(run(model, one, two), step(Pair(), one, two, 2), rtol=1e-5)
        calls = [
            lambda: run(model, two, b=one),
            lambda: run(model, one, two, 3),
            lambda: run(model, one),
            lambda: run(one, one, two),
        ]
        for call in calls:
            with pytest.raises(
                TypeError, match="step is called with other arguments than it was lowered for"
            ):
                call()
        model.mode = "other"
        with pytest.raises(TypeError, match="static attribute"):
            run(model, one, two)


def test_a_scalar_of_a_weak_type_stays_weak():
    class Model(nnx.Module):
        def __init__(self):
            self.temperature = nnx.Variable(jnp.asarray(1.0))
            self.a, self.b = (nnx.Param(jnp.ones(4, jnp.bfloat16)) for _ in range(2))

    def step(model):
        y = model.a[...] * model.temperature[...] + model.b[...]
        model.temperature[...] *= 0.5
        return y

    mesh, tasks = pipeline(2)
    with mesh:
        model = mm.jit(
            Model, out_shardings=mm.TaskSharding({mm.path("a"): tasks[0], mm.path("b"): tasks[1]})
        )()
        run = mm.jit(step)
        for _ in range(3):
            assert run(model).dtype == jnp.bfloat16 and model.temperature.get_raw_value().weak_type


def test_derivatives_by_integers(mode):
    """They have no values: `float0` arrays of NumPy."""

    def f(model, n, x):
        return jax.grad(lambda n, x: model(x).sum() * 2.0, argnums=(0, 1), allow_int=True)(n, x)

    by_n, by_x = mode.jit(f)(mode.make(Pair), np.arange(3), np.ones((2, 4), np.float32))
    assert by_n.dtype == jax.dtypes.float0 and by_n.shape == (3,) and by_x.shape == (2, 4)
