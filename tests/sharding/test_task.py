"""Tasks: their options, what carries their mark through JAX, and how it is read back."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from mmnnx.sharding import MultiMesh, Task, TaskMesh, clear_tasks, register_task, task
from mmnnx.sharding.task import (
    current_task,
    find_task,
    is_backward,
    scope_name,
    scopes,
    splitting,
    task_scope,
)

P = PartitionSpec


@pytest.fixture(autouse=True)
def no_registered_tasks():
    clear_tasks()
    yield
    clear_tasks()


def make_mesh():
    return MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model"))


class TestOptions:
    def test_equal_options_make_equal_tasks(self):
        one = Task("t", None, {"mlp": "model"}, {"stage": 0, "model": 1}, [("a", ["b", "c"])])
        two = Task("t", None, [["mlp", "model"]], (("model", 1), ("stage", 0)), {"a": ("b", "c")})
        assert one == two
        assert hash(one) == hash(two)
        assert one != Task("t", mesh_slice={"stage": 0})
        assert one.axis_rules == (("mlp", "model"), ("a", ("b", "c")))

    def test_repr_shows_what_was_given(self):
        assert repr(Task("t", mesh_slice={"stage": 0})) == "Task(name='t', mesh_slice=(('stage', 0),))"
        assert repr(Task()) == "Task()"

    def test_mesh_and_mesh_slice_exclude_each_other(self):
        with pytest.raises(ValueError, match="task 'head' has both mesh= and mesh_slice="):
            Task("head", mesh=TaskMesh(devices=[0]), mesh_slice={"stage": 0})

    @pytest.mark.parametrize(
        "option, value",
        [
            ("split_backprop", value)
            for value in (True, "halves", ("one",), ("same", "same"), ("a", "b", "c"), (1, 2))
        ]
        + [("loop_dependent_mesh_slice", value) for value in (True, {}, {"stage": ()}, {"stage": 1}, 3)],
    )
    def test_malformed_options_are_refused(self, option, value):
        with pytest.raises(ValueError, match=f"{option}= of task 't' is"):
            Task("t", **{option: value})

    def test_a_slice_for_each_microbatch(self):
        """Along a whole axis, along some of it, or as a function says."""
        with MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model")) as mesh:
            for moves, indices in (
                ("stage", (0, 1, 2, 3, 0)),
                ({"stage": (3, 1)}, (3, 1, 3, 1, 3)),
                (lambda m: {"stage": m // 2}, (0, 0, 1, 1, 2)),
            ):
                task = Task("t", loop_dependent_mesh_slice=moves)
                assert [task.to_mesh(m) for m in range(5)] == [mesh.slice(stage=i) for i in indices]
                assert task.to_mesh() == task.to_mesh(0)

    def test_slices_of_different_shapes_are_refused(self):
        task = Task("t", loop_dependent_mesh_slice=lambda m: {("stage", "model")[m]: 0})
        mesh = MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model"))
        with mesh, pytest.raises(ValueError, match="task 't': its slice for microbatch 1.*one shape"):
            task.to_mesh(1)

    def test_a_slice_of_an_axis_that_is_not_there(self):
        mesh = MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model"))
        with mesh, pytest.raises(ValueError, match="'pipe'.*'stage', 'model'"):
            Task("t", loop_dependent_mesh_slice="pipe").to_mesh()

    @pytest.mark.parametrize("field", ["logical_axes", "extra_axes"])
    @pytest.mark.parametrize("rules", [("embed", "model"), [("a", 1)], [("a", "b", "c")], ["ab"], "ab", 3])
    def test_malformed_axis_rules_are_refused(self, field, rules):
        with pytest.raises(ValueError, match=f"{field}= of task 't' is a list of pairs"):
            Task("t", **{field: rules})

    @pytest.mark.parametrize(
        "mesh_slice", ["stage", {"stage": "first"}, {"stage": "1"}, {"stage": 1.5}, {0: 1}, ["ab"], 0]
    )
    def test_malformed_slices_are_refused(self, mesh_slice):
        with pytest.raises(ValueError, match="mesh_slice= of task 't' is an index for each axis"):
            Task("t", mesh_slice=mesh_slice)

    def test_other_types_are_refused(self):
        with pytest.raises(TypeError, match="mesh= of task 't'"):
            Task("t", mesh="stage")
        with pytest.raises(TypeError, match="name of a Task is a string"):
            Task(3)


class TestMeshOfATask:
    def test_its_own(self):
        own = Mesh(jax.devices()[2:4], ("model",))
        assert Task("t", mesh=own).to_mesh() == own
        assert Task("t", mesh=TaskMesh(devices=[2, 3], axis_names=("model",))).to_mesh() == own
        explicit = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
        assert Task("t", mesh=explicit).to_mesh().are_all_axes_auto
        assert Task("t", mesh=make_mesh()).to_mesh() == make_mesh().mesh

    def test_a_slice_of_the_current_one(self):
        with make_mesh() as multimesh:
            assert Task("t", mesh_slice={"stage": 2}).to_mesh() == multimesh.slice(stage=2)

    def test_the_whole_current_one(self):
        with make_mesh() as multimesh:
            assert Task("t").to_mesh() == multimesh.mesh
        assert Task("t").to_mesh().devices.tolist() == jax.devices()

    def test_errors_name_the_task(self):
        with pytest.raises(ValueError, match="task 'a': it is a slice of the current MultiMesh, and none is"):
            Task("a", mesh_slice={"stage": 0}).to_mesh()
        with make_mesh(), pytest.raises(ValueError, match="task 'c': index 4 is outside axis 'stage'"):
            Task("c", mesh_slice={"stage": 4}).to_mesh()
        with pytest.raises(ValueError, match=r"task 'd': device numbers \[9\]"):
            Task("d", mesh=TaskMesh(devices=[9])).to_mesh()


# ---------------------------------------------------------------- the mark survives every transformation


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


class TestRegister:
    def test_a_name_or_a_regex_matches_whole_names(self):
        one, many, compiled = Task("one"), Task("many"), Task("compiled")
        register_task("encoder", task=one)
        register_task("layer_[0-9]+", task=many)
        register_task(re.compile("head|tail"), task=compiled)
        register_task("block[0]", task=one)
        assert find_task("jvp(encoder)/dense") == one
        assert find_task("transpose(jvp(layer_12))") == many
        assert find_task("tail") == compiled
        assert find_task("block[0]") == one
        assert find_task("encoder_2/my_layer_1/header") is None

    def test_the_innermost_scope_decides_then_the_first_matcher(self):
        outer, inner = Task("outer"), Task("inner")
        register_task("a", task=outer)
        register_task("b", task=inner)
        register_task("[ab]", task=Task("too late"))
        assert find_task("a/b") == inner
        assert find_task("b/a") == outer
        assert find_task(f"a/{scope_name(Task('explicit'))}") == Task("explicit")
        assert find_task(f"{scope_name(Task('explicit'))}/a") == outer

    def test_a_callback_learns_name_and_phase_and_is_asked_once(self):
        asked = []

        def callback(name, backprop):
            asked.append((name, backprop))
            return Task(f"{name} {'backward' if backprop else 'forward'}")

        register_task("layer.*", callback=callback)
        for _ in range(3):
            assert find_task("jvp(layer1)") == Task("layer1 forward")
            assert find_task("transpose(jvp(layer1))") == Task("layer1 backward")
        assert asked == [("layer1", False), ("layer1", True)]

    def test_through_named_scope_in_a_gradient(self):
        stage = Task("stage")
        register_task("stage[0-9]", task=stage)
        found = tasks_of(jax.grad(jax.named_scope("stage0")(lambda x: jnp.sin(x) * x)), 1.0)
        assert found and {t for _, stack, t in found if "stage0" in stack} == {stage}
        assert any(is_backward(stack) and t == stage for _, stack, t in found)

    def test_of_the_multimesh_come_first(self):
        multimesh, everywhere, here = make_mesh(), Task("everywhere"), Task("here")
        register_task("a", task=everywhere)
        multimesh.register_task("a", task=here)
        multimesh.register_task("b", callback=lambda name, backprop: Task(name))
        assert find_task("a") == everywhere
        assert find_task("a", multimesh) == here
        with multimesh:
            assert find_task("a") == here
            assert find_task("b") == Task("b")
        assert find_task("b") is None

    def test_registering_and_clearing_are_seen_at_once(self):
        assert find_task("late") is None
        register_task("late", task=Task("late"))
        assert find_task("late") == Task("late")
        clear_tasks()
        assert find_task("late") is None

    @pytest.mark.parametrize("answer", [None, "stage0", TaskMesh(devices=[0])])
    def test_a_callback_must_give_a_task(self, answer):
        register_task("lay.*", callback=lambda name, backprop: answer)
        with pytest.raises(
            TypeError, match=r"matcher 'lay\.\*' must give a Task for scope 'layer', and gave "
        ):
            find_task("jvp(layer)")

    def test_refuses(self):
        with pytest.raises(ValueError, match="'a' with one of callback= and task="):
            register_task("a")
        with pytest.raises(ValueError, match="'a' with one of callback= and task="):
            register_task("a", callback=lambda name, backprop: Task("t"), task=Task("t"))
        with pytest.raises(ValueError, match=r"matcher '\(' is not a regex"):
            register_task("(", task=Task("t"))
        with pytest.raises(TypeError, match="a matcher is a name"):
            register_task(3, task=Task("t"))
        with pytest.raises(TypeError, match="a matcher is a name"):
            register_task(re.compile(b"a"), task=Task("t"))
        with pytest.raises(TypeError, match="cannot be called"):
            register_task("a", callback=3)
        for register in (register_task, make_mesh().register_task):
            with pytest.raises(TypeError, match="task= for matcher 'a' is a Task, not 't'"):
                register("a", task="t")
