"""MultiMesh and TaskMesh: which devices, which axes, and what is refused."""

import copy
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from mmnnx.sharding import MultiMesh, TaskMesh
from mmnnx.sharding.mesh import current_multimesh

P = PartitionSpec


def ids(mesh):
    return [device.id for device in mesh.devices.flat]


def make(**kwargs):
    return MultiMesh(**{"axis_sizes": (4, 2), "axis_names": ("stage", "model"), **kwargs})


class TestMultiMesh:
    def test_answers_what_a_jax_mesh_answers(self):
        multimesh = make()
        mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "model"))
        assert multimesh.mesh == mesh
        assert multimesh.shape == mesh.shape
        assert multimesh.size == 8
        assert multimesh.axis_names == ("stage", "model")
        assert (multimesh.devices == mesh.devices).all()
        assert multimesh.device_ids.tolist() == mesh.device_ids.tolist()
        assert multimesh.mesh.are_all_axes_auto
        with pytest.raises(AttributeError, match="nonsense"):
            _ = multimesh.nonsense

    def test_devices_give_order_and_shape(self):
        reversed_devices = np.array(jax.devices()[::-1]).reshape(2, 4)
        multimesh = MultiMesh(devices=reversed_devices, axis_names=("a", "b"))
        assert dict(multimesh.shape) == {"a": 2, "b": 4}
        assert ids(multimesh) == [7, 6, 5, 4, 3, 2, 1, 0]
        flat = MultiMesh(devices=jax.devices()[2:6], axis_sizes=(2, 2), axis_names=("a", "b"))
        assert ids(flat) == [2, 3, 4, 5]

    def test_takes_the_first_devices_it_needs(self):
        assert ids(make(axis_sizes=(1, 3))) == [0, 1, 2]

    def test_global_mesh_wins_and_becomes_auto(self):
        explicit = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
        multimesh = make(global_mesh=explicit)
        assert dict(multimesh.shape) == {"x": 2, "y": 2}
        assert multimesh.mesh.are_all_axes_auto

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"axis_names": None}, "needs axis_sizes= and axis_names="),
            ({"axis_sizes": None}, "needs axis_sizes= and axis_names="),
            ({"axis_sizes": (8,)}, r"1 sizes \(8,\) and 2 names \('stage', 'model'\) differ"),
            ({"axis_names": ("a", "a")}, r"must differ, not \('a', 'a'\)"),
            ({"axis_sizes": (4, 0)}, "at least 1"),
            ({"axis_sizes": (8, 2)}, "too few devices.*stage=8, model=2: it needs 16, and JAX has 8"),
        ],
    )
    def test_refuses_axes_that_do_not_fit(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            make(**arguments)

    @pytest.mark.parametrize("sizes", [8, (4.0, 2), "42"])
    def test_refuses_sizes_that_are_no_whole_numbers(self, sizes):
        with pytest.raises(
            TypeError, match="axis_sizes= of a MultiMesh is a whole number for each axis, not"
        ):
            make(axis_sizes=sizes)

    def test_refuses_what_is_no_global_mesh(self):
        with pytest.raises(TypeError, match="global_mesh= is a jax.sharding.Mesh, .*: devices= takes a list"):
            MultiMesh(global_mesh=jax.devices())

    def test_refuses_devices_that_do_not_fit(self):
        with pytest.raises(ValueError, match="needs 8 devices, and devices= has 4"):
            make(devices=jax.devices()[:4])
        with pytest.raises(ValueError, match="repeats"):
            make(axis_sizes=(2, 1), devices=[jax.devices()[0]] * 2)

    def test_devices_are_not_compared_each_with_each(self):
        compared = 0

        class Device:
            def __eq__(self, other):
                nonlocal compared
                compared += 1
                return self is other

            __hash__ = object.__hash__

        devices = [Device() for _ in range(100)]
        with pytest.raises(ValueError, match="repeats"):
            make(axis_sizes=(101, 1), devices=[*devices, devices[0]])
        assert compared < 1000

    def test_slice_keeps_all_axes(self):
        multimesh = make()
        one = multimesh.slice(stage=2)
        assert dict(one.shape) == {"stage": 1, "model": 2}
        assert ids(one) == [4, 5]
        assert ids(multimesh.slice(model=1)) == [1, 3, 5, 7]
        assert ids(multimesh.slice(stage=3, model=0)) == [6]
        assert multimesh.slice() == multimesh.mesh
        assert one.are_all_axes_auto

    @pytest.mark.parametrize("index", [4, -1])
    def test_slice_refuses_an_index_outside_the_axis(self, index):
        with pytest.raises(ValueError, match=f"index {index} .*'stage', which has size 4: use 0 to 3"):
            make().slice(stage=index)

    def test_slice_refuses_an_unknown_axis(self):
        with pytest.raises(ValueError, match="'data': the MultiMesh has the axes stage=4, model=2"):
            make().slice(data=0)

    def test_equality_hash_repr_copy(self):
        assert make() == make()
        assert hash(make()) == hash(make())
        assert make() != make(axis_names=("stage", "data"))
        assert make() != make().mesh
        assert repr(make()) == "MultiMesh(stage=4, model=2)"
        assert not hasattr(MultiMesh.__new__(MultiMesh), "mesh")
        assert copy.copy(make()) == make()

    def test_names_the_devices_that_it_leaves_idle(self, caplog):
        """Unless it was told which devices to take."""
        assert repr(make(axis_sizes=(3, 2))) == "MultiMesh(stage=3, model=2; idle: devices 6-7)"
        assert repr(make(axis_sizes=(7, 1))) == "MultiMesh(stage=7, model=1; idle: device 7)"
        assert make().idle == make(devices=jax.devices()[:4], axis_sizes=(2, 2)).idle == ()
        assert [(r.levelname, r.message.partition("; ")[2]) for r in caplog.records] == [
            ("WARNING", "idle: devices 6-7): give devices= if they are meant to be idle"),
            ("WARNING", "idle: device 7): give devices= if they are meant to be idle"),
        ]


class TestCurrentMesh:
    def test_is_the_innermost_and_reentrant(self):
        outer, inner = make(), make(axis_sizes=(2, 2))
        assert current_multimesh() is None
        with outer as entered:
            assert entered is outer
            with inner, outer, outer:
                assert current_multimesh() is outer
            assert current_multimesh() is outer
        assert current_multimesh() is None

    def test_is_left_after_an_error(self):
        with pytest.raises(KeyError), make():
            raise KeyError
        assert current_multimesh() is None
        with pytest.raises(RuntimeError, match="non-empty mesh"):
            jax.lax.with_sharding_constraint(jnp.ones(4), P("model"))

    def test_belongs_to_a_thread(self):
        seen = []
        with make():
            thread = threading.Thread(target=lambda: seen.append(current_multimesh()))
            thread.start()
            thread.join()
        assert seen == [None]

    def test_bare_specs_resolve_without_a_warning(self):
        multimesh = make()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with multimesh:
                y = jax.lax.with_sharding_constraint(jnp.ones((4, 4)), P("model"))
        assert y.sharding == jax.sharding.NamedSharding(multimesh.mesh, P("model"))

    def test_warnings_of_others_are_still_shown_once(self):
        """Python forgets what it has shown when filters change, which are those of all threads."""
        multimesh = make()
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("default")
            for _ in range(2):
                with multimesh:
                    warnings.warn("of this line", stacklevel=1)
        assert len(shown) == 1

    def test_arrays_of_a_slice_can_be_used_inside(self):
        multimesh = make()
        x = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(multimesh.slice(stage=1), P("model")))
        with multimesh:
            assert ids((x * 2).sharding.mesh) == [2, 3]

    def test_axis_metadata_may_be_logical_inside(self):
        assert nnx.using_eager_sharding()
        with make(), make():
            param = nnx.Param(jnp.ones((2, 2)), out_sharding=("embed", "mlp"))
        assert nnx.using_eager_sharding()
        assert param.get_metadata()["out_sharding"] == ("embed", "mlp")

    def test_variables_from_elsewhere_have_other_metadata(self):
        """JAX's error says what differs, and a note says what to do."""
        add = lambda *states: jax.tree.map(jnp.add, *states)
        outside = nnx.Param(jnp.ones(2))
        with pytest.raises(ValueError, match="different pytree metadata") as error, make():
            add(nnx.Param(jnp.ones(2)), outside)
        (note,) = error.value.__notes__
        assert "inside of `with nnx.use_eager_sharding(False):`" in note
        with nnx.use_eager_sharding(False):
            alike = nnx.Param(jnp.ones(2))
        with make():
            assert add(nnx.Param(jnp.ones(2)), alike)[0] == 2


