"""Tasks that are registered for name scopes."""

import re

import pytest
from jax.sharding import PartitionSpec

from mmnnx.sharding import MultiMesh, Task, TaskMesh, clear_tasks, register_task
from mmnnx.sharding.registry import Registry
from mmnnx.sharding.task_scope import find_task, scope_name

P = PartitionSpec


@pytest.fixture(autouse=True)
def no_registered_tasks():
    clear_tasks()
    yield
    clear_tasks()


def make_mesh():
    return MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model"))


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

    def test_the_key_for_caches_is_gathered_once_for_many_paths(self):
        class Counted(dict):
            gathered = 0

            def items(self):
                self.gathered += 1
                return super().items()

        registry, owners = Registry(), Counted()
        registry._owners["mesh",] = owners
        for n in range(100):
            registry.place(("mesh",), Task(f"task{n % 2}"), [("blocks", n)])
        before = registry.content
        assert owners.gathered == 1 and registry.content == before
        registry.place(("mesh",), Task("task0"), [("blocks", 1)])
        assert registry.content != before

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
