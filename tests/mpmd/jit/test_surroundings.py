"""What is around a function: threads, other calls of it, configuration, callbacks, what it closes over, and
the containers that its state is in. All as under `nnx.jit`.
"""

from __future__ import annotations

import contextlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.runtime import debug_nans
from mmnnx.sharding.mesh import current_multimesh
from tests import models
from tests.models import make
from tests.mpmd.modes import Pair
from tests.mpmd.parity import assert_same, born, homes, pipeline, place
from tests.slow import few

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def descend(model, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
    return loss


class Wide(Pair):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nnx.Linear(*io, rngs=nnx.Rngs(0)) for io in ((4, width), (width, 3)))


@few(1)
def test_threads_that_call_it_first_with_different_models(mode):
    """Each trains its own; all begin while nothing is traced yet."""
    step = mode.jit(descend)
    models = {seed: mode.make(lambda seed=seed: Wide(8 * seed)) for seed in (1, 2, 3)}
    losses, barrier = {}, threading.Barrier(len(models))
    mesh = current_multimesh()

    def work(seed):
        with mesh if mode.split else contextlib.nullcontext():
            barrier.wait()
            losses[seed] = [float(step(models[seed], X)) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reference = nnx.jit(descend)
    for seed, model in models.items():
        alone = Wide(8 * seed)
        expected = [float(reference(alone, X)) for _ in range(3)]
        np.testing.assert_allclose(losses[seed], expected, rtol=1e-5)
        assert_same(model, alone)


def test_a_function_that_calls_itself(mode):
    def add(model, x, times):
        model.second.bias[...] += 1
        return model(x).sum() if times == 1 else again(model, x, times - 1)

    again = mode.jit(add, static_argnums=2)
    model = mode.make(Pair)
    for _ in range(3):
        again(model, X, 3)
    np.testing.assert_array_equal(model.second.bias[...], np.full(3, 9.0))


def test_static_arguments_that_are_equal_and_not_the_same(mode):
    f = mode.jit(lambda x, how: x * {bool: 1, int: 2, float: 3}[type(how)], static_argnums=1)
    assert [float(f(1.0, how)) for how in (True, 1, 1.0, True)] == [1, 2, 3, 1]
    with pytest.raises(ValueError, match="static"):
        f(1.0, [1])


def test_what_becomes_of_a_closed_over_array_later(mode):
    """NumPy arrays may be written to (even where JAX would share the buffer), JAX arrays deleted."""
    raw = np.zeros(64 + 16, np.uint8)
    offset = -raw.ctypes.data % 64  # at addresses such as this
    scale = raw[offset : offset + 16].view(np.float32)
    scale[:] = 2
    shift = jnp.full(4, 3.0)
    table = np.zeros((2, 2), np.float32)
    f = mode.jit(lambda model, x: (model(x * jnp.asarray(scale) + shift).sum(), jnp.asarray(table)))
    model = mode.make(Pair)
    before = jax.tree.map(np.asarray, f(model, X))
    scale[:], table[:] = 7, 9
    shift.delete()
    assert_same(f(model, X), before)


def test_an_argument_that_is_returned_is_a_copy(mode):
    f = mode.jit(lambda model, x, y, n: (model(x), y, n))
    model, y = mode.make(Pair), np.ones(3)
    _, again, number = f(model, X, y, 3)
    y[:] = 5
    assert isinstance(again, jax.Array) and again.dtype == jnp.float32 and isinstance(number, jax.Array)
    np.testing.assert_array_equal(again, np.ones(3, np.float32))
    z = jnp.ones(3)
    _, again, _ = f(model, X, z, 3)
    again.delete()
    assert not z.is_deleted()


def test_callbacks_happen_once(mode):
    """On activations, on the batch, on constants, on counters; and one that makes a value for both layers."""
    seen = []

    def note(name):
        jax.debug.callback(lambda *_: seen.append(name))

    def f(model, x, step):
        jax.debug.callback(lambda _: seen.append("batch"), x.sum())
        note("constant")
        step = step + 1
        jax.debug.callback(lambda _: seen.append("step"), step)
        made = io_callback(
            lambda: seen.append("made") or np.float32(len(seen)), jax.ShapeDtypeStruct((), jnp.float32)
        )
        hidden = model.first(x) * made
        jax.debug.callback(lambda _: seen.append("activation"), hidden.sum())
        return model.second(hidden) / made, made, step

    model = mode.make(Pair)
    jitted = mode.jit(f)
    for _ in range(2):
        seen.clear()
        out, made, _ = jax.block_until_ready(jitted(model, X, jnp.float32(0)))
        jax.effects_barrier()
        assert sorted(seen) == ["activation", "batch", "constant", "made", "step"]
        first, second = model.first.kernel[...], model.second.kernel[...]
        np.testing.assert_allclose(out, X @ np.asarray(first) @ np.asarray(second), rtol=1e-4)
        assert len({float(shard.data) for shard in made.addressable_shards}) == 1


def test_callbacks_happen_once_for_each_microbatch(mode):
    seen = []

    def loss_fn(model, x):
        jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0])
        return jnp.mean(model(x) ** 2)

    f = mode.jit(lambda model, x: mm.microbatch(nnx.value_and_grad(loss_fn), 0, 2, 1)(model, x)[0])
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    jax.block_until_ready(f(mode.make(Pair), x))
    jax.effects_barrier()
    assert sorted(seen) == [0, 8, 16, 24]


