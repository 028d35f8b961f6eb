"""The way past the graph traversal of `nnx.jit`: taken by calls like an earlier one, and by no others."""

from __future__ import annotations

import gc
import threading
import weakref

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
from mmnnx import _compat
from mmnnx.mpmd.jit import jit as jit_module
from mmnnx.mpmd.jit.fast_path import FastPath
from tests.mpmd.parity import assert_same, born, pipeline
from tests.slow import few, grid

X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


class Pair(nnx.Module):
    """Two layers, one on each mesh, a counter and a static attribute."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(4, 4, rngs=rngs)
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.scale = 1.0

    def __call__(self, x):
        return self.scale * self.second(self.dropout(jnp.tanh(self.first(x))))


@pytest.fixture
def taken(monkeypatch):
    """Grows by one with every call that goes past the traversal."""
    calls = []
    whole = FastPath.__call__

    def watched(self, arguments):
        calls.append(self)
        return whole(self, arguments)

    monkeypatch.setattr(FastPath, "__call__", watched)
    return calls


@pytest.fixture
def mesh():
    mesh, tasks = pipeline(2)
    mesh.tasks = tasks
    with mesh:
        yield mesh


@pytest.fixture
def model(mesh):
    return new_model(mesh)


def new_model(mesh):
    model = born(Pair, mm.TaskSharding({mm.path("first"): mesh.tasks[0], mm.path(...): mesh.tasks[1]}))
    model.eval()
    return model


def forward(model, x):
    return model(x)


def by_hand(model, x):
    """The same on the host."""
    first, second = (
        (np.asarray(layer.kernel[...]), np.asarray(layer.bias[...])) for layer in (model.first, model.second)
    )
    return model.scale * (np.tanh(x @ first[0] + first[1]) @ second[0] + second[1])


def test_a_call_like_an_earlier_one_takes_it(model, taken):
    f = mm.jit(forward)
    once = f(model, X)
    assert not taken
    twice = f(model, X)
    assert len(taken) == 1
    assert_same(twice, once)
    assert twice.sharding == once.sharding
    assert_same(f(model, 2 * X), by_hand(model, 2 * X).astype(np.float32), rtol=1e-5)  # other values
    assert len(taken) == 2


def test_another_model_of_the_same_structure_takes_it(mesh, model, taken):
    f = mm.jit(forward)
    f(model, X)
    other = new_model(mesh)
    other.first.kernel[...] *= 2
    assert_same(f(other, X), by_hand(other, X))
    assert len(taken) == 1
    assert_same(f(model, X), by_hand(model, X))


def test_what_was_used_last_is_looked_at_first(model, taken):
    """However many shapes a function has seen, as one that generates text has."""
    run = mm.jit(lambda model, x: model(x))
    for rows in (1, 2, 3, 1):
        run(model, jnp.ones((rows, 4)))
    known = run._fast_paths.known
    assert len(known) == 3 and len(taken) == 1 and known[0].path is taken[0]


def test_training_is_the_same_with_it(mesh, taken):
    """Losses, parameters, optimizer and counters after steps that take it are those of nnx.jit."""

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        model.count[...] += 1
        return {"loss": loss, "more": (grads["first"]["bias"][...], None)}

    whole, split = Pair(), new_model(mesh)
    whole.eval()
    make = lambda model: nnx.Optimizer(model, optax.adam(1e-2, eps=1e-2), wrt=nnx.Param)
    whole_optimizer, split_optimizer = make(whole), mm.jit(make)(split)
    f, g = nnx.jit(step), mm.jit(step)
    kernel = split.first.kernel
    for i in range(5):
        assert_same(g(split, split_optimizer, X + i), f(whole, whole_optimizer, X + i))
        assert_same(split, whole)
        assert_same(split_optimizer, whole_optimizer)
    assert len(taken) >= 3
    assert split.first.kernel is kernel, "the Variable itself was replaced"


# What must not take it


def grow(model):
    model.more = nnx.Param(jnp.ones(3))


def shrink(model):
    model.second.bias = nnx.data(None)


def rescale(model):
    model.scale = 3.0


def rename(model):
    del model.scale
    model.factor = 1.0


def halve(model):
    model.second.kernel[...] = model.second.kernel[...].astype(jnp.bfloat16)


def retype(model):
    model.second.kernel = nnx.BatchStat(model.second.kernel[...])


def train(model):
    model.train()


def share(model):
    model.second.bias = model.first.bias


def annotate(model):
    model.second.kernel.set_metadata("twice", True)


def describe(model, x):
    """Depends on everything about a model that a trace can see."""
    metadata = model.second.kernel.get_metadata()
    variables = {
        type(v).__name__ + str(v[...].dtype): None
        for _, v in nnx.iter_graph(model)
        if isinstance(v, nnx.Variable) and not isinstance(v, nnx.RngState)
    }
    facts = [
        len(jax.tree.leaves(nnx.state(model))),
        getattr(model, "scale", 9.0),
        model.dropout.deterministic,
        len(variables),
        sum(map(len, variables)),
        bool(metadata.get("twice")),
        model.second.bias is model.first.bias,
    ]
    return x @ model.first.kernel[...] @ model.second.kernel[...].astype(jnp.float32), [
        jnp.float32(f) for f in facts
    ]


@few(3)
@pytest.mark.parametrize("change", [grow, shrink, rescale, rename, halve, retype, train, share, annotate])
def test_a_changed_model_does_not_take_a_stale_one(model, taken, change):
    """Variables added, removed, shared, of another type; attributes and their names, mode, metadata."""
    f = mm.jit(describe)
    f(model, X)
    f(model, X)
    change(model)
    assert_same(f(model, X), nnx.jit(describe)(on_one_device(model), X), rtol=1e-4)


def on_one_device(model):
    """A copy of the model."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.device_put(state, jax.devices()[7]))


