"""Tasks named by scope, by registry, by placement and by all three; on meshes of equal and unequal shape."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests import models
from tests.models import make
from tests.mpmd.parity import MOMENTUM, assert_parity, assert_same, homes, pipeline, place
from tests.slow import all_but, grid


class ScopedMLP(models.MLP):
    """An MLP whose halves run in name scopes, as a model with named parts does."""

    def __call__(self, x):
        with jax.named_scope("encoder"):
            for layer in self.layers[:2]:
                x = jnp.tanh(layer(x))
        with jax.named_scope("decoder"):
            return self.layers[3](jnp.tanh(self.layers[2](x)))


class TaskMLP(nnx.Module):
    """An MLP whose layers are wrapped in tasks: a class, a class, an instance and a function."""

    def __init__(self, tasks, *, rngs: nnx.Rngs):
        self.last_task = tasks[3]
        self.first = mm.task(nnx.Linear, task=tasks[0])(8, 16, rngs=rngs)
        self.second = mm.task(nnx.Linear, task=tasks[1])(16, 16, rngs=rngs)
        self.third = mm.task(nnx.Linear(16, 16, rngs=rngs), task=tasks[2])
        self.fourth = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.first(x))
        x = jnp.tanh(self.second(x))
        x = jnp.tanh(self.third(x))
        return mm.task(lambda layer, x: layer(x), task=self.last_task)(self.fourth, x)


def check(make_model, mesh, placement=None, microbatch=2, **options) -> mm.Program:
    """A model that maps vectors to vectors, trained with momentum, is equal to the one on one device."""
    return assert_parity(
        make_model,
        models.squared_error,
        models.vectors(),
        placement,
        mesh=mesh,
        microbatch=microbatch,
        optimizer=MOMENTUM,
        **options,
    )


@pytest.mark.parametrize("microbatch", all_but([2], [None, 2]))
def test_tasks_by_scope(microbatch):
    """No placement at all: wrapped modules, instances and functions say where they compute."""
    mesh, tasks = pipeline(4)
    check(make(TaskMLP, tuple(tasks)), mesh, microbatch=microbatch)


def test_scopes_bring_state_home():
    """After a first step, state that started on the default device lives where its task computes."""
    mesh, tasks = pipeline(4)
    model = make(TaskMLP, tuple(tasks))()
    with mesh:

        @mm.jit
        def step(model, batch):
            loss, grads = nnx.value_and_grad(models.squared_error)(model, batch)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
            return loss

        step(model, models.vectors())
    for i, layer in enumerate([model.first, model.second, model.third, model.fourth]):
        expected = {mesh.devices.flat[i]}
        assert all(devices == expected for devices in homes(layer).values()), (i, homes(layer))


@pytest.mark.slow
def test_tasks_by_registry():
    """Name scopes that are in the model already become tasks by registering them, by name and by pattern."""
    mesh, tasks = pipeline(2)
    mm.register_task("encoder", task=tasks[0])
    mm.register_task(re.compile("dec.*"), callback=lambda name, backprop: tasks[1])
    check(make(ScopedMLP), mesh)


@pytest.mark.slow
def test_a_callback_may_send_the_backward_elsewhere():
    """Forward on one mesh, backward on another: slower, and the same answer."""
    mesh, tasks = pipeline(4)
    mm.register_task("encoder", callback=lambda name, backprop: tasks[1 if backprop else 0])
    mm.register_task("decoder", callback=lambda name, backprop: tasks[3 if backprop else 2])
    check(make(ScopedMLP), mesh)


@pytest.mark.slow
def test_tasks_registered_on_a_multimesh():
    mesh, tasks = pipeline(2)
    mesh.register_task("encoder", task=tasks[0])
    mesh.register_task("decoder", task=tasks[1])
    check(make(ScopedMLP), mesh)


@pytest.mark.slow
def test_tasks_by_everything_at_once():
    """A registered scope, a task wrapped in a function and a placement, in one model."""
    mesh, tasks = pipeline(3)
    mm.register_task("encoder", task=tasks[0])

    class Mixed(models.MLP):
        def __call__(self, x):
            with jax.named_scope("encoder"):
                x = jnp.tanh(self.layers[0](x))
            x = mm.task(lambda layer, x: jnp.tanh(layer(x)), task=tasks[1])(self.layers[1], x)
            return self.layers[3](jnp.tanh(self.layers[2](x)))

    placement = place(tasks, [("layers", 0)], [("layers", 1)], [("layers", range(2, 4))])
    check(make(Mixed), mesh, placement)


def test_a_scope_overrides_the_home_of_state():
    """A task scope computes where it says, with state that lives elsewhere and that goes back home."""
    mesh, tasks = pipeline(2)

    class Away(models.MLP):
        def __call__(self, x):
            x = mm.task(lambda layer, x: jnp.tanh(layer(x)), task=tasks[1])(self.layers[0], x)
            for layer in self.layers[1:-1]:
                x = jnp.tanh(layer(x))
            return self.layers[-1](x)

    placement = place(tasks, [("layers", range(0, 2))], [("layers", range(2, 4))])
    check(make(Away), mesh, placement)


def test_what_a_scope_elsewhere_renews_goes_home_after_the_loop():
    """Statistics of a BatchNorm: once to where they are computed, and not with every microbatch."""
    mesh, tasks = pipeline(2)

    class Away(models.MLP):
        def __init__(self, *, rngs: nnx.Rngs):
            super().__init__(rngs=rngs)
            self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)

        def __call__(self, x):
            x = mm.task(lambda norm, x: norm(x), task=tasks[1])(self.norm, self.layers[0](x))
            for layer in self.layers[1:-1]:
                x = jnp.tanh(layer(x))
            return self.layers[-1](x)

    placement = place(tasks, [("layers", 0), "norm"], [("layers", range(1, 4))])
    program = check(make(Away), mesh, placement, whole_batch=False)
    statistics = [t for t in program.transfers if t.shape == (16,)]
    assert all(t.microbatch is None for t in statistics)
    # Mean and variance, with scale and bias one way and their gradients the other.
    assert Counter((t.source, t.target) for t in statistics) == {
        ("stage0", "stage1"): 4,
        ("stage1", "stage0"): 4,
    }


@pytest.mark.slow
def test_one_submodule_in_two_task_scopes():
    """The same weights used inside two tasks: one home, a copy for the other, and one gradient, summed."""
    mesh, tasks = pipeline(3)

    class Twice(models.SharedNet):
        def __call__(self, x):
            layers = (self.first, self.shared, self.middle, self.shared_again)
            for layer, task in zip(layers, (tasks[0], tasks[0], tasks[1], tasks[2]), strict=True):
                x = mm.task(lambda layer, x: jnp.tanh(layer(x)), task=task)(layer, x)
            return mm.task(lambda layer, x: layer(x), task=tasks[2])(self.last, x)

    placement = place(tasks, ["first", "shared"], ["middle"], ["last"])
    check(make(Twice), mesh, placement)


@pytest.mark.slow
@pytest.mark.parametrize(
    "around",
    [nnx.remat, nnx.jit, jax.checkpoint, jax.jit],
    ids=["nnx.remat", "nnx.jit", "jax.checkpoint", "jax.jit"],
)
def test_transforms_around_several_stages(around):
    """remat or jit around a function that holds more than one stage is opened, and its meaning kept."""
    mesh, tasks = pipeline(4)

    class Around(models.MLP):
        def __call__(self, x):
            if around in (nnx.remat, nnx.jit):
                run = around(lambda layers, x: layers[1](jnp.tanh(layers[0](x))))
                x = jnp.tanh(run((self.layers[0], self.layers[1]), x))
                return run((self.layers[2], self.layers[3]), x)
            run = around(lambda a, b, x: jnp.tanh(x @ a) @ b)
            kernels = [layer.kernel[...] for layer in self.layers]
            return run(*kernels[2:], jnp.tanh(run(*kernels[:2], x)))

    placement = place(tasks, *[[("layers", i)] for i in range(4)])
    check(make(Around), mesh, placement, microbatch=4)


@pytest.mark.slow
def test_custom_vjp_around_several_stages():
    """A custom_vjp function whose forward and whose rule both use two stages."""
    mesh, tasks = pipeline(2)

    @jax.custom_vjp
    def two_layers(a, b, x):
        return jnp.tanh(x @ a) @ b

    def forward(a, b, x):
        hidden = jnp.tanh(x @ a)
        return hidden @ b, (a, b, x, hidden)

    def backward(residuals, g):
        a, b, x, hidden = residuals
        g_hidden = (g @ b.T) * (1 - hidden**2)
        return x.T @ g_hidden, hidden.T @ g, g_hidden @ a.T

    two_layers.defvjp(forward, backward)

    class Custom(models.MLP):
        def __call__(self, x):
            kernels = [layer.kernel[...] for layer in self.layers]
            return two_layers(kernels[2], kernels[3], jnp.tanh(two_layers(kernels[0], kernels[1], x)))

    placement = place(tasks, [("layers", 0), ("layers", 2)], [("layers", 1), ("layers", 3)])
    check(make(Custom), mesh, placement, microbatch=4)


# Loops and branches that hold more than one task


def stacked(x, a, b):
    """Two layers of two stages, six times over: a scan whose body holds two tasks."""
    return jax.lax.scan(lambda x, _: (jnp.tanh(jnp.tanh(x @ a) @ b), None), x, length=3)[0]


class Recurrence(models.MLP):
    def __call__(self, x):
        kernels = [layer.kernel[...] for layer in self.layers]
        return stacked(x @ kernels[0], kernels[1], kernels[2]) @ kernels[3]


def test_a_scan_over_two_tasks_is_opened():
    """Its trip count is known, so the loop becomes the program."""
    mesh, tasks = pipeline(2)
    placement = place(tasks, [("layers", range(0, 2))], [("layers", range(2, 4))])
    check(make(Recurrence), mesh, placement, microbatch=4)


def branch(both, x):
    return jax.lax.cond(jnp.sum(x) > 0, both, lambda x: 2.0 * x, x)


def loop(both, x):
    return jax.lax.while_loop(lambda x: jnp.sum(x**2) > 1.0, lambda x: 0.1 * both(x), x)


def kernels_on_two_meshes(mesh):
    kernels = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    return [jax.device_put(k, NamedSharding(mesh.slice(stage=i), P())) for i, k in enumerate(kernels)]


def in_two_tasks(control, tasks):
    def f(a, b, x):
        first = mm.task(lambda x: jnp.tanh(x @ a), task=tasks[0])
        second = mm.task(lambda x: jnp.tanh(x @ b), task=tasks[1])
        return control(lambda x: second(first(x)), x)

    return f


def with_state_of_two_meshes(control, tasks):
    return lambda a, b, x: control(lambda x: jnp.tanh(jnp.tanh(x @ a) @ b), x)


@pytest.mark.parametrize("make_function", [in_two_tasks, with_state_of_two_meshes])
def test_a_while_over_two_tasks(make_function):
    """Each task computes its own part of an iteration."""
    mesh, tasks = pipeline(2)
    x = np.ones((2, 8), np.float32)
    with mesh:
        kernels = kernels_on_two_meshes(mesh)
        f = mm.jit(make_function(loop, tasks))
        a, b = map(np.asarray, kernels)
        expected = x
        while np.sum(expected**2) > 1.0:
            expected = 0.1 * np.tanh(np.tanh(expected @ a) @ b)
        np.testing.assert_allclose(f(*kernels, x), expected, rtol=1e-5)
        program = f.program(*kernels, x)
    assert {frag.task for frag in program.fragments} == {"stage0", "stage1"}
    assert max(t.nbytes for t in program.transfers) == x.nbytes


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("make_function", [in_two_tasks, with_state_of_two_meshes])
def test_a_cond_over_two_tasks(make_function, sign):
    """Each task computes its own part of the branch."""
    mesh, tasks = pipeline(2)
    x = sign * np.ones((2, 8), np.float32)
    with mesh:
        kernels = kernels_on_two_meshes(mesh)
        f = mm.jit(make_function(branch, tasks))
        a, b = map(np.asarray, kernels)
        expected = np.tanh(np.tanh(x @ a) @ b) if sign > 0 else 2 * x
        np.testing.assert_allclose(f(*kernels, x), expected, rtol=1e-5)
        program = f.program(*kernels, x)
        assert {frag.task for frag in program.fragments} == {"stage0", "stage1"}
        assert max(t.nbytes for t in program.transfers) == x.nbytes


# Meshes


@pytest.mark.parametrize("microbatch", all_but([2], [None, 2]))
def test_meshes_of_different_size(microbatch):
    """Four devices, then two, then two: a larger stage beside smaller ones, each with its own shardings."""
    axes = ("data", "model")
    tasks = [
        mm.Task("wide", mesh=mm.TaskMesh(devices=range(0, 4), axis_sizes=(2, 2), axis_names=axes)),
        mm.Task("middle", mesh=mm.TaskMesh(devices=range(4, 6), axis_sizes=(1, 2), axis_names=axes)),
        mm.Task("last", mesh=mm.TaskMesh(devices=range(6, 8), axis_sizes=(2, 1), axis_names=axes)),
    ]
    placement = mm.TaskSharding(
        {
            mm.path("layers", range(0, 2), "kernel"): (tasks[0], P(None, "model")),
            mm.path("layers", range(0, 2), "bias"): (tasks[0], P("model")),
            mm.path("layers", 2, "kernel"): (tasks[1], P("model", None)),
            mm.path("layers", 2): (tasks[1], P()),
            mm.path("layers", 3): (tasks[2], P()),
        }
    )
    assert_parity(
        make(models.MLP), models.squared_error, models.vectors(), placement, microbatch=microbatch, steps=2
    )


@pytest.mark.slow
def test_meshes_of_different_size_by_jax_meshes():
    """A task's mesh may be a jax.sharding.Mesh; its axes may have names of their own."""
    devices = np.array(jax.devices())
    tasks = [
        mm.Task("first", mesh=jax.sharding.Mesh(devices[:4].reshape(4), ("a",))),
        mm.Task("second", mesh=jax.sharding.Mesh(devices[4:6].reshape(2), ("b",))),
        mm.Task("third", mesh=jax.sharding.Mesh(devices[6:].reshape(2), ("a",))),
    ]
    placement = mm.TaskSharding(
        {
            mm.path("embed"): (tasks[0], P("a")),
            mm.path("blocks", 0, "up", "kernel"): (tasks[0], P(None, "a")),
            mm.path("blocks", 0): (tasks[0], P()),
            mm.path("blocks", 1, "down", "kernel"): (tasks[1], P("b")),
            mm.path("blocks", 1): (tasks[1], P()),
            mm.path(...): (tasks[2], P()),
        }
    )
    assert_parity(
        make(models.Transformer, layers=2),
        models.cross_entropy,
        models.tokens(),
        placement,
        microbatch=2,
        steps=2,
    )