@few(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h1"])
def test_callbacks_on_gradients_happen_once_for_each_microbatch(mode, schedule):
    """Of an activation, of all weights and of one layer's."""
    seen = []

    def look(gradient):
        jax.debug.callback(lambda norm: seen.append(float(norm)), jnp.sqrt(jnp.sum(gradient**2)))

    @jax.custom_vjp
    def spy(x):
        return x

    spy.defvjp(lambda x: (x, None), lambda _, g: (look(g) or g,))

    def loss_and_grads(model, x):
        def loss_fn(model):
            return jnp.mean(model.second(spy(model.first(x))) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        look(jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(grads)]))
        look(grads["second"]["kernel"][...])
        return loss, grads

    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    plain = Pair()
    for n in range(0, 8, 2):
        loss_and_grads(plain, x[n : n + 2])
    jax.effects_barrier()
    expected = sorted(seen)
    seen.clear()
    loop = mm.microbatch(loss_and_grads, 0, 2, argnum=1, reduce="mean", schedule=schedule)
    jax.block_until_ready(mode.jit(lambda model, x: loop(model, x)[0])(mode.make(Pair), x))
    jax.effects_barrier()
    np.testing.assert_allclose(sorted(seen), expected, rtol=1e-5)


def test_a_linear_solve_over_both_layers(mode):
    def loss_fn(model, x):
        matrix = 5 * jnp.eye(4) + model.first.kernel[...]
        return (model.second(jnp.linalg.solve(matrix, model.first(x).T).T) ** 2).mean()

    model = mode.make(Pair)
    grad_fn = nnx.value_and_grad(loss_fn)
    assert_same(mode.jit(grad_fn)(model, X), nnx.jit(grad_fn)(Pair(), X))


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_nans_are_found(mode, what):
    """In each call, as under `jax.jit`, not in the first alone."""
    shift = {"nan": 1000.0, "inf": 0.0}[what]
    f = mode.jit(lambda model, x, to: jnp.log(to * model.second(model.first(x)) ** 2 - shift))
    model, x, debug = mode.make(Pair), X, {"nan": jax.debug_nans, "inf": jax.debug_infs}[what]
    fine, not_fine = jnp.float32(1e9), jnp.float32(0)
    for _ in range(2):
        assert np.isfinite(np.asarray(f(model, x, fine))).any()
        with debug(True), pytest.raises(FloatingPointError, match=what):
            jax.block_until_ready(f(model, x, not_fine))
        assert not np.isfinite(np.asarray(f(model, x, not_fine))).any()


def test_where_a_nan_was_made(monkeypatch):
    """The message names the call and the part of the program, with its task; whatever other threads run."""
    mesh, tasks = pipeline(2)
    f = mm.jit(lambda model, x: model.second(jnp.log(model.first(x) - 1000)), mesh=mesh)
    with mesh:
        model = born(Pair, mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]}))
    f(model, X)
    whole = debug_nans.checked

    def checked(execute):
        """Before results are looked at, another thread runs all of it."""

        def run(*arrays):
            results = execute(*arrays)
            other = threading.Thread(target=f, args=(model, X))
            other.start()
            other.join()
            return results

        return whole(run)

    monkeypatch.setattr(debug_nans, "checked", checked)
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        f(model, X)
    found = re.match(
        r"invalid value \(nan\) made by instruction \d+ of call 2 of <lambda>: (.*)", str(error.value)
    )
    assert found and tasks[0].name in found[1]