@pytest.mark.parametrize(
    "x",
    [X[:1], X.astype(np.int32), jnp.asarray(X, jnp.bfloat16), X.T @ X, {"x": X}, [X]],
    ids=["rows", "int", "bfloat16", "square", "dict", "list"],
)
def test_another_argument_does_not_take_a_stale_one(model, taken, x):
    """Another shape, dtype or pytree."""
    f = mm.jit(
        lambda model, x: (
            model(jax.tree.leaves(x)[0]).astype(jnp.float32),
            jax.tree.structure(x).num_nodes + x_dtype(x),
        )
    )
    f(model, X)
    f(model, X)
    y, told = f(model, x)
    (leaf,) = jax.tree.leaves(x)
    assert_same(y, by_hand(model, np.asarray(leaf, np.float32)).astype(np.float32), rtol=2e-2)
    assert int(told) == jax.tree.structure(x).num_nodes + x_dtype(x)
    assert len(taken) == 1


def x_dtype(x):
    return 10 * jax.tree.leaves(x)[0].dtype.itemsize


def test_weak_types_are_told_apart(model, taken):
    f = mm.jit(lambda model, x, s: (model(x) * s, jnp.bfloat16(1) * s))
    f(model, X, 2.0)
    assert f(model, X, 2.0)[1].dtype == jnp.bfloat16
    assert f(model, X, np.float32(2.0))[1].dtype == jnp.float32
    assert f(model, X, 2)[1].dtype == jnp.bfloat16


def test_another_home_does_not_take_a_stale_one(mesh, model, taken):
    """State that moved is used, and stays, where it is now."""

    def f(model):
        model.first.bias[...] += 1
        return jnp.sum(model.first.bias[...]) + jnp.sum(model.second.bias[...])

    f = mm.jit(f)
    f(model)
    f(model)
    target = NamedSharding(mesh.slice(stage=1), P())
    for variable in (model.first.kernel, model.first.bias):
        variable.set_value(jax.device_put(variable[...], target))
    model.second.kernel.set_value(
        jax.device_put(model.second.kernel[...], NamedSharding(mesh.slice(stage=0), P()))
    )
    assert float(f(model)) == 12.0
    assert model.first.bias[...].sharding.device_set == target.device_set


