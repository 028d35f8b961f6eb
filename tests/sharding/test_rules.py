"""Presets of logical rules, what overrides them, and what is said about names that fit nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mmnnx.sharding import Task
from mmnnx.sharding.logical import to_spec
from mmnnx.sharding.rules import PRESETS, axis_names, did_you_mean, logical_rules


def mesh(*axes):
    return Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(axes)), axes)


def named(*axes):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes, eager_sharding=False)


class Recurrent(nnx.Module):
    """Weights with a name that mmnnx.modules has, one that they have not, and none at all."""

    def __init__(self, rngs: nnx.Rngs):
        self.into = nnx.Linear(4, 8, kernel_init=named("embed", "state"), rngs=rngs)
        self.out = nnx.Linear(8, 4, kernel_init=named(("state", "mlp"), None), rngs=rngs)


@pytest.fixture(params=["real", "abstract"])
def model(request):
    make = lambda: Recurrent(nnx.Rngs(0))
    return make() if request.param == "real" else nnx.eval_shape(make)


class TestPresets:
    @pytest.mark.parametrize(
        ("presets", "names", "spec"),
        [
            (["data"], ("batch", "sequence", "embed"), P("data", None, None)),
            (["data"], ("embed", "mlp"), P(None, None)),
            (["fsdp"], ("embed", "mlp"), P("data", None)),
            (["fsdp"], ("batch", "sequence", "embed"), P("data", None, None)),
            (["tensor"], ("embed", "heads"), P(None, "model")),
            (["tensor"], ("embed", "kv_heads"), P(None, "model")),
            (["tensor"], ("mlp", "embed"), P("model", None)),
            (["tensor"], ("vocab", "embed"), P("model", None)),
            (["sequence"], ("batch", "sequence", "embed"), P(None, "model", None)),
            (["expert"], ("expert", "embed", "mlp"), P("expert", None, None)),
            (["fsdp", "tensor"], ("embed", "mlp"), P("data", "model")),
            (["tensor", "fsdp"], ("vocab", "embed"), P("model", "data")),
            (["fsdp", "tensor", "sequence"], ("batch", "sequence", "embed"), P("data", "model", None)),
            (["fsdp", "tensor", "expert"], ("expert", "embed", "mlp"), P("expert", "data", "model")),
        ],
    )
    def test_are_rules_of_a_task(self, presets, names, spec):
        task = Task("t", logical_axes=logical_rules(*presets))
        assert to_spec(names, task, mesh("data", "model", "expert")) == spec

    def test_do_not_contradict_each_other_so_that_any_order_of_any_of_them_is_one_mixture(self):
        forward, backward = logical_rules(*PRESETS), logical_rules(*reversed(PRESETS))
        assert forward == backward and hash(forward) == hash(backward)

    def test_none_is_no_rules(self):
        assert dict(logical_rules()) == {}

    def test_unknown(self):
        with pytest.raises(
            ValueError, match=r"no preset 'tensors' \(did you mean 'tensor'\?\): they are data"
        ):
            logical_rules("fsdp", "tensors")
        with pytest.raises(
            TypeError, match="a preset is a name, not {'mlp': 'model'}: give rules of your own"
        ):
            logical_rules({"mlp": "model"})

    def test_renamed_mesh_axes(self):
        rules = logical_rules("fsdp", "tensor", vocab="model", mesh_axes={"model": "x", "data": ["a", "b"]})
        assert rules["embed"] == rules["batch"] == ("a", "b")
        assert rules["mlp"] == "x"
        assert rules["vocab"] == "model"  # what is given by keyword says what it says
        assert logical_rules("expert", mesh_axes={"expert": None})["expert"] is None

    def test_renamed_mesh_axis_that_no_preset_uses(self):
        with pytest.raises(ValueError, match="renames 'modle', and the presets use 'data', 'model'"):
            logical_rules("fsdp", "tensor", mesh_axes={"modle": "x"})
        with pytest.raises(ValueError, match="the presets use no mesh axis"):
            logical_rules(mesh_axes={"model": "x"})


class TestKeywords:
    def test_override_and_add(self):
        rules = logical_rules("tensor", mlp=None, vocab=["model", "data"], embed="data")
        assert rules["mlp"] is None
        assert rules["vocab"] == ("model", "data")
        assert (rules["heads"], rules["embed"]) == ("model", "data")
        assert repr(rules) == (
            "LogicalRules(heads='model', kv_heads='model', mlp=None, vocab=('model', 'data'), embed='data')"
        )

    def test_misspelt(self):
        with pytest.raises(ValueError, match=r"'mpl' is no logical axis \(did you mean 'mlp'\?\): known are"):
            logical_rules("tensor", mpl="model")

    def test_a_name_of_ones_own_needs_the_model_or_the_name(self, model):
        with pytest.raises(ValueError, match=r"'state' is no logical axis: known are batch, .* give known="):
            logical_rules(state="model")
        assert logical_rules(state="model", known=model)["state"] == "model"
        assert logical_rules(state="model", known=nnx.state(model))["state"] == "model"
        assert logical_rules(frames="model", known=["frames"])["frames"] == "model"

    def test_misspelt_for_a_model(self, model):
        with pytest.raises(ValueError, match=r"'stat' is no logical axis \(did you mean 'state'\?\)"):
            logical_rules(stat="model", known=model)

    @pytest.mark.parametrize("known", ["state", [1]])
    def test_known_is_a_model_or_names(self, known):
        with pytest.raises(TypeError, match="known= is a model or logical axis names"):
            logical_rules(known=known)

    @pytest.mark.parametrize("axes", [1, ("model", None), [1]])
    def test_not_mesh_axes(self, axes):
        with pytest.raises(TypeError, match="the rule for mlp is a mesh axis, a tuple of them or None"):
            logical_rules(mlp=axes)
        with pytest.raises(TypeError, match="the rule for mesh_axes= model is a mesh axis"):
            logical_rules("tensor", mesh_axes={"model": axes})

    def test_mesh_axis_twice(self):
        with pytest.raises(ValueError, match="the rule for mlp has a mesh axis twice"):
            logical_rules(mlp=("model", "model"))

    def test_given_are_the_keywords_that_weights_may_have(self, model):
        rules = logical_rules("tensor", mlp=None, batch="data", sequence="x", state="x", known=model)
        assert rules.given == {"mlp", "state"}
        assert logical_rules(frames="x", known=["frames"]).given == set()


class TestReports:
    def test_unused(self, model):
        rules = logical_rules("tensor", "sequence", "fsdp", state=None, known=model)
        assert rules.unused(model) == ("heads", "kv_heads", "vocab")

    def test_unmentioned(self, model):
        assert logical_rules("tensor").unmentioned(model) == ("embed", "state")
        assert logical_rules("fsdp").unmentioned(model) == ("mlp", "state")
        assert logical_rules("fsdp", "tensor", state=None, known=model).unmentioned(model) == ()

    def test_a_variable_may_bring_its_own_rules(self):
        model = nnx.Dict(
            own=nnx.Param(
                jnp.ones((2, 2)),
                out_sharding=("embed", "mlp"),
                sharding_rules=[("mlp", "x")],
                eager_sharding=False,
            )
        )
        assert logical_rules().unmentioned(model) == ("embed",)

    def test_names_of_a_variable(self):
        def names(out_sharding):
            return axis_names(nnx.Param(jnp.ones((2, 2)), out_sharding=out_sharding, eager_sharding=False))

        assert names(("embed", None)) == {"embed"}
        assert names((("a", "b"), P.UNCONSTRAINED)) == {"a", "b"}
        assert names(NamedSharding(mesh("x"), P("x"))) == {"x"}
        assert axis_names(nnx.Param(jnp.ones(2))) == set()

    def test_suggestion(self):
        assert did_you_mean("blcoks", ["embed", "blocks"]) == " (did you mean 'blocks'?)"
        assert did_you_mean("xyz", ["embed", 3]) == ""