@few(1)
def test_without_compiling(mode):
    """Under `jax.disable_jit` Python runs the function, and state stays where it was."""
    ran = []

    def f(model, x):
        ran.append(float(model(x).sum()) if not isinstance(x, jax.core.Tracer) else None)
        return descend(model, x)

    model, alone = mode.make(Pair), Pair()
    at_birth = homes(model)
    with jax.disable_jit():
        loss = mode.jit(f)(model, X)
    assert ran[-1] is not None
    assert_same(loss, nnx.jit(descend)(alone, X))
    assert_same(model, alone)
    assert homes(model) == at_birth


@few(1)
def test_without_compiling_a_function_may_look_at_values(mode):
    def f(model, x):
        return descend(model, x if float(x.sum()) < 1e9 else 2 * x)

    model, alone = mode.make(Pair), Pair()
    with jax.disable_jit():
        loss = mode.jit(f)(model, X)
    assert_same((loss, nnx.state(model)), (nnx.jit(descend)(alone, X), nnx.state(alone)))


@pytest.mark.parametrize("layers", [4, 5])  # 2 + 2, 3 + 2
def test_stacked_layers_go_back_to_their_tasks(layers):
    class Stack(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((layers, 2)))

    def double(model):
        model.w[...] *= 2

    mesh, tasks = pipeline(2)
    with mesh:
        model = mm.jit(Stack, out_shardings=mm.TaskSharding({mm.path("w"): (tasks, P())}))()
        before = model.w.get_raw_value().sharding
        with mm.ignore_transforms():
            mm.jit(double)(model)
    now = model.w.get_raw_value()
    assert now.sharding == before
    np.testing.assert_array_equal(np.asarray(now), 2 * np.ones((layers, 2)))


def test_what_goes_between_meshes_was_asked_for(mode):
    """`jax.transfer_guard` finds copies that nobody asked for; those of a program are no such."""
    table = np.ones((4, 4), np.float32)
    f = mode.jit(lambda model, x: descend(model, x @ table))
    model, x = mode.make(Pair), jnp.asarray(X)
    with jax.transfer_guard("disallow"):
        first, second = f(model, x), f(model, x)
    alone = Pair()
    reference = nnx.jit(descend)
    assert_same((first, second), tuple(reference(alone, X @ table) for _ in range(2)))
    assert_same(model, alone)


@few(1)
def test_leaks_are_not_found(mode):
    inner = mode.jit(lambda model, x: model(x))
    model = mode.make(Pair)
    with jax.checking_leaks():
        np.testing.assert_allclose(mode.jit(lambda m, x: inner(m, x))(model, X), Pair()(X), rtol=1e-5)


@pytest.mark.slow
def test_a_later_trace_of_the_first_model():
    """What JAX keeps of a trace belongs to that model, not to the one traced last."""
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]})
    f = mm.jit(lambda model, x: model(x).sum())
    with mesh:
        pair, other = born(Pair, placement), born(Three, placement)
        expected = f(pair, X), f(other, X)
        with mm.enable_recomputation(False):
            assert_same((f(pair, X), f(other, X)), expected)
        mm.register_task("later", task=tasks[0])
        assert_same((f(pair, X), f(other, X)), expected)


class Three(Pair):
    def __init__(self):
        super().__init__()
        self.third = nnx.Linear(3, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.third(super().__call__(x))


def test_constraints_of_another_mesh():
    """One function under two MultiMeshes of the same shape runs on the devices of each."""
    f = mm.jit(lambda x: mm.with_sharding_constraint(2 * x, P("model")))
    for devices in (jax.devices()[:2], jax.devices()[2:4]):
        with mm.MultiMesh(axis_sizes=(2,), axis_names=("model",), devices=devices):
            assert f(np.ones(4)).sharding.device_set == set(devices)


class Lists(nnx.Module):
    """Two layers in a list that is a pytree, and an array in a dict."""

    def __init__(self):
        self.layers = nnx.data([nnx.Linear(4, 4, rngs=nnx.Rngs(n)) for n in range(2)])
        self.tables = nnx.data({"scale": (jnp.full(4, 2.0),)})

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x))) * self.tables["scale"][0]


class OldLists(nnx.Module, pytree=False):
    """The same as no pytree, as Flax had Modules before 0.12."""

    __init__, __call__ = Lists.__init__, Lists.__call__