def test_another_sharding_of_an_argument(mesh, model, taken):
    f = mm.jit(forward)
    for stage in (0, 1, 0, 1):
        x = jax.device_put(X, NamedSharding(mesh.slice(stage=stage), P()))
        assert_same(f(model, x), by_hand(model, X))
    assert len(taken) == 2


def test_static_arguments(model, taken):
    f = mm.jit(
        lambda model, x, n, *, flip=False: model(x) * (-n if flip else n),
        static_argnums=2,
        static_argnames=("n", "flip"),
    )
    for n in (1, 3):
        for flip in (False, True):
            for _ in range(2):
                expected = by_hand(model, X) * (-n if flip else n)
                assert_same(f(model, X, n, flip=flip), expected)
                assert_same(f(model, X, n=n, flip=flip), expected)
    assert len(taken) == 8


def test_another_mesh(model, taken):
    """The same arguments under another MultiMesh are another program."""
    f = mm.jit(forward)
    f(model, X)
    other = mm.MultiMesh(axis_sizes=(1, 2), axis_names=("data", "stage"))
    with other:
        assert_same(f(model, X), by_hand(model, X))
    assert not taken


def test_an_equal_mesh_made_anew(taken):
    """As each trial of a sweep makes one: nothing is traced again, by functions that outlive it."""
    traced = []

    @mm.jit
    def evaluate(model, x):
        traced.append(x.shape)
        return model(x)

    for _ in range(3):
        mesh, mesh.tasks = pipeline(2)
        with mesh:
            model = new_model(mesh)
            assert_same(evaluate(model, X), by_hand(model, X))
    assert len(traced) == 1 and len(taken) == 2
    with mesh:  # a rule of one's own may mean another task
        mm.register_task("first", task=mesh.tasks[1])
        evaluate(model, X)
    assert len(traced) == 2


def test_ignored_transforms_do_not_take_it(model, taken):
    f = mm.jit(forward)
    f(model, X)
    with mm.ignore_transforms():
        y = f(model, X)
    assert not taken
    assert len(y.sharding.device_set) == 1
    assert_same(y, by_hand(model, X))


def test_under_a_transformation_it_is_not_taken(model, taken):
    """Inside another jit the arguments are tracers, which a program of executables cannot run on."""
    f = mm.jit(forward)
    f(model, X)
    outer = nnx.jit(lambda model, x: 2 * f(model, x))
    whole = on_one_device(model)
    assert_same(outer(whole, X), 2 * by_hand(model, X))
    assert not taken


# Results and references


@pytest.mark.parametrize(
    "fun",
    [
        lambda m, x: (m, m(x)),
        lambda m, x: m.first,
        lambda m, x: {"bias": m.second.bias, "y": m(x)},
        lambda m, x: nnx.state(m.second, nnx.PathContains("bias")),
    ],
    ids=["the model", "a submodule", "a Variable", "a State"],
)
def test_results_that_are_nodes_do_not_use_it(model, taken, fun):
    """What is returned is the caller's own object, by identity, at every call."""
    f = mm.jit(fun)
    is_node = lambda x: isinstance(x, (nnx.Module, nnx.Variable))
    own = (model, model.first, model.second.bias)
    for _ in range(3):
        nodes = [x for x in jax.tree.leaves(f(model, X), is_leaf=is_node) if is_node(x)]
        assert len(nodes) == 1 and any(nodes[0] is node for node in own)
    assert not taken


class Scale(nnx.Param):
    """A type of Variable of one's own."""


def gradients(model, x):
    return nnx.value_and_grad(lambda model: jnp.sum(model(x)))(model)


def several(model, x):
    made = Scale(x, out_sharding=("rows", None), note="mine"), nnx.Variable({"x": x + 1, "none": None})
    return {"made": made, "none": None, "number": 3, "plain": x}