TENSOR_PARALLEL = {  # what is split of each block, as Megatron does it
    ("attention", "qkv", "kernel"): P(None, "model"),
    ("attention", "out", "kernel"): P("model", None),
    ("up", "kernel"): P(None, "model"),
    ("up", "bias"): P("model"),
    ("down", "kernel"): P("model", None),
}


def tensor_parallel(tasks):
    rules = {mm.path("embed"): (tasks[0], P("model", None)), mm.path("head"): (tasks[-1], P(None, "model"))}
    for i, task in enumerate(tasks):
        for keys, spec in TENSOR_PARALLEL.items():
            rules[mm.path("blocks", i, *keys)] = (task, spec)
        rules[mm.path("blocks", i)] = (task, P())
    rules[mm.path("norm")] = (tasks[-1], P())
    return mm.TaskSharding(rules)


@pytest.mark.slow
def test_tensor_parallel_stages():
    mesh, tasks = pipeline(2, 2)
    assert_parity(
        make(models.Transformer, layers=2),
        models.cross_entropy,
        models.tokens(),
        tensor_parallel(tasks),
        mesh=mesh,
        microbatch=2,
    )


@pytest.mark.slow
def test_data_and_tensor_parallel_stages():
    """2 stages x 2 data x 2 model: eight devices; activations are split over `data` by a constraint in the
    loss.
    """
    mesh, tasks = pipeline(2, 2, 2, axes=("data", "model"))

    def loss(model, batch):
        batch = mm.task(lambda batch: mm.with_sharding_constraint(batch, P("data")), task=tasks[0])(batch)
        return models.cross_entropy(model, batch)

    assert_parity(
        make(models.Transformer, layers=2, width=8, vocab=16),
        loss,
        models.tokens(length=4, vocab=16),
        tensor_parallel(tasks),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        steps=1,
    )


