"""Tasks: their options and their meshes."""

import jax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from mmnnx.sharding import MultiMesh, Task, TaskMesh, clear_tasks

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

    def test_meshes_in_turn(self):
        meshes = [TaskMesh(devices=[n, n + 1], axis_names=("x",)) for n in (0, 4)]
        task = Task("t", loop_dependent_mesh_slice=[*meshes, Mesh(jax.devices()[2:4], ("x",))])
        found = [[d.id for d in task.to_mesh(m).devices.flat] for m in range(4)]
        assert found == [[0, 1], [4, 5], [2, 3], [0, 1]]
        assert task == Task("t", loop_dependent_mesh_slice=task.loop_dependent_mesh_slice)
        with pytest.raises(ValueError, match="task 't' has meshes of several shapes: {'x': 2}, {'x': 1}"):
            Task("t", loop_dependent_mesh_slice=[meshes[0], TaskMesh(devices=[3], axis_names=("x",))])

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
        assert Task("t", mesh=explicit).to_mesh() == explicit
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