@pytest.mark.parametrize("modes", [{}, {"graph_updates": False}, {"graph": False}], ids=str)
@pytest.mark.parametrize("fun", [gradients, several])
def test_results_that_are_new_variables(model, taken, fun, modes):
    """They have the types, metadata and homes of the first ones, and no two calls give the same."""
    f = mm.jit(fun, **modes)
    first, second, third = outs = [f(model, n * X) for n in (1, 1, 2)]
    assert len(taken) == 2
    assert jax.tree.structure(first) == jax.tree.structure(second) == jax.tree.structure(third)
    assert_same(second, first)
    found = [[v for _, v in nnx.iter_graph(out) if isinstance(v, nnx.Variable)] for out in (model, *outs)]
    assert len({id(v) for row in found for v in row}) == sum(map(len, found))
    for row in found[1:]:
        assert [*map(_compat.note, row)] == [*map(_compat.note, found[1])]


def test_a_new_variable_that_is_returned_twice(model, taken):
    f = mm.jit(lambda model, x: [nnx.Param(model(x))] * 2)
    for _ in range(3):
        one, other = f(model, X)
        assert one is other
    assert not taken


def test_structure_that_changes_inside_does_not_use_it(model, taken):
    """A Variable that the function adds at its first call is there, and adding goes on at each."""

    def f(model, x):
        name = f"extra{sum(1 for a in vars(model) if a.startswith('extra'))}"
        setattr(model, name, nnx.Param(jnp.sum(x)))
        return model(x)

    f = mm.jit(f)
    for n in range(1, 4):
        assert_same(f(model, X * n), by_hand(model, X * n))
        assert float(getattr(model, f"extra{n - 1}")[...]) == pytest.approx(float(n * X.sum()), rel=1e-5)
    assert not taken


def test_shared_variables(model, taken):
    """One Variable under two names and in two arguments is one, and is not one when it is two."""
    model.tied = model.first

    def f(a, b, x):
        a.first.bias[...] += 1
        b.tied.bias[...] += 10
        b.second.bias[...] += 100
        return a.second(a.first(x))

    f = mm.jit(f)
    for n in range(1, 4):
        f(model, model, X)
        assert_same(model.first.bias[...], np.full(4, 11.0 * n, np.float32))
        assert_same(model.second.bias[...], np.full(4, 100.0 * n, np.float32))
    assert len(taken) == 2
    other = nnx.clone(model)
    f(model, other, X)
    assert_same(model.first.bias[...], np.full(4, 34.0, np.float32))
    assert_same(other.first.bias[...], np.full(4, 43.0, np.float32))


def test_which_variables_are_one(model, taken):
    """Also where as many are as before."""
    model.tied = model.first.bias
    f = mm.jit(lambda model: jnp.asarray(model.tied is model.first.bias))
    assert f(model) and f(model)
    model.tied = model.second.bias
    assert not f(model) and not f(model)
    assert len(taken) == 2


def test_shared_modules(model, taken):
    """Two modules of the same Variables are not one module."""
    other = nnx.clone(model)
    other.first, other.second, other.count = model.first, model.second, model.count
    other.dropout = model.dropout

    @mm.jit
    def are_one(a, b):
        return jnp.asarray(a is b)

    for _ in range(2):
        assert are_one(model, model)
        assert not are_one(model, other)
        assert not are_one(other, model)
    assert len(taken) == 4  # (other, model) is like (model, other)


class Child(nnx.Module):
    """A layer that knows what it is a part of."""

    def __init__(self, parent, rngs):
        self.parent = nnx.data(parent)
        self.linear = nnx.Linear(4, 4, rngs=rngs)


class Parent(nnx.Module):
    def __init__(self):
        self.children = nnx.List([Child(self, nnx.Rngs(n)) for n in range(2)])

    def __call__(self, x):
        for child in self.children:
            x = jnp.tanh(child.linear(x))
        return x