@pytest.mark.slow
def test_a_sharded_batch():
    """A batch that is already spread over the first stage's data axis."""
    mesh, tasks = pipeline(2, 4, axes=("data",))
    case = dict(microbatch=4, mesh=mesh, steps=1)
    placement = place(tasks, [("layers", range(0, 2))], [("layers", range(2, 4))])
    batch = models.vectors()
    on_mesh = jax.device_put(batch, NamedSharding(mesh.slice(stage=0), P("data")))
    assert_parity(make(models.MLP), models.squared_error, batch, placement, **case)
    with mesh:
        model = mm.jit(make(models.MLP), out_shardings=placement)()
        grad_fn = nnx.value_and_grad(models.squared_error)
        step = mm.jit(mm.microbatch(grad_fn, dim=0, size=4, argnum=1, reduce="mean"))
        got = step(model, on_mesh)
    assert_same(got, nnx.jit(grad_fn)(make(models.MLP)(), batch))


@pytest.mark.parametrize("first, microbatch", grid(["batch", "model"], [None, 4], step=2))
def test_arguments_on_meshes_with_explicit_axes(first, microbatch):
    """As `jax.make_mesh` makes them: they count as Auto, whichever argument comes first."""
    meshes = [jax.make_mesh((4,), ("data",), devices=jax.devices()[4 * n : 4 * n + 4]) for n in range(2)]
    assert meshes[0].axis_types == (AxisType.Explicit,)
    model, batch = make(models.MLP)(), models.vectors()
    for layer, n in zip(model.layers, (0, 0, 1, 1)):
        nnx.update(layer, jax.device_put(nnx.state(layer), NamedSharding(meshes[n], P())))
    grad_fn = nnx.value_and_grad(models.squared_error)
    step = mm.microbatch(grad_fn, 0, microbatch, argnum=1, reduce="mean") if microbatch else grad_fn
    there = jax.device_put(batch, NamedSharding(meshes[0], P("data")))
    if first == "model":
        got = mm.jit(step)(model, there)
    else:
        got = mm.jit(lambda batch, model: step(model, batch))(there, model)
    assert_same(got, nnx.jit(grad_fn)(make(models.MLP)(), batch))