class TestTaskMesh:
    def test_axes_have_defaults(self):
        mesh = TaskMesh(devices=range(4))
        assert mesh.devices == (0, 1, 2, 3)
        assert mesh.shape == {"axis0": 4}
        assert TaskMesh(devices=range(4), axis_names=("model",)).shape == {"model": 4}
        assert TaskMesh(devices=range(4), axis_sizes=(2, 2)).shape == {"axis0": 2, "axis1": 2}

    def test_axes_from_an_abstract_mesh(self):
        mesh = TaskMesh(devices=[0, 1], abstract=AbstractMesh((1, 2), ("data", "model")))
        assert mesh == TaskMesh(devices=[0, 1], axis_sizes=(1, 2), axis_names=("data", "model"))
        assert mesh.size == 2

    def test_place_keeps_the_axes(self):
        mesh = TaskMesh(devices=[0, 1], axis_names=("model",))
        assert mesh.place([6, 7]) == TaskMesh(devices=[6, 7], axis_names=("model",))
        with pytest.raises(ValueError, match="too many devices"):
            mesh.place([5, 6, 7])

    def test_numbers_count_the_devices_of_the_program(self):
        mesh = TaskMesh(devices=[1, 0], axis_names=("model",))
        assert ids(mesh.to_mesh()) == [1, 0]
        with MultiMesh(devices=jax.devices()[4:], axis_sizes=(4,), axis_names=("stage",)):
            assert ids(mesh.to_mesh()) == [5, 4]
            assert ids(mesh.to_mesh(jax.devices()[2:])) == [3, 2]
        assert mesh.to_mesh().are_all_axes_auto

    def test_equal_ones_hash_alike(self):
        assert hash(TaskMesh(devices=[0])) == hash(TaskMesh(devices=(0,), axis_sizes=[1]))
        assert TaskMesh(devices=[0]) != TaskMesh(devices=[1])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"devices": [0, 1, 1]}, r"overlapping devices in a TaskMesh: \[1\]"),
            ({"devices": [-1, 0]}, "start at 0, not -1"),
            ({"devices": []}, "at least one device"),
            (
                {"devices": [0, 1], "axis_sizes": (2, 2), "axis_names": ("a", "b")},
                r"too few devices for a TaskMesh of a=2, b=2: the axes need 4, and 2 are given: \[0, 1\]",
            ),
            ({"devices": range(6), "axis_sizes": (2, 2)}, "too many devices.*need 4, and 6 are given"),
            ({"devices": [0, 1], "axis_names": ("a", "b")}, "1 sizes .* 2 names .* differ in length"),
            ({"devices": [0], "axis_sizes": (1, 1), "axis_names": ("a", "a")}, "must differ"),
            ({"devices": [0], "axis_sizes": (-1, -1)}, "at least 1"),
            ({"devices": [0], "abstract": AbstractMesh((1,), ("a",)), "axis_sizes": (1,)}, "not both"),
            ({"devices": [0], "abstract": AbstractMesh((1,), ("a",)), "axis_names": ("a",)}, "not both"),
        ],
    )
    def test_refuses(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            TaskMesh(**arguments)

    def test_refuses_what_is_not_a_device_number(self):
        with pytest.raises(TypeError, match="flat list of device numbers"):
            TaskMesh(devices=jax.devices())
        with pytest.raises(TypeError, match="flat list of device numbers"):
            TaskMesh(devices=[[0, 1], [2, 3]])
        with pytest.raises(
            TypeError, match="axis_sizes= of a TaskMesh is a whole number for each axis, not 2"
        ):
            TaskMesh(devices=[0, 1], axis_sizes=2)

    def test_refuses_numbers_the_program_does_not_have(self):
        with pytest.raises(ValueError, match=r"\[8\] .* out of range: the program has 8 devices, .* 0 to 7"):
            TaskMesh(devices=[7, 8]).to_mesh()
        with make(axis_sizes=(2, 2)), pytest.raises(ValueError, match="the program has 4 devices"):
            TaskMesh(devices=[4]).to_mesh()