def test_modules_that_refer_to_their_parent(mesh):
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    rules = {mm.path("children", n): mesh.tasks[n] for n in range(2)}
    model = mm.jit(Parent, out_shardings=mm.TaskSharding(rules))()
    reference = Parent()
    optimizers = [nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param) for m in (model, reference)]
    split, whole = mm.jit(step), nnx.jit(step)
    for _ in range(3):
        assert_same(split(model, optimizers[0], X), whole(reference, optimizers[1], X))
    assert_same(nnx.state(model), nnx.state(reference))
    for child, device in zip(model.children, mesh.mesh.devices.flat):
        assert child.linear.kernel.sharding.device_set == {device}
    for _ in range(30):  # what is tried first at every call leaves no traces on Python's stack
        split(model, optimizers[0], X)


def test_numpy_values_of_variables(model, taken):
    """They are read as they are, and are arrays of JAX after a call, as with `nnx.jit`."""
    f = mm.jit(forward)
    for scale in (2, 3):
        model.second.bias.set_raw_value(np.full(4, scale, np.float32))
        assert_same(f(model, X), by_hand(model, X))
        assert isinstance(model.second.bias.get_raw_value(), jax.Array)
    assert len(taken) == 1


def test_two_variables_that_hold_one_array(model, taken):
    """They were one array at first, and are two after."""
    model.first.bias[...] = jax.device_put(jnp.zeros(4), model.first.bias[...].sharding)
    model.twin = nnx.Param(model.first.bias[...])

    def f(model):
        model.first.bias[...] += 1
        model.twin[...] += 10
        return jnp.sum(model.second.bias[...])

    f = mm.jit(f)
    for n in range(1, 4):
        f(model)
        assert_same(model.first.bias[...], np.full(4, 1.0 * n, np.float32))
        assert_same(model.twin[...], np.full(4, 10.0 * n, np.float32))


def test_one_array_as_two_arguments(model, taken):
    """Learned from a call with two arrays, used for one with the same twice, and the other way round."""
    f = mm.jit(lambda model, x, y: model(x) - 2 * model(y))
    for x, y in ((X, 3 * X), (X, X), (3 * X, X)):
        assert_same(f(model, x, y), by_hand(model, x) - 2 * by_hand(model, y))
    g = mm.jit(lambda model, x, y: model(x) - 2 * model(y))
    for x, y in ((X, X), (X, 3 * X), (3 * X, X), (X, X), (2 * X, X)):
        assert_same(g(model, x, y), by_hand(model, x) - 2 * by_hand(model, y))
    assert len(taken) == 2 + 3


def test_changes_made_between_calls_are_seen(model, taken):
    """By the user's own hand: a new value, in place or not, or a new Variable."""
    f = mm.jit(forward)
    f(model, X)
    model.first.kernel[...] = model.first.kernel[...] * 2
    assert_same(f(model, X), by_hand(model, X))
    model.second.kernel = model.second.kernel.replace(model.second.kernel[...] + 1)
    assert_same(f(model, X), by_hand(model, X))
    nnx.update(
        model, jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, nnx.state(model, nnx.Param))
    )
    assert_same(f(model, X), by_hand(model, X))
    assert len(taken) == 3


def test_updates_are_seen_by_who_holds_the_variable(model, taken):
    def f(model):
        model.count[...] += 1
        model.first.bias[...] += 1
        return jnp.sum(model.second.bias[...])

    f = mm.jit(f)
    bias, count = model.first.bias, model.count
    for n in range(1, 4):
        f(model)
        assert int(count[...]) == n and float(bias[...][0]) == n
    assert len(taken) >= 1


def test_random_streams_move_on(mesh, model, taken):
    model.train()
    f = mm.jit(lambda model, x: model.dropout(x) + 0 * jnp.sum(model.first(x)) + 0 * model.second(x))
    seen = {np.asarray(f(model, np.ones((8, 4), np.float32))).tobytes() for _ in range(4)}
    assert len(seen) == 4
    assert len(taken) >= 2


# Donation