@pytest.mark.parametrize("own", all_but(["tasks"], ["tasks", "shard_map"]))
def test_a_shard_map_over_the_devices_of_a_task_by_other_axes(own):
    """Of the two meshes, one has the axis of the MultiMesh that the other lacks."""
    mesh, slices = pipeline(2, 2, 2, axes=("data", "model"))
    plain = [Mesh(mesh.mesh.devices[n], ("data", "model")) for n in range(2)]
    tasks = [mm.Task(f"own{n}", mesh=plain[n]) for n in range(2)] if own == "tasks" else slices
    over = plain if own == "shard_map" else [mesh.slice(stage=n) for n in range(2)]

    class Layer(nnx.Module):
        def __init__(self, n):
            self.a, self.b = (nnx.Linear(*io, rngs=nnx.Rngs(n)) for io in ((8, 16), (16, 8)))

        def __call__(self, x, over):
            inside = lambda x, a, b: jax.lax.psum(jnp.tanh(x @ a) @ b, "model")
            specs = (P("data"), P(None, "model"), P("model"))
            mapped = jax.shard_map(inside, mesh=over, in_specs=specs, out_specs=P("data"))
            return mapped(x, self.a.kernel[...], self.b.kernel[...])

    def step(layers, x, over):
        grad_fn = nnx.value_and_grad(lambda ls, x: (ls[1](ls[0](x, over[0]), over[1]) ** 2).mean())
        return mm.microbatch(grad_fn, 0, 4, argnum=1, reduce="mean")(layers, x)

    make_layers = lambda: nnx.List([Layer(0), Layer(1)])
    x = models.vectors()["x"]
    with mesh:
        split = mm.jit(make_layers, out_shardings=place(tasks, [0], [1]))()
        got = mm.jit(lambda layers, x: step(layers, x, over))(split, x)
    assert_same(got, nnx.jit(lambda layers, x: step(layers, x, [plain[0]] * 2))(make_layers(), x))


