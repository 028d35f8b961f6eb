"""Task scopes: what carries the mark of a task through JAX, and how it is read back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from mmnnx.sharding import MultiMesh, Task, TaskMesh, clear_tasks, register_task, task
from mmnnx.sharding.name_stack import is_backward, scopes
from mmnnx.sharding.task_scope import current_task, find_task, scope_name, splitting, task_scope
from tests.slow import few

P = PartitionSpec


@pytest.fixture(autouse=True)
def no_registered_tasks():
    clear_tasks()
    yield
    clear_tasks()


def make_mesh():
    return MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model"))


def equations(jaxpr, outer=""):
    """(equation, full name stack) of every equation, those of inner jaxprs after the one that holds them."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        stack = f"{outer}/{eqn.source_info.name_stack}"
        yield eqn, stack
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(inner, stack)


def tasks_of(function, *args):
    return [
        (str(eqn.primitive), stack, find_task(stack))
        for eqn, stack in equations(jax.make_jaxpr(function)(*args))
    ]


@jax.custom_vjp
def cube(x):
    return x * x * x


cube.defvjp(lambda x: (x * x * x, x), lambda x, g: (3 * jnp.square(x) * g,))


def scanned(x):
    return jax.lax.scan(lambda carry, y: (jnp.sin(carry) * y, carry), x, jnp.stack([x, x, x]))[0]


BODIES = {
    "plain": lambda x: jnp.sin(x) * jnp.cos(x),
    "jit": jax.jit(lambda x: jnp.sin(x) * 2),
    "vmap": jax.vmap(lambda x: jnp.exp(x) * x),
    "scan": scanned,
    "remat": jax.checkpoint(lambda x: jnp.tanh(x) * x),
    "custom_vjp": cube,
    "cond": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "nested gradient": lambda x: jax.grad(lambda y: jnp.sum(jnp.sin(y) * y))(x),
}


