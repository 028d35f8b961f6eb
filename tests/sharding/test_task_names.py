"""Tasks that have a name and nothing else, and names that are registered more than once."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mmnnx as mm
from mmnnx.sharding.task_scope import current_task
from tests.mpmd.modes import Pair
from tests.mpmd.parity import born, pipeline, place

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(autouse=True)
def no_registered_tasks():
    mm.clear_tasks()
    yield
    mm.clear_tasks()


def named(name):
    """A function that belongs to the task of a name, and says which task that is where it is traced."""
    seen = []

    def double(x):
        seen.append(current_task())
        return jnp.tanh(x) * 2

    return mm.task(double, name), seen


class TestANameAlone:
    @pytest.mark.parametrize("of_the_mesh", [False, True])
    def test_is_the_task_that_is_registered_under_it(self, of_the_mesh):
        """Forward and backward, and where a jitted function inside asks."""
        mesh, tasks = pipeline(2)
        register = mesh.register_task if of_the_mesh else mm.register_task
        register("enc.*", callback=lambda name, backprop: tasks[int(backprop)])
        register("decoder", task=tasks[1])
        encode, seen = named("encoder")
        decode, _ = named("decoder")
        with mesh:
            f = mm.jit(jax.value_and_grad(lambda x: decode(jax.jit(encode)(x)).sum()))
            loss, grad = f(X)
            assert [str(t) for t in f.tasks(X)] == ["task 'stage0'", "task 'stage1'"]
        assert seen[0] == tasks[0]
        whole = lambda x: (2 * jnp.tanh(2 * jnp.tanh(x))).sum()
        np.testing.assert_allclose(loss, whole(X), rtol=1e-5)
        np.testing.assert_allclose(grad, jax.grad(whole)(X), rtol=1e-5)
        assert loss.devices() == grad.devices() == {mesh.devices.flat[1]}

    def test_is_of_the_whole_mesh_where_none_is_registered(self):
        mesh, tasks = pipeline(2)
        f, seen = named("whole")
        with warnings.catch_warnings(), mesh:
            warnings.simplefilter("error")
            mm.jit(f)(X)
            assert seen[0] == mm.Task("whole") and seen[0].to_mesh() == mesh.mesh
            born(Pair, place(tasks, ["first"], [...]))  # of tasks with other names
            mm.jit(mm.task(jnp.tanh, "other"))(X)
            f(X)

    def test_a_warning_names_the_nearest(self):
        mesh, tasks = pipeline(2)
        mm.register_task("encoder", task=tasks[0])
        mesh.register_task("head_[0-9]+", task=tasks[1])
        f, _ = named("encodr")
        said = r"(?s)task 'encodr' .*whole MultiMesh.*nearest registered name is 'encoder'"
        with mesh, pytest.warns(UserWarning, match=said) as found:
            mm.jit(lambda x: f(x) + f(x))(X)
            mm.jit(f)(X)  # it was said
        assert len(found) == 1 and found[0].filename == __file__
        with mesh, pytest.warns(UserWarning, match=r"'head_a'.*'head_\[0-9\]\+'"):
            mm.jit(named("head_a")[0])(X)
        with warnings.catch_warnings(), mesh:
            warnings.simplefilter("error")
            mm.jit(mm.task(jnp.tanh, "a name and more", mesh_slice={"stage": 1}))(X)
            named("nobody asks")[0](X)  # outside of mm.jit it is nowhere in particular

    def test_a_warning_of_a_task_that_places_state(self):
        mesh, tasks = pipeline(2)
        with mesh:
            born(Pair, place(tasks, ["first"], [...]))
            with pytest.warns(UserWarning, match=r"'stage1'.*whole MultiMesh.*TaskSharding.*task="):
                mm.jit(named("stage1")[0])(X)


class TestRegisteredTwice:
    def test_a_warning_says_both(self):
        mesh, tasks = pipeline(2)
        for register in (mm.register_task, mesh.register_task):
            register("layer", task=tasks[0])
            with pytest.warns(UserWarning, match="(?s)'layer'.*'stage0'.*'stage1'.*clear_tasks") as found:
                register("layer", task=tasks[1])
            assert found[0].filename == __file__
        f, seen = named("layer")
        with mesh:
            mm.jit(f)(X)
        assert seen[0] == tasks[0]  # the first, as it is documented

    def test_callbacks_cannot_be_told_apart(self):
        _, tasks = pipeline(2)
        stage = lambda name, backprop: tasks[1]
        mm.register_task("layer", task=tasks[0])
        with pytest.warns(UserWarning, match="(?s)'layer'.*'stage0'.*lambda"):
            mm.register_task("layer", callback=stage)

    def test_the_same_again_is_no_mistake(self):
        _, tasks = pipeline(2)
        stage = lambda name, backprop: tasks[1]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):  # as a cell of a notebook is run twice
                mm.register_task("layer", task=mm.Task("a", mesh_slice={"stage": 0}))
                mm.register_task("head", callback=stage)
            mm.register_task("lay.*", task=tasks[1])  # another matcher: the first that matches is used
