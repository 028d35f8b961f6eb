"""Logical axis names and with_sharding_constraint."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmnnx.sharding import MultiMesh, Task, task, with_sharding_constraint
from mmnnx.sharding.logical import logical_spec, to_spec
from mmnnx.sharding.task_scope import splitting

P = PartitionSpec


@contextlib.contextmanager
def tracing_for_mm_jit():
    token = splitting.set(True)
    try:
        yield
    finally:
        splitting.reset(token)


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "model"))


def spec(names, mesh, logical_axes=None, extra_axes=None):
    return to_spec(names, Task("t", logical_axes=logical_axes, extra_axes=extra_axes), mesh)


class TestToSpec:
    @pytest.mark.parametrize(
        ("names", "logical_axes", "expected"),
        [
            (("embed", "mlp"), [("mlp", "model")], P(None, "model")),
            (("model", None), [], P("model", None)),
            (("model",), [("model", "data")], P("data")),
            (("batch",), [("batch", ("data", "fsdp"))], P(("data", "fsdp"))),
            (("a", "a"), [("a", "model"), ("a", "fsdp")], P("model", "fsdp")),
            (("a", "a", "a"), [("a", "model"), ("a", "fsdp")], P("model", "fsdp", None)),
            (("b", "a"), [("a", ("model", "fsdp")), ("a", "data"), ("b", "fsdp")], P("fsdp", "data")),
            (("a",), [("a", None), ("a", "model")], P(None)),
            (("model",), [("model", None)], P(None)),
            (("model", "model"), [], P("model", None)),
            ((("a", "fsdp"), "b"), [("a", "data"), ("b", "model")], P(("data", "fsdp"), "model")),
            ((("a", "nowhere"),), [("a", "data")], P("data")),
            ((P.UNCONSTRAINED, "mlp"), [("mlp", "model")], P(P.UNCONSTRAINED, "model")),
            ((), [("a", "model")], P()),
        ],
    )
    def test_translates(self, mesh, names, logical_axes, expected):
        assert spec(names, mesh, logical_axes) == expected

    def test_extra_axes_come_after_logical_axes_and_before_mesh_names(self, mesh):
        assert spec(("a",), mesh, [("a", "model")], [("a", "data")]) == P("model")
        assert spec(("a", "a"), mesh, [("a", "model")], [("a", "data")]) == P("model", "data")
        assert spec(("fsdp",), mesh, None, {"fsdp": "data"}) == P("data")

    def test_without_a_task(self, mesh):
        assert to_spec(("model", "mlp"), None, mesh) == P("model", None)

    def test_a_rule_for_an_axis_the_mesh_lacks(self, mesh):
        with pytest.raises(
            ValueError, match=r"task 't' maps the logical axis 'a' to \('data', 'tensor'\).*'tensor'"
        ):
            spec(("a",), mesh, [("a", ("data", "tensor"))])
        assert spec(("b",), mesh, [("a", "tensor")]) == P(None)


class TestMetadata:
    STAGE = Task("t", logical_axes=[("mlp", "model")])

    def test_of_a_param(self, mesh):
        with nnx.use_eager_sharding(False):
            direct = nnx.Param(jnp.ones((2, 4)), out_sharding=("embed", "mlp"))
            with pytest.warns(DeprecationWarning):
                older = nnx.Param(jnp.ones((2, 4)), sharding=P("embed", "mlp"))
            init = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed", "mlp"))
            linear = nnx.Linear(2, 4, kernel_init=init, rngs=nnx.Rngs(0))
            own = nnx.Param(
                jnp.ones((2, 4)),
                out_sharding=("embed", "mlp"),
                sharding_rules=(("embed", "data"), ("mlp", "fsdp")),
            )
        for variable in (direct, older, linear.kernel):
            assert logical_spec(variable, self.STAGE, mesh) == P(None, "model")
        assert logical_spec(own, self.STAGE, mesh) == P("data", "model")
        named = nnx.Param(jnp.ones((2, 4)), eager_sharding=False, out_sharding=NamedSharding(mesh, P("data")))
        assert logical_spec(named, self.STAGE, mesh) == P("data")

    def test_of_nothing(self, mesh):
        assert logical_spec(nnx.Param(jnp.ones(2)), self.STAGE, mesh) is None
        assert logical_spec(jnp.ones(2), self.STAGE, mesh) is None


class TestConstraint:
    STAGE = Task("stage1", mesh_slice={"stage": 1}, logical_axes=[("mlp", "model")])

    def make_mesh(self):
        return MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model"))

    def constraints(self, function, *args):
        jaxpr = jax.make_jaxpr(function)(*args)
        return [e.params["sharding"] for e in jaxpr.eqns if str(e.primitive) == "sharding_constraint"]

    def test_in_a_task_of_mm_jit_names_are_translated(self):
        f = task(lambda x: with_sharding_constraint(x, P("batch", "mlp")), task=self.STAGE)
        with self.make_mesh() as multimesh, tracing_for_mm_jit():
            (found,) = self.constraints(f, jnp.ones((4, 4)))
            assert found == NamedSharding(multimesh.slice(stage=1), P(None, "model"))

    def test_in_a_task_otherwise_nothing_happens(self):
        x = jnp.ones((4, 4))
        f = task(lambda x: with_sharding_constraint(x, P("batch", "mlp")), task=self.STAGE)
        assert f(x) is x
        assert self.constraints(f, x) == []

    @pytest.mark.parametrize("inside_mm_jit", [False, True])
    def test_outside_a_task_it_is_that_of_jax(self, inside_mm_jit):
        with (
            self.make_mesh() as multimesh,
            tracing_for_mm_jit() if inside_mm_jit else contextlib.nullcontext(),
        ):
            (found,) = self.constraints(lambda x: with_sharding_constraint(x, P("model")), jnp.ones(4))
            assert found == NamedSharding(multimesh.mesh, P("model"))
            with pytest.raises(ValueError, match="mlp") as error:
                with_sharding_constraint(jnp.ones(4), P("mlp"))
            assert "mm.task(f, task=...)" in error.value.__notes__[0]
            with pytest.raises(TypeError, match=r"not \('model',\): write P\(...\)"):
                with_sharding_constraint(jnp.ones(4), ("model",))

    def test_a_sharding_is_taken_as_it_is(self):
        sharding = NamedSharding(Mesh(jax.devices()[:2], ("x",)), P("x"))
        f = task(lambda x: with_sharding_constraint(x, sharding), task=self.STAGE)
        assert self.constraints(f, jnp.ones(4)) == [sharding]
        assert f(jnp.ones(4)).sharding == sharding

    def test_trees_take_a_tree_prefix(self):
        x = {"a": jnp.ones((2, 4)), "b": [jnp.ones((2, 2)), jnp.ones(2)], "c": jnp.ones(3)}

        def f(x):
            return with_sharding_constraint(x, {"a": P(None, "mlp"), "b": P("mlp"), "c": None})

        with self.make_mesh(), tracing_for_mm_jit():
            wrapped = task(f, task=self.STAGE)
            assert [s.spec for s in self.constraints(wrapped, x)] == [
                P(None, "model"),
                P("model"),
                P("model"),
            ]
            assert jax.tree.structure(jax.eval_shape(wrapped, x)) == jax.tree.structure(x)
            with pytest.raises(ValueError, match=r"(?i)mismatch|custom node|prefix"):
                wrapped({"a": x["a"]})

    def test_in_the_backward_rule_of_a_custom_vjp(self):
        def constrained(x):
            return with_sharding_constraint(x, P("mlp"))

        @jax.custom_vjp
        def double(x):
            return 2 * x

        double.defvjp(lambda x: (2 * x, None), lambda _, ct: (constrained(2 * ct),))
        f = jax.grad(lambda x: jnp.sum(task(double, task=self.STAGE)(x)))
        with self.make_mesh() as multimesh, tracing_for_mm_jit():
            assert self.constraints(f, jnp.ones(4)) == [NamedSharding(multimesh.slice(stage=1), P("model"))]

    def test_in_a_registered_scope(self):
        multimesh = self.make_mesh()
        multimesh.register_task("mlp", task=self.STAGE)
        f = jax.named_scope("mlp")(lambda x: with_sharding_constraint(x, P("mlp")))
        with multimesh, tracing_for_mm_jit():
            assert self.constraints(f, jnp.ones(4)) == [NamedSharding(multimesh.slice(stage=1), P("model"))]

    def test_inside_a_jitted_function_of_a_task(self):
        inner = jax.jit(lambda x: with_sharding_constraint(x, P("mlp")))
        f = task(lambda x: inner(x), task=self.STAGE)
        with self.make_mesh() as multimesh, tracing_for_mm_jit():
            (jitted,) = jax.make_jaxpr(f)(jnp.ones(4)).eqns
            (found,) = jitted.params["jaxpr"].eqns
            assert found.params["sharding"] == NamedSharding(multimesh.slice(stage=1), P("model"))

    def test_values_and_gradients_do_not_change(self):
        f = task(lambda x: jnp.sum(jnp.sin(with_sharding_constraint(x, P("mlp")))), task=self.STAGE)
        x = jnp.arange(4.0)
        np.testing.assert_array_equal(jax.grad(f)(x), jnp.cos(x))
        with self.make_mesh(), tracing_for_mm_jit():
            np.testing.assert_allclose(jax.jit(jax.grad(f))(x), jnp.cos(x), rtol=1e-6)
            np.testing.assert_allclose(jax.vmap(jax.jit(f))(x[None]), jnp.sum(jnp.sin(x))[None], rtol=1e-6)

    def test_an_entry_beyond_the_dimensions_of_an_array(self):
        """As JAX does it refuses one for which there is a mesh axis."""
        constrained = task(lambda x, spec: with_sharding_constraint(x, spec), task=self.STAGE)
        said = (
            r"P\('batch', 'mlp'\) is too long for an array with ndim=1: there is no dimension to shard over "
        )
        with self.make_mesh() as multimesh, tracing_for_mm_jit():
            assert self.constraints(lambda x: constrained(x, P("mlp", "batch", None)), jnp.ones(4)) == [
                NamedSharding(multimesh.slice(stage=1), P("model"))
            ]
            with pytest.raises(ValueError, match=said + "'model', which 'mlp' stands for in task 'stage1'"):
                constrained(jnp.ones(4), P("batch", "mlp"))

    @pytest.mark.parametrize("spec", ["mlp", ("mlp",), ["mlp"]])
    def test_what_is_no_spec(self, spec):
        with pytest.raises(TypeError, match=r"a PartitionSpec, not .*'mlp'.*: write P\("):
            with_sharding_constraint(jnp.ones(4), spec)