class TestTransformations:
    @few(3)
    @pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
    def test_every_equation_of_value_and_gradient_has_the_mark(self, body):
        stage = Task("stage 0")
        wrapped = task(body, task=stage)
        x = jnp.linspace(0.1, 0.9, 4)

        def gradient(function):
            return lambda x, ct: jax.vjp(function, x)[1](ct)[0]

        np.testing.assert_array_equal(wrapped(x), body(x))
        np.testing.assert_array_equal(gradient(wrapped)(x, x), gradient(body)(x, x))
        found = tasks_of(gradient(wrapped), x, x)
        assert found
        assert {t for _, _, t in found} == {stage}
        assert any(is_backward(stack) for _, stack, _ in found)
        assert not any(is_backward(stack) for _, stack, _ in tasks_of(BODIES["plain"], x))

    @pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
    def test_under_outer_jit_vmap_and_remat(self, body):
        stage = Task("stage 0")
        x = jnp.linspace(0.1, 0.9, 8).reshape(2, 4)

        def transformed(function):
            return jax.jit(jax.vmap(jax.checkpoint(jax.grad(lambda x: jnp.sum(function(x))))))

        wrapped = task(body, task=stage)
        np.testing.assert_allclose(transformed(wrapped)(x), transformed(body)(x), rtol=1e-6)
        marked = [p for p, _, t in tasks_of(transformed(wrapped), x) if t == stage]
        plain = [p for p, _, _ in tasks_of(transformed(body), x)]
        assert {"sin", "exp", "tanh", "mul"} & set(marked)
        for primitive in ("sin", "cos", "exp", "tanh", "square", "scan", "cond"):
            assert marked.count(primitive) == plain.count(primitive)

    def test_a_scan_over_a_task(self):
        stage = Task("body")

        def loss(f, x):
            return jnp.sum(jax.lax.scan(lambda carry, _: (f(carry), None), x, None, length=3)[0])

        x = jnp.arange(3.0)
        wrapped = task(jnp.sin, task=stage)
        np.testing.assert_array_equal(
            jax.grad(functools.partial(loss, wrapped))(x), jax.grad(functools.partial(loss, jnp.sin))(x)
        )
        found = tasks_of(jax.grad(functools.partial(loss, wrapped)), x)
        assert [t for p, _, t in found if p in ("sin", "cos")] == [stage, stage]
        backward = [t for p, stack, t in found if p == "mul" and is_backward(stack)]
        assert backward and set(backward) == {stage}

    def test_nnx_scan_vmap_and_remat(self):
        stage = Task("layers")

        class Block(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(3, 3, rngs=rngs)

            def __call__(self, x):
                return jnp.tanh(self.linear(x))

        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(rngs)

        blocks = make(nnx.Rngs(0).split(4))

        def run(call):
            layers = nnx.scan(nnx.remat(call), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)

            def loss(state, x):
                return jnp.sum(layers(nnx.merge(graphdef, state), x))

            return jax.grad(loss)

        graphdef, state = nnx.split(blocks)
        x = jnp.ones((2, 3))
        marked = run(task(lambda block, x: block(x), task=stage))
        for got, expected in zip(
            jax.tree.leaves(marked(state, x)),
            jax.tree.leaves(run(lambda block, x: block(x))(state, x)),
            strict=True,
        ):
            np.testing.assert_array_equal(got, expected)
        found = tasks_of(marked, state, x)
        assert {t for p, _, t in found if p in ("tanh", "dot_general")} == {stage}

    def test_tasks_nest_and_the_innermost_wins(self):
        inner, outer = Task("inner"), Task("outer")
        f = task(lambda x: jnp.cos(task(jnp.sin, task=inner)(x)), task=outer)
        assert {p: t for p, _, t in tasks_of(f, 1.0)} == {"sin": inner, "cos": outer}
        assert {t for p, s, t in tasks_of(jax.grad(f), 1.0) if is_backward(s)} <= {inner, outer}


class TestWrapping:
    def test_a_function_keeps_its_name_and_arguments(self):
        def layer(x, *, scale):
            """Scales."""
            return x * scale, current_task()

        wrapped = task(layer, mesh_slice={"stage": 1})
        assert (wrapped.__name__, wrapped.__doc__) == ("layer", "Scales.")
        assert wrapped(2, scale=3) == (6, Task("layer", mesh_slice={"stage": 1}))
        assert current_task() is None

    def test_name_and_task_choose_the_task(self):
        def which(**kwargs):
            return task(current_task, **kwargs)()

        given = Task("given", mesh_slice={"stage": 0})
        assert which(task=given) == given
        assert which(name="other", task=given) == Task("other", mesh_slice={"stage": 0})
        assert which(name="other") == Task("other")
        assert task(functools.partial(current_task))() == Task("partial")

    def test_decorates(self):
        given = Task("given", mesh_slice={"stage": 0})

        @task(task=given)
        def asked(x):
            return x, current_task()

        assert asked(3) == (3, given) and asked.__name__ == "asked"
        with pytest.raises(TypeError, match="wraps a function"):
            task(task=given)(3)

    def test_refuses(self):
        with pytest.raises(TypeError, match="no field devices"):
            task(jnp.sin, devices=[0])
        with pytest.raises(TypeError, match="either task= or fields of one, not both: mesh"):
            task(jnp.sin, task=Task("t"), mesh=TaskMesh(devices=[0]))
        with pytest.raises(TypeError, match="give a Task as task="):
            task(jnp.sin, Task("t"))
        with pytest.raises(TypeError, match="task= is a Task"):
            task(jnp.sin, task="t")
        with pytest.raises(TypeError, match="wraps a function"):
            task(3)

    def test_scope_is_left_after_an_error(self):
        with pytest.raises(ZeroDivisionError):
            task(lambda: 1 / 0)()
        assert current_task() is None

    def test_a_module_class(self):
        stage = Task("stage")
        TaskLinear = task(nnx.Linear, task=stage)
        assert TaskLinear.__name__ == "Task[Linear]"
        assert issubclass(TaskLinear, nnx.Linear)
        assert task(nnx.Linear, task=stage) is TaskLinear
        linear, plain = TaskLinear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        x = jnp.ones((2, 3))
        np.testing.assert_array_equal(linear(x), plain(x))
        assert {t for _, _, t in tasks_of(lambda x: linear(x), x)} == {stage}
        init = tasks_of(lambda key: nnx.state(TaskLinear(3, 4, rngs=nnx.Rngs(key))), jax.random.key(0))
        assert {t for p, _, t in init if "random" in p} == {stage}

    def test_a_module_class_without_call(self):
        class Table(nnx.Module):
            def __init__(self):
                self.seen = current_task()

        assert not callable(task(Table, "table")())
        assert task(Table, "table")().seen == Task("table")

    def test_a_module_class_that_is_no_pytree(self):
        class Holder(nnx.Module, pytree=False):
            def __init__(self):
                self.arrays = [nnx.Param(jnp.ones(2))]  # refused of a pytree Module

        assert len(task(Holder)().arrays) == 1

    def test_a_module_instance(self):
        stage = Task("stage")
        model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
        before = dict(vars(model))
        wrapped = task(model, task=stage)
        assert type(wrapped).__name__ == "Task[Sequential]"
        assert type(model) is nnx.Sequential and vars(model) == before
        assert wrapped.layers[0].kernel is model.layers[0].kernel
        wrapped.extra = 1
        assert not hasattr(model, "extra")

        x = jnp.ones((2, 3))
        graphdef, state = nnx.split(wrapped)
        found = tasks_of(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
        assert found and {t for _, _, t in found} == {stage}
        again = nnx.merge(graphdef, state)
        assert type(again) is type(wrapped)
        assert jax.tree.structure(nnx.state(again)) == jax.tree.structure(nnx.state(model))

    def test_an_instance_updates_the_shared_variables_in_place(self):
        model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        wrapped = task(model)

        @nnx.jit
        def step(norm, x):
            return norm(x)

        step(wrapped, jnp.full((2, 3), 5.0))
        assert wrapped.mean is model.mean
        assert (model.mean[...] != 0).all()

    def test_splitting_gives_each_task_its_own_trace(self):
        """A checkpointed function that two tasks share must not keep the mesh of the first."""

        @jax.checkpoint
        def shared(x):
            return jax.lax.with_sharding_constraint(x, P("model"))

        token = splitting.set(True)
        try:
            with make_mesh() as multimesh:
                stages = [Task(f"s{i}", mesh_slice={"stage": i}) for i in range(2)]
                jaxpr = jax.make_jaxpr(lambda x: [task(shared, task=stage)(x) for stage in stages])(
                    jnp.ones(4)
                )
                meshes = [
                    eqn.params["sharding"].mesh
                    for eqn, _ in equations(jaxpr)
                    if str(eqn.primitive) == "sharding_constraint"
                ]
                assert meshes == [multimesh.slice(stage=i) for i in range(2)]
        finally:
            splitting.reset(token)


class TestReadingScopes:
    @pytest.mark.parametrize(
        ("stack", "names"),
        [
            ("", ()),
            ("jvp()", ()),
            ("a/b", ("a", "b")),
            ("jvp(a)/jvp(b)/vmap()", ("a", "b")),
            ("transpose(jvp(a/b))/c", ("a", "b", "c")),
            ("vmap(transpose(jvp(task[3:s 0])))/jvp(foo)/x", ("task[3:s 0]", "foo", "x")),
            ("/a//b/", ("a", "b")),
            ("layer(0)/b", ("layer(0)", "b")),
            ("layer(/b", ("layer(/b",)),
        ],
    )
    def test_names_without_transformations(self, stack, names):
        assert scopes(stack) == names

    def test_backward(self):
        assert is_backward("transpose(jvp(a))/jvp(b)")
        assert not is_backward("jvp(a)/transpose")

    def test_a_scope_stands_for_equal_tasks_for_ever(self):
        name = scope_name(Task("x", mesh_slice={"stage": 0}))
        assert scope_name(Task("x", mesh_slice=[("stage", 0)])) == name
        assert scope_name(Task("x", mesh_slice={"stage": 1})) != name
        assert find_task(f"transpose(jvp({name}))/dense") == Task("x", mesh_slice={"stage": 0})
        assert find_task("task[999999:x]") is None

    @pytest.mark.parametrize("name", ["a/b", "f(x)", "l[0]", "", None, "]][[", "stage 0: first"])
    def test_any_name_is_read_back(self, name):
        wanted = Task(name)

        def f(x):
            with task_scope(wanted):
                return jnp.sin(x)

        assert [t for _, _, t in tasks_of(jax.grad(f), 1.0) if t != wanted] == []

    def test_scope_around_a_compiled_function(self):
        assert task(jax.jit(lambda x: x + 1), "stage 0: f(x)")(1) == 2

    def test_a_registered_scope_in_a_gradient(self):
        stage = Task("stage")
        register_task("stage[0-9]", task=stage)
        found = tasks_of(jax.grad(jax.named_scope("stage0")(lambda x: jnp.sin(x) * x)), 1.0)
        assert found and {t for _, stack, t in found if "stage0" in stack} == {stage}
        assert any(is_backward(stack) and t == stage for _, stack, t in found)