def test_donated(model, taken):
    def f(model, x):
        model.first.bias[...] += 1
        model.second.bias[...] += 1
        return jnp.sum(x)

    f = mm.jit(f, donate_argnums=0)
    for n in range(1, 4):
        old = [model.first.bias[...], model.second.bias[...]]
        assert float(f(model, X)) == pytest.approx(float(X.sum()), rel=1e-5)
        assert all(a.is_deleted() for a in old), f"call {n}"
        assert float(model.first.bias[...][0]) == n
        assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert len(taken) == 2


def test_a_donated_array_used_again_is_named(mesh, model, taken):
    f = mm.jit(lambda model, x: model(x["rows"]) + 1, donate_argnums=1)
    place = lambda: {"rows": jax.device_put(X, NamedSharding(mesh.slice(stage=0), P()))}
    for _ in range(2):
        x = place()
        f(model, x)
        assert x["rows"].is_deleted()
    with pytest.raises(ValueError, match=r"rows was donated"):
        f(model, x)
    assert len(taken) >= 1
    assert_same(f(model, place()), by_hand(model, X) + 1)


# Threads


def in_thread(fun):
    """What `fun` returns, run in a thread of its own."""
    out = []
    thread = threading.Thread(target=lambda: out.append(fun()))
    thread.start()
    thread.join()
    return out[0]


def test_from_another_thread(mesh, model, taken):
    """A thread has no current MultiMesh until it enters one; calls from both, in turn, are right."""
    f = mm.jit(forward)

    def there():
        with mesh:
            return f(model, X)

    for n in range(3):
        model.first.bias[...] += n
        assert_same(f(model, X), by_hand(model, X))
        assert_same(in_thread(there), by_hand(model, X))
    assert len(taken) == 5


def test_two_threads_at_once(mesh, model, monkeypatch):
    """Each learns from its own call: here the second runs while the first is about to learn."""
    f = mm.jit(lambda model, x, n: model(x) * n, static_argnums=2)
    ran = {1: threading.Event(), 2: threading.Event()}
    first_ended = threading.Event()
    whole = jit_module.FlatJit.__call__

    def in_turn(self, *args, **kwargs):
        n = 1 if threading.current_thread() is threading.main_thread() else 2
        if n == 2:
            assert ran[1].wait(20)
        out = whole(self, *args, **kwargs)
        ran[n].set()
        assert (ran[2] if n == 1 else first_ended).wait(20)
        return out

    def second():
        with mesh:
            f(model, x, 2)

    x = jnp.asarray(X)
    with monkeypatch.context() as patch:
        patch.setattr(jit_module.FlatJit, "__call__", in_turn)
        other = threading.Thread(target=second)
        other.start()
        f(model, x, 1)
        first_ended.set()
        other.join()
    for n in (1, 2):
        assert_same(f(model, x, n), n * by_hand(model, X), what=f"results of n={n}")


@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_model_on_one_device_takes_it_too(taken, donate):
    """A function that is not split is repeated the same way: updates in place, static arguments apart."""

    def f(model, times):
        model.count[...] += times
        return model.count[...] * model.second.bias[...].sum()

    split, plain = mm.jit(f, static_argnums=1, donate_argnums=donate), nnx.jit(f, static_argnums=1)
    here, there = Pair(), Pair()
    for times in (1, 1, 2, 2, 1):
        assert float(split(here, times)) == float(plain(there, times))
        assert int(here.count[...]) == int(there.count[...])
    assert len(taken) == 3


@pytest.mark.parametrize("graph, split", grid([False, True], [False, True]))
def test_a_call_keeps_nothing_alive(graph, split, fast_gc):
    """What a model held before an update is gone after it, in graph mode and in tree mode."""
    mesh, mesh.tasks = pipeline(2)

    def double(model):
        nnx.update(model, jax.tree.map(lambda p: 2 * p, nnx.state(model, nnx.Param)))

    with mesh:
        model = new_model(mesh) if split else Pair()
        f = mm.jit(double, graph=graph)
        before = []
        for _ in range(3):
            before.append(weakref.ref(model.first.kernel.get_value()))
            f(model)
        gc.collect()
        assert [ref() for ref in before] == [None] * 3