@pytest.mark.slow
def test_logical_axes_in_metadata():
    """A rule without a spec takes it from the Variable's own logical axis names and the task's mapping."""
    mesh, _ = pipeline(2, 2)
    tasks = [
        mm.Task(f"stage{i}", mesh_slice={"stage": i}, logical_axes=[("hidden", "model"), ("out", None)])
        for i in range(2)
    ]

    def kernels():
        init = nnx.with_metadata(nnx.initializers.lecun_normal(), out_sharding=("in", "hidden"))
        with nnx.use_eager_sharding(False):  # on one device there is no mesh to shard over
            return models.MLP(rngs=nnx.Rngs(0), kernel_init=init)

    placement = place(tasks, [("layers", range(0, 2))], [("layers", range(2, 4))], spec=None)
    with mesh:
        model = mm.jit(kernels, out_shardings=placement)()
    for i, layer in enumerate(model.layers):
        home = NamedSharding(mesh.slice(stage=i // 2), P(None, "model"))
        assert layer.kernel[...].sharding.is_equivalent_to(home, 2)
    assert_parity(
        kernels,
        models.squared_error,
        models.vectors(),
        placement,
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        steps=1,
    )


def test_a_function_of_one_task_runs_on_the_mesh_of_that_task():
    """Wherever its arguments are: unplaced, on another device, or there already."""
    double = mm.task(lambda x: x * 2, "double", mesh=mm.TaskMesh(devices=[2, 3]))
    f = mm.jit(double)
    there = f(np.ones(4))
    for x in (np.ones(4), jax.device_put(np.ones(4), jax.devices()[5]), there / 2):
        y = f(x)
        assert {d.id for d in y.devices()} == {2, 3}
        np.testing.assert_array_equal(y, np.full(4, 2.0))


def test_a_result_can_be_asked_for_on_the_whole_mesh_of_a_function_of_one_task():
    mesh, tasks = pipeline(2, 4)
    whole = NamedSharding(mesh.mesh, P())
    one = mm.task(lambda w: w + 1, task=tasks[1])
    f = mm.jit(
        lambda w, n: (one(w), n + 1), in_shardings=(None, whole), out_shardings=(None, whole), mesh=mesh
    )
    w, n = f(jnp.ones(4), jnp.zeros(()))
    assert n.sharding == whole and int(n) == 1
    assert {d.id for d in w.devices()} == {4, 5, 6, 7}