@pytest.mark.parametrize("how", ["in", "out"])
@pytest.mark.parametrize("cls", [Lists, OldLists])
def test_rules_reach_into_lists_and_dicts(cls, how):
    mesh, tasks = pipeline(2)
    rules = {mm.path("layers", 0): tasks[0], mm.path("layers", 1): tasks[1], mm.path("tables"): tasks[1]}
    placement = mm.TaskSharding(rules)
    with mesh:
        model = born(cls, placement) if how == "out" else cls()
        f = mm.jit(lambda model, x: model(x), in_shardings=(placement, None) if how == "in" else None)
        np.testing.assert_allclose(f(model, X), cls()(X), rtol=1e-5)
        for n, layer in enumerate(model.layers):
            assert layer.kernel[...].sharding.device_set == set(mesh.slice(stage=n).devices.flat)
        for wrong, words in ((mm.path("layers"), "tables.scale.0"), (mm.path("nothing"), "layers.0.bias")):
            with pytest.raises(mm.PlacementError, match=f"no filter places {words}"):
                born(cls, mm.TaskSharding({wrong: tasks[0]}))


def test_rules_for_a_state_and_for_arrays_without_a_path():
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("first"): tasks[0], ...: tasks[1]})
    with mesh:
        state = mm.jit(lambda: nnx.state(Pair()), out_shardings=placement)()
        for n, name in enumerate(("first", "second")):
            kernel = state[name]["kernel"].get_value()
            assert kernel.sharding.device_set == set(mesh.slice(stage=n).devices.flat)
        with pytest.raises(mm.PlacementError, match="paths start at the Modules and States"):
            mm.jit(lambda: {"a": jnp.ones(4)}, out_shardings=mm.TaskSharding({mm.path("a"): tasks[0]}))()


def test_a_variable_that_holds_several_arrays():
    class Tree(nnx.Module):
        def __init__(self):
            self.weights = nnx.Param({"u": jnp.ones((4, 4)), "v": jnp.ones(4)})

    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("weights"): tasks[1]})

    with mesh:
        tree = Tree()
        total = mm.jit(
            lambda tree: sum(map(jnp.sum, tree.weights.get_value().values())), in_shardings=(placement,)
        )
        assert float(total(tree)) == 20
        for x in tree.weights.get_value().values():
            assert x.sharding.device_set == set(mesh.slice(stage=1).devices.flat)


@pytest.mark.slow
def test_metrics_can_be_read_between_calls():
    """The arrays of one are made on different stages, and end up together."""
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]})
    alone = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), size=nnx.metrics.Average("size"))
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), size=nnx.metrics.Average("size"))

    def update(model, metrics, x):
        metrics.update(loss=(model(x) ** 2).mean(), size=jnp.abs(model.first(x)).mean())

    with mesh:
        model, f = born(Pair, placement), mm.jit(update)
        for n in range(3):
            f(model, metrics, X + n)
            update(Pair(), alone, X + n)
            assert_same(metrics.compute(), alone.compute())
        metrics.reset()


def test_a_context_mesh_of_jax_is_refused():
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]})
    whole = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with mesh:
        model = born(Pair, placement)
        with (
            jax.set_mesh(whole),
            pytest.raises(ValueError, match=r"jax.set_mesh, of a mesh with axes .*x.*8"),
        ):
            mm.jit(lambda model, x: model(x))(model, X)


def test_a_transformation_around_it_is_explained():
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]})
    with mesh:
        model, f = born(Pair, placement), mm.jit(lambda model: model(X).sum())
        with pytest.raises(ValueError) as error:
            nnx.grad(f)(model)
    assert any("mm.jit(nnx.grad(f))" in note for note in error.value.__notes__)


def test_it_may_take_the_place_of_nnx_jit(monkeypatch):
    """So that a library's trainer, which calls `nnx.jit`, compiles with mm.jit."""
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding({mm.path("first"): tasks[0], mm.path(...): tasks[1]})
    whole, step = Pair(), nnx.jit(descend)
    monkeypatch.setattr(nnx, "jit", mm.jit)
    with mesh:
        split = born(Pair, placement)
        for _ in range(2):
            assert_same(nnx.jit(descend)(split, X), step(whole, X))
        assert_same(nnx.state(split), nnx.state(whole))


def test_what_it_is_called():
    assert repr(mm.jit(descend)) == "mm.jit(descend)"
    with pytest.raises(TypeError, match="static_argnums or static_argnames"):
        mm.jit(lambda x, how: x)(1.0, "fast")


