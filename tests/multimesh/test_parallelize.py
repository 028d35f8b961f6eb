"""`multimesh.jax.parallelize`: shardings derived from logical constraints, and functions that use them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx
from multimesh_compat.jax import (
    MultiMesh,
    Task,
    autoshard,
    enable_fast_path,
    ignore_transforms,
    microbatch,
    parallelize,
    register_task,
    task,
    with_sharding_constraint,
)
from tests.slow import few


def devices(x):
    return sorted(d.id for d in x.sharding.device_set)


def shards(x):
    """For each device, the (start, stop) of its part along each dimension."""
    return {
        s.device.id: tuple(slice(*i.indices(n)) for i, n in zip(s.index, x.shape))
        for s in x.addressable_shards
    }


def init():
    return [jax.random.normal(jax.random.key(n), (8, 8)) for n in range(2)]


def batch():
    return np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)


class TestDocumentedExample:
    """A product of two vectors, on a mesh of 2x2 devices."""

    @staticmethod
    def f(x, y):
        x = with_sharding_constraint(x, P("x"))
        y = with_sharding_constraint(y, P("x"))
        return with_sharding_constraint(x * y, P("batch", "model"))

    @staticmethod
    def vector():
        return jnp.arange(16)

    def test_outside_tasks_names_that_no_axis_has_are_replicated(self):
        """Functions are given by position; the last constraint names more axes than there are dimensions."""
        sharded, init_x, init_y = parallelize(self.f, self.vector, self.vector)
        x, y = init_x(), init_y()
        assert x.sharding.is_fully_replicated and devices(x) == list(range(8))
        np.testing.assert_array_equal(sharded(x, y), np.arange(16) ** 2)

    def test_in_a_task_they_are_axes_of_its_mesh(self):
        grid = np.array(jax.devices()[:4]).reshape(2, 2)
        f = task(self.f, devices=grid, device_axes=("x", "y"))
        sharded, init_x, init_y = parallelize(f, init_params=self.vector, get_input_batch=self.vector)
        x, y = init_x(), init_y()
        for operand in (x, y):
            assert shards(operand) == {d: (slice(8 * (d // 2), 8 * (d // 2) + 8, 1),) for d in range(4)}
        np.testing.assert_array_equal(sharded(x, y), np.arange(16) ** 2)

    def test_one_name_for_a_mesh_of_two_axes_is_an_error(self):
        """The documented call is this one, against the documented rule."""
        grid = np.array(jax.devices()[:4]).reshape(2, 2)
        with pytest.raises(ValueError, match="device_axes"):
            task(self.f, devices=grid, device_axes=("x",))


def two_tasks():
    """A loss through two tasks: a row-sharded weight on devices 0-3, a column-sharded one on 4-7."""

    def first(w, x):
        return jnp.tanh(x @ with_sharding_constraint(w, P("model", None)))

    def second(w, x):
        return x @ with_sharding_constraint(w, P(None, "model"))

    first = task(first, devices=jax.devices()[:4], device_axes=("model",))
    second = task(second, devices=jax.devices()[4:], device_axes=("model",))
    return lambda params, x: (second(params[1], first(params[0], x)) ** 2).mean()


class TestTwoTasks:
    def test_parameters_and_batch_go_where_they_are_used(self):
        loss = two_tasks()
        sharded, sharded_init, get_batch = parallelize(loss, init_params=init, get_input_batch=batch)
        (first, second), x = sharded_init(), get_batch()
        assert shards(first) == {d: (slice(2 * d, 2 * d + 2, 1), slice(0, 8, 1)) for d in range(4)}
        assert shards(second) == {d + 4: (slice(0, 8, 1), slice(2 * d, 2 * d + 2, 1)) for d in range(4)}
        assert devices(x) == [0, 1, 2, 3]
        np.testing.assert_array_equal(first, init()[0])
        np.testing.assert_allclose(sharded([first, second], x), loss(init(), batch()), rtol=1e-6)

    def test_gradients_are_at_home(self):
        sharded, sharded_init, get_batch = parallelize(jax.value_and_grad(two_tasks()), init, batch)
        params = sharded_init()
        value, grads = sharded(params, get_batch())
        expected, expected_grads = jax.value_and_grad(two_tasks())(init(), batch())
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        for got, want, param in zip(grads, expected_grads, params):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
            assert devices(got) == devices(param)

    def test_a_batch_with_another_sharding_is_moved(self):
        everywhere = NamedSharding(Mesh(jax.devices(), ("all",)), P("all"))
        sharded, sharded_init, _ = parallelize(two_tasks(), init, batch)
        expected = two_tasks()(init(), batch())
        for x in (jax.device_put(batch(), everywhere), batch(), jnp.asarray(batch())):
            np.testing.assert_allclose(sharded(sharded_init(), x), expected, rtol=1e-6)
        np.testing.assert_allclose(sharded(init(), batch()), expected, rtol=1e-6)  # parameters as well

    def test_an_initial_batch_instead_of_a_function(self):
        everywhere = NamedSharding(Mesh(jax.devices(), ("all",)), P("all"))
        x = jax.device_put(batch(), everywhere)
        sharded, sharded_init = parallelize(two_tasks(), init_params=init, initial_batch=x)
        assert [devices(p) for p in sharded_init()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        np.testing.assert_allclose(sharded(sharded_init(), x), two_tasks()(init(), batch()), rtol=1e-6)
        sharded, sharded_init = parallelize(two_tasks(), init_params=init, initial_batch=batch())
        np.testing.assert_allclose(sharded(sharded_init(), batch()), two_tasks()(init(), batch()), rtol=1e-6)

    @pytest.mark.parametrize("where", [range(6, 8), range(2, 6)])
    def test_an_initial_batch_on_devices_where_nothing_is_computed(self, where):
        there = NamedSharding(Mesh([jax.devices()[n] for n in where], ("rows",)), P("rows"))
        x = jax.device_put(batch(), there)
        sharded, sharded_init = parallelize(two_tasks(), init_params=init, initial_batch=x)
        assert [devices(p) for p in sharded_init()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        np.testing.assert_allclose(sharded(sharded_init(), x), two_tasks()(init(), batch()), rtol=1e-6)

    def test_a_train_state_that_is_made_with_its_optimizer(self):
        """Each trace of `init_params` makes another optimizer, and JAX takes none for equal."""

        def make():
            return TrainState.create(apply_fn=None, params=init(), tx=optax.sgd(0.1))

        def step(state, x):
            value, grads = jax.value_and_grad(two_tasks())(state.params, x)
            return state.apply_gradients(grads=grads), value

        sharded, sharded_init, get_batch = parallelize(step, make, batch)
        state, whole = sharded_init(), make()
        for _ in range(3):
            state, value = sharded(state, get_batch())
            whole, expected = jax.jit(step)(whole, batch())
            np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert [devices(p) for p in state.params] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_it_runs_as_two_programs(self):
        sharded, sharded_init, get_batch = parallelize(two_tasks(), init, batch)
        program = sharded.program(sharded_init(), get_batch())
        assert [(f.task, sorted(d.id for d in f.mesh.devices.flat)) for f in program.fragments] == [
            ("first", [0, 1, 2, 3]),
            ("second", [4, 5, 6, 7]),
        ]


def test_state_of_several_tasks_is_at_home_with_the_first():
    def embed(table, ids):
        return with_sharding_constraint(table, P("model"))[ids]

    def attend(table, x):
        return x @ with_sharding_constraint(table, P(None, "model")).T

    embed = task(embed, devices=jax.devices()[:4], device_axes=("model",))
    attend = task(attend, devices=jax.devices()[4:], device_axes=("model",))

    def loss(table, ids):
        return (attend(table, embed(table, ids)) ** 2).sum()

    def table():
        return jax.random.normal(jax.random.key(0), (8, 4))

    sharded, sharded_init, ids = parallelize(jax.value_and_grad(loss), table, lambda: jnp.array([1, 5, 5]))
    home = sharded_init()
    assert devices(home) == devices(ids()) == [0, 1, 2, 3] and home.sharding.spec == P("model")
    value, grads = sharded(home, ids())
    expected, expected_grads = jax.value_and_grad(loss)(table(), ids())
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grads, expected_grads, rtol=1e-5)
    assert devices(grads) == [0, 1, 2, 3]


def layers_by_name():
    """The loss of `two_tasks`, of layers whose names are registered, on a MultiMesh of 2x2x2 devices."""
    mesh = MultiMesh(axis_sizes=(2, 2, 2), axis_names=("stage", "batch", "model"))
    register_task(r"layer\d+", callback=lambda name, backprop: Task(mesh_slice={"stage": int(name[5:])}))

    def loss(params, x):
        for n, (w, spec) in enumerate(zip(params, (P("model", None), P(None, "model")))):
            with jax.named_scope(f"layer{n}"):
                x = jnp.tanh(with_sharding_constraint(x, P("batch")) @ with_sharding_constraint(w, spec))
        return (x**2).mean()

    return mesh, loss


def expected_loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


class TestMultiMesh:
    def test_slices_are_the_submeshes_of_registered_layers(self):
        mesh, loss = layers_by_name()
        with mesh:
            sharded, sharded_init, get_batch = parallelize(loss, init, batch)
        params, x = sharded_init(), get_batch()
        halves = (slice(0, 4, 1), slice(4, 8, 1))
        assert shards(params[0]) == {d: (halves[d % 2], slice(0, 8, 1)) for d in (0, 1, 2, 3)}
        assert shards(params[1]) == {d: (slice(0, 8, 1), halves[d % 2]) for d in (4, 5, 6, 7)}
        assert devices(x) == [0, 1, 2, 3] and x.sharding.spec[0] == "batch"
        np.testing.assert_allclose(sharded(params, x), expected_loss(init(), batch()), rtol=1e-6)

    def test_a_loop_over_microbatches_inside(self):
        mesh, loss = layers_by_name()

        def step(params, x):
            value, grads = microbatch(jax.value_and_grad(loss), 0, 4, argnum=1, schedule="1f1b")(params, x)
            return [p - 0.1 * g / 4 for p, g in zip(params, grads)], value / 4

        with mesh:
            sharded, sharded_init, get_batch = parallelize(step, init, batch)
        params, x = sharded_init(), get_batch()
        assert x.sharding.spec[0] == "batch"
        assert [p.sharding.spec for p in params] == [P("model"), P(None, "model")]
        value, grads = jax.value_and_grad(expected_loss)(init(), batch())
        updated, got = sharded(params, x)
        np.testing.assert_allclose(got, value, rtol=1e-5)
        for new, p, g, old in zip(updated, init(), grads, params):
            np.testing.assert_allclose(new, p - 0.1 * g, rtol=1e-5, atol=1e-6)
            assert new.sharding == old.sharding  # so that the next step moves nothing

    def test_constraints_outside_tasks_name_axes_of_the_multimesh(self):
        with MultiMesh(axis_sizes=(4, 2), axis_names=("batch", "model")):
            sharded, sharded_init, get_batch = parallelize(
                lambda w, x: (
                    with_sharding_constraint(x, P("batch")) @ with_sharding_constraint(w, P("embed"))
                ),
                lambda: jnp.ones((8, 4)),
                batch,
            )
        assert sharded_init().sharding.is_fully_replicated
        x = get_batch()
        assert devices(x) == list(range(8)) and x.sharding.spec[0] == "batch"
        y = sharded(sharded_init(), x)
        np.testing.assert_allclose(y, batch() @ np.ones((8, 4)), rtol=1e-6)
        assert y.sharding.spec[0] == "batch"


class TestArguments:
    def test_a_function_without_parameters(self):
        f = task(
            lambda x: with_sharding_constraint(x, P("x")) + 1,
            "f",
            devices=jax.devices()[:2],
            device_axes=("x",),
        )
        sharded, no_init, get_batch = parallelize(f, get_input_batch=batch)
        assert no_init is None and get_batch().sharding.spec[0] == "x"
        np.testing.assert_allclose(sharded(get_batch()), batch() + 1)

    def test_a_function_of_parameters_alone(self):
        sharded, sharded_init = parallelize(lambda p: p["a"] * p["b"], lambda: {"a": jnp.ones(4), "b": 3.0})
        np.testing.assert_allclose(sharded(sharded_init()), np.full(4, 3.0))

    def test_pytrees_and_dtypes(self):
        def f(params, data):
            return {"y": params["w"].astype(jnp.float32) @ data["x"], "n": data["ids"] + params["k"][0]}

        def params():
            return {"w": jnp.ones((2, 4), jnp.bfloat16), "k": (jnp.int32(2),)}

        def data():
            return {"x": jnp.arange(4.0), "ids": jnp.arange(3, dtype=jnp.uint8)}

        sharded, sharded_init, get_batch = parallelize(task(f, devices=jax.devices()[2:4]), params, data)
        assert jax.tree.map(jnp.result_type, sharded_init()) == jax.tree.map(jnp.result_type, params())
        assert devices(get_batch()["x"]) == [2, 3]
        got, want = sharded(sharded_init(), get_batch()), f(params(), data())
        assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, want)
        jax.tree.map(np.testing.assert_array_equal, got, want)

    def test_devices_are_those_of_the_program(self):
        """Numbers count them, and what is in no task runs on all of them."""
        last = jax.devices()[4:]
        f = task(lambda x: x * 2, "f", devices=[1, 2])
        _, _, get_batch = parallelize(f, get_input_batch=batch, devices=last)
        assert devices(get_batch()) == [5, 6]
        sharded, _, get_batch = parallelize(
            lambda x: x * 2, get_input_batch=batch, devices=np.array(last).reshape(2, 2)
        )
        assert devices(get_batch()) == devices(sharded(get_batch())) == [4, 5, 6, 7]

    def test_batches_are_made_anew(self):
        made = iter(range(10))
        _, _, get_batch = parallelize(lambda x: x, get_input_batch=lambda: np.full(4, next(made)))
        assert [int(get_batch()[0]) for _ in range(3)] == [0, 1, 2]

    def test_a_loader_is_called_outside_of_any_trace(self):
        def load():
            return np.asarray(jax.random.normal(jax.random.key(0), (16, 8)))

        f = task(lambda x: jnp.tanh(x), "f", devices=[2, 3])
        sharded, _, get_batch = parallelize(f, get_input_batch=load)
        assert devices(get_batch()) == [2, 3]
        np.testing.assert_allclose(sharded(get_batch()), np.tanh(load()), rtol=1e-6)

    @pytest.mark.parametrize("kind", ["State", "Variables"])
    def test_parameters_in_variables(self, kind):
        def make():
            leaves = {f"w{n}": nnx.Param(w) for n, w in enumerate(init())}
            return nnx.State(leaves) if kind == "State" else leaves

        first, second = (task(lambda w, x: jnp.tanh(x @ w[...]), f"t{n}", devices=[n]) for n in range(2))

        def f(w, x):
            return second(w["w1"], first(w["w0"], x))

        sharded, sharded_init, get_batch = parallelize(f, make, batch)
        assert [devices(sharded_init()[f"w{n}"].get_value()) for n in range(2)] == [[0], [1]]
        np.testing.assert_allclose(sharded(sharded_init(), get_batch()), f(make(), batch()), rtol=1e-5)

    def test_scalars_of_python_stay_weak(self):
        def make():
            return {"w": jnp.ones(3, jnp.bfloat16), "rate": 0.5, "steps": 3}

        def scale(w, x):
            return x * w

        def step(first, second, p, x):
            update = second(p["rate"], first(p["w"], x))
            return p | {"w": p["w"] - update.sum().astype(jnp.bfloat16) * p["rate"]}

        tasks = [task(scale, f"t{n}", devices=[n]) for n in range(2)]
        whole = jax.jit(functools.partial(step, scale, scale))
        sharded, sharded_init, get_batch = parallelize(
            functools.partial(step, *tasks), make, lambda: np.ones(3, np.float32)
        )
        params, expected = sharded_init(), jax.jit(make)()
        for _ in range(2):
            params, expected = sharded(params, get_batch()), whole(expected, np.ones(3, np.float32))
            types = lambda tree: jax.tree.map(lambda x: (x.dtype, x.weak_type), tree)
            assert types(params) == types(expected)

    def test_errors(self):
        with pytest.raises(TypeError, match="fun is a function, not 3"):
            parallelize(3)
        with pytest.raises(TypeError, match="init_params is a function, not \\[1"):
            parallelize(lambda x: x, [1])
        with pytest.raises(ValueError, match="get_input_batch= or initial_batch=, not both"):
            parallelize(lambda x: x, get_input_batch=batch, initial_batch=batch())
        f = task(
            lambda x: with_sharding_constraint(x, P("rows")),
            "f",
            devices=[0, 1],
            device_axes=["x"],
            logical_axes=[("rows", "y")],
        )
        with pytest.raises(ValueError, match="task 'f' maps the logical axis 'rows' to 'y'.*no axis 'y'"):
            parallelize(f, get_input_batch=batch)


class TestContexts:
    def test_without_tasks_it_is_plain_jit_unless_told_otherwise(self):
        sharded, _, get_batch = parallelize(lambda x: x * 2, get_input_batch=batch)
        assert not hasattr(sharded, "program")
        assert sharded.eval_shape(batch()).shape == sharded.lower(batch()).out_info.shape == (16, 8)
        with enable_fast_path(False):
            split, _, _ = parallelize(lambda x: x * 2, get_input_batch=batch)
        assert len(split.program(get_batch()).fragments) == 1
        for f in (sharded, split):
            x = jax.device_put(batch(), jax.devices()[3])
            assert devices(f(x)) == list(range(8))
            np.testing.assert_allclose(f(x), batch() * 2)

    def test_stages_of_plain_jit_have_the_constraints(self):
        def f(w, x):
            return x @ with_sharding_constraint(w, P(None, "y"))

        with MultiMesh(axis_sizes=(2, 4), axis_names=("x", "y")):
            sharded, sharded_init, get_batch = parallelize(f, lambda: jnp.ones((8, 4)), batch)
        arguments = sharded_init(), get_batch()
        for stage in (sharded.lower, lambda *args: sharded.trace(*args).lower()):
            assert "sharding_constraint" in stage(*arguments).as_text()

    def test_constraints_are_physical_where_autoshard_is_off(self):
        def f(x):
            with autoshard(False):
                return with_sharding_constraint(x, P("embed"))

        f = task(f, devices=jax.devices()[:2], device_axes=("x",))
        with pytest.raises(ValueError, match="embed"):
            parallelize(f, get_input_batch=batch)

    def test_ignored_transforms_run_on_one_device(self):
        for loss in (two_tasks(), expected_loss):
            sharded, sharded_init, get_batch = parallelize(loss, init, batch)
            params, x = sharded_init(), get_batch()
            with ignore_transforms():
                value = sharded(params, x)
            assert devices(value) == [0]
            np.testing.assert_allclose(value, loss(init(), batch()), rtol=1e-6)


def test_the_result_composes_with_mmnnx():
    """What parallelize returns for tasks is an mm.jit: programs, schedules and simulation are there."""
    sharded, sharded_init, get_batch = parallelize(jax.value_and_grad(two_tasks()), init, batch)
    assert isinstance(sharded.program(sharded_init(), get_batch()), mmnnx.Program)


class TestTasksInsideTransformations:
    """A checkpoint, scan or custom_vjp around a task does not hide where its weights are used."""

    @staticmethod
    def wrapped(around):
        stages = [
            task(lambda w, x: jnp.tanh(x @ w), f"stage{n}", devices=jax.devices()[2 * n : 2 * n + 2])
            for n in range(3)
        ]
        layers = [around(stage) for stage in stages]

        def loss(params, x):
            for layer, w in zip(layers, params):
                x = layer(w, x)
            return (x**2).mean()

        return loss

    @few(1)
    @pytest.mark.parametrize(
        "around",
        [
            jax.checkpoint,
            lambda f: lambda w, x: jax.lax.scan(lambda c, _: (f(w, c), None), x, length=2)[0],
            jax.jit,
        ],
        ids=["checkpoint", "scan", "jit"],
    )
    def test_weights_are_where_they_are_used(self, around):
        loss = self.wrapped(around)

        def step(params, x):
            return [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params, x))]

        def three():
            return [jax.random.normal(jax.random.key(n), (8, 8)) for n in range(3)]

        for f in (loss, jax.grad(loss), step):
            sharded, sharded_init, get_batch = parallelize(f, three, batch)
            assert [devices(p) for p in sharded_init()] == [[0, 1], [2, 3], [4, 5]]
            got, want = sharded(sharded_init(), get_batch()), f(three(), batch())
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


class TestMessages:
    def test_a_slice_without_a_multimesh(self):
        register_task("layer", task=Task(mesh_slice={"stage": 0}))

        def f(x):
            with jax.named_scope("layer"):
                return x * 2

        with pytest.raises(ValueError, match="'stage'.*layer.*Call parallelize inside `with MultiMesh"):
            parallelize(f, get_input_batch=batch)

    def test_a_batch_of_another_structure(self):
        pair = lambda: (batch(), batch())
        with enable_fast_path(False):
            sharded, sharded_init, _ = parallelize(lambda p, b: b[0] @ p[0] + b[1], init, pair)
        with pytest.raises(ValueError, match=r"describes argument or result 1 as .*it is float32\[16,8\]"):
            sharded(sharded_init(), jnp.ones((16, 8)))
        with pytest.raises(ValueError, match="has 2 entries, and there are 1 positional"):
            sharded(sharded_init())


def test_the_mesh_of_jax_set_mesh_is_the_programs():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("batch", "model"))

    def f(w, x):
        return with_sharding_constraint(x, P("batch")) @ with_sharding_constraint(w, P(None, "model"))

    with jax.set_mesh(mesh):
        sharded, sharded_init, get_batch = parallelize(f, lambda: jnp.ones((8, 4)), batch)
    assert sharded_init().sharding.spec == P(None, "model") and get_batch().sharding.spec[0] == "batch"
    np.testing.assert_allclose(sharded(sharded_init(), get_batch()), batch() @ np.ones((8, 4)), rtol=1e-6)