def test_one_variable_is_asked_which_trace_it_is_of(monkeypatch, taken):
    """To ask each takes longer than all else; what is refused at first is refused later as well."""

    def count(model):
        model.count[...] += 1
        return model.count[...]

    f, model, asked, can_update = mm.jit(count), Pair(), [], _compat.can_update
    f(model)
    monkeypatch.setattr(_compat, "can_update", lambda variable: asked.append(1) or can_update(variable))
    f(model)
    assert len(taken) == len(asked) == 1
    with pytest.raises(TraceContextError, match="Put mm.jit around all of it"):
        jax.jit(lambda: f(model))()
    assert int(f(model)) == 3


class Static(nnx.Module):
    """Plain values of each kind that Flax compiles in."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(3))
        self.table = nnx.data({"factor": 2, "name": "a"})
        self.sizes = [1, 2]
        self.offset = 1

    def __call__(self, x):
        known = self.table["factor"] + len(self.table["name"]) + sum(self.sizes) + self.offset
        return x * self.weight * known


class StaticGraph(Static, pytree=False):
    """The same; Flax goes by what its attributes hold."""


@pytest.mark.parametrize("cls", [Static, StaticGraph])
@pytest.mark.parametrize("graph_updates", [True, False])
def test_plain_values_of_modules(cls, graph_updates, taken):
    """They are compared; a number in a dict of a module is no input of what is compiled."""
    forward = lambda model, x: model(x)
    f = mm.jit(forward, graph_updates=graph_updates)
    model, x = cls(), jnp.ones(3)

    def change(name, key, value):
        setattr(model, name, {**model.table, key: value} if name == "table" else value)

    for name, key, value in [
        ("offset", None, 1),
        ("offset", None, 5),
        ("table", "factor", 3),
        ("table", "name", "abc"),
        ("sizes", None, [1, 2, 3]),
    ]:
        change(name, key, value)
        for _ in range(2):
            assert_same(f(model, x), nnx.jit(forward)(model, x))
    assert len(taken) == 5
    model.table["factor"] = 9  # in place
    assert_same(f(model, x), nnx.jit(forward)(model, x))
    assert len(taken) == 5


def test_attributes_that_cannot_be_compared_are_left_to_jax(model, taken):
    class Size:
        def __init__(self, rows):
            self.rows = rows

        def __eq__(self, other):
            return self.rows == other.rows

    f = mm.jit(forward)
    model.size = Size(3)
    assert_same(f(model, X), f(model, X))
    assert len(taken) == 1
    model.size = "none"
    with pytest.raises(ValueError, match="checking equality of metadata fields"):
        f(model, X)


def test_a_number_in_a_dict_of_a_tree_is_an_input(taken):
    """Without graphs it is a leaf like any other."""
    f = mm.jit(lambda model, x: model(x), graph=False)
    model, x = Static(), jnp.ones(3)
    model.table = nnx.data({"factor": 2, "name": ()})
    for factor in (2, 2, 3):
        model.table["factor"] = factor
        assert_same(f(model, x), np.full(3, factor + 4.0, np.float32))
    assert len(taken) == 2


@pytest.mark.slow
@pytest.mark.parametrize("placed", [False, True])
def test_what_jax_has_forgotten_runs_all_the_same(placed):
    """`jax.clear_caches` between two calls, of which the second does not go through `nnx.jit`."""
    traced = []

    def count_up(model, x, times):
        traced.append(times)
        model.bias[...] += times
        return model(x)

    model, x = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    if placed:
        task = mm.Task("t", mesh=jax.make_mesh((2,), ("model",)))
        model = mm.jit(lambda model: model, out_shardings=mm.TaskSharding({...: task}))(model)
    before, step = model(x), mm.jit(count_up, static_argnums=2)
    for calls in range(1, 5):
        if calls == 3:
            jax.clear_caches()
        np.testing.assert_allclose(step(model, x, 2), before + 2 * calls, rtol=1e-6)
    assert traced == [2]