def test_callbacks_where_nothing_else_is_outside_of_loops(mode):
    """One ahead of a loop, which has all that is placed; and where nothing reads what is placed."""
    seen = []

    def evaluate(model, x):
        jax.debug.callback(lambda _: seen.append("batch"), x.mean())
        io_callback(lambda _: seen.append("io"), None, x.sum())
        return mm.microbatch(lambda model, x: (model(x) ** 2).sum(), 0, 1, argnum=1)(model, x)

    def ignore(model, x):
        jax.debug.callback(lambda _: seen.append("ignored"), x.mean())
        return x + 1

    model = mode.make(Pair)
    for f in (evaluate, ignore):
        jax.block_until_ready(mode.jit(f)(model, X))
    jax.effects_barrier()
    assert sorted(seen) == ["batch", "ignored", "io"]


def test_callbacks_that_keep_an_order(mode):
    """On one mesh they do. Two meshes have no common order."""
    seen = []

    def f(model, x, both):
        for n in range(2):
            x = model.first(x)
            io_callback(lambda _, n=n: seen.append(n), None, x.sum(), ordered=True)
        x = model.second(x)
        if both:
            io_callback(lambda _: seen.append(2), None, x.sum(), ordered=True)
        return x

    jitted, model = mode.jit(f, static_argnums=2), mode.make(Pair)
    jax.block_until_ready(jitted(model, X, False))
    jax.effects_barrier()
    assert seen == [0, 1]
    if mode.split:
        with pytest.raises(ValueError, match=r"ordered=True are on 2 TaskMeshes \(.*, .*\)"):
            jitted(model, X, True)
    else:
        jax.block_until_ready(jitted(model, X, True))
        jax.effects_barrier()
        assert seen == [0, 1, 0, 1, 2]


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_values_that_are_captured_around_it(mode):
    """`nnx.capture` has the function add to what it is given."""

    class Sowing(Pair):
        def __call__(self, x):
            hidden = jnp.tanh(self.first(x))
            self.sow(nnx.Intermediate, "hidden", hidden)
            return self.second(hidden)

    model = mode.make(Sowing)
    jitted = mode.jit(lambda model, x: model(x))
    out, captured = nnx.capture(jitted, nnx.Intermediate)(model, X)
    (hidden,) = jax.tree.leaves(captured)
    np.testing.assert_allclose(hidden, np.tanh(model.first.kernel[...].T @ X.T).T, rtol=1e-5)
    np.testing.assert_allclose(jitted(model, X), out)


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, mm.jit])
def test_tasks_on_one_mesh_with_other_rules(transform):
    """A function that was traced in one is traced anew for the other."""
    mesh, _ = pipeline(2, 2, axes=("data",))
    helper = transform(lambda x: mm.with_sharding_constraint(jnp.sin(x), P("batch", "embed")))
    specs = []
    for name in ("batch", "embed"):
        task = mm.Task(name, mesh_slice={"stage": 0}, logical_axes=[(name, "data")])
        with mesh:
            specs.append(mm.jit(mm.task(helper, task=task))(jnp.ones((8, 4))).sharding.spec)
    assert specs == [P("data"), P(None, "data")]


def test_a_task_around_a_call_is_no_part_of_the_function():
    mesh, _ = pipeline(2, 2, axes=("data",))
    double = mm.jit(mm.shard_map(lambda x: 2 * x, in_specs=P("data"), out_specs=P("data")))
    with mesh:
        out = mm.task(double, task=mm.Task("a", mesh_slice={"stage": 0}))(jnp.ones((8, 4)))
    np.testing.assert_array_equal(out, 2)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: jax.eval_shape(f, x),
        lambda f, x: jax.jit(f)(x),
        lambda f, x: jax.grad(f)(x),
        lambda f, x: jax.lax.map(f, x[None]),
        lambda f, x: jax.vmap(f)(x[None]),
    ],
    ids=["eval_shape", "jit", "grad", "map", "vmap"],
)
@pytest.mark.parametrize("placed", [True, False])
def test_nothing_is_lost_of_a_model_that_is_closed_over(transform, placed):
    """Flax begins to write to the model, and finds out then that it must not."""
    mesh, tasks = pipeline(2)
    placement = place(tasks, [("layers", 0)], [("layers", 1)]) if placed else None
    with mesh:
        model, x = born(make(models.MLP, layers=2, width=8), placement), jnp.ones((2, 8))
        forward = mm.jit(lambda model, x: model(x).sum())
        before = forward(model, x)
        with pytest.raises(TraceContextError, match="Put mm.jit around all of it"):
            transform(lambda x: mm.jit(lambda model, x: model(x).sum())(model, x), x)
        assert forward(model, x) == before
