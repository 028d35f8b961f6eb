"""TaskSharding: which rule places which state, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mmnnx.sharding import MultiMesh, PlacementError, Task, TaskMesh, TaskSharding, path

P = PartitionSpec
STAGES = [Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(4)]


@pytest.fixture(autouse=True)
def multimesh():
    with MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model")) as mesh:
        yield mesh


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class TestRules:
    def test_first_match_wins(self):
        placement = TaskSharding(
            {
                path("a", "kernel"): (STAGES[0], P("model")),
                path("a"): STAGES[1],
                nnx.Param: STAGES[2],
                ...: STAGES[3],
            }
        )
        found = [
            placement.lookup(("a", "kernel"), array(2)),
            placement.lookup(("a", "bias"), array(2)),
            placement.lookup(("b",), nnx.Param(jnp.ones(2))),
            placement.lookup(("b",), nnx.BatchStat(jnp.ones(2))),
        ]
        assert [match.task for match in found] == STAGES
        assert [match.index for match in found] == [0, 1, 2, 3]
        assert all(match.own for match in found)

    def test_any_nnx_filter_is_a_key(self):
        placement = TaskSharding(
            [
                ([nnx.BatchStat, "tagged"], STAGES[0]),
                (lambda path, value: path[-1] == "kernel", STAGES[1]),
                (nnx.Not(nnx.Param), STAGES[2]),
                (True, STAGES[3]),
            ]
        )
        assert placement.lookup(("x",), nnx.BatchStat(jnp.ones(2))).index == 0
        assert placement.lookup(("kernel",), nnx.Param(jnp.ones(2))).index == 1
        assert placement.lookup(("x",), jnp.ones(2)).index == 2
        assert placement.lookup(("x",), nnx.Param(jnp.ones(2))).index == 3
        assert hash(placement) == hash(placement)

    def test_a_state_of_rules(self):
        state = nnx.State({"a": {"kernel": (STAGES[0], P("model"))}, "b": {"kernel": STAGES[1]}})
        placement = TaskSharding(state)
        assert placement.lookup(("a", "kernel"), array(2)).task == STAGES[0]
        assert placement.lookup(("b", "kernel"), array(2)).task == STAGES[1]

    def test_sharding_is_on_the_mesh_of_the_task(self, multimesh):
        placement = TaskSharding({path("a"): (STAGES[2], P(None, "model"))})
        expected = NamedSharding(multimesh.slice(stage=2), P(None, "model"))
        assert placement.lookup(("a",), array(3, 4)).sharding == expected
        assert placement.map_prefix(("a",), array(3, 4)) == expected

    def test_is_a_value(self):
        def make(spec):
            return TaskSharding({path("a"): (STAGES[0], spec)})

        assert make(P("model")) == make(P("model"))
        assert hash(make(P("model"))) == hash(make(P("model")))
        assert make(P("model")) != make(None)
        assert make(None) == TaskSharding([(path("a"), STAGES[0])])
        assert repr(make(None)).startswith("TaskSharding({path('a'): (task 'stage0', ")
        assert isinstance(make(None), nnx.StateSharding)
        assert make(None).filters == (path("a"),)
        assert make(None).rules == ((STAGES[0], None),)

    @pytest.mark.parametrize(
        "rule",
        [
            P("model"),
            None,
            "stage0",
            (P("model"), STAGES[0]),
            (STAGES[0], "model"),
            (),
            (STAGES[0], None, None),
        ],
    )
    def test_refuses_other_values(self, rule):
        with pytest.raises(TypeError, match=r"path\('a'\) has"):
            TaskSharding({path("a"): rule})

    def test_refuses_unconstrained(self):
        with pytest.raises(TypeError, match=r"path\('a'\).*UNCONSTRAINED"):
            TaskSharding({path("a"): (STAGES[0], P(P.UNCONSTRAINED))})

    def test_refuses_other_keys(self):
        with pytest.raises(TypeError, match=r"is an NNX filter .*not 3"):
            TaskSharding({3: STAGES[0]})

    def test_refuses_what_has_no_filters(self):
        for rules in ([..., STAGES[0]], STAGES[0]):
            with pytest.raises(TypeError, match=r"a TaskSharding is made of .*, not of .*Task\("):
                TaskSharding(rules)


class TestSpecFromMetadata:
    STAGE = Task("s", mesh_slice={"stage": 1}, logical_axes={"mlp": "model"})

    def spec(self, variable):
        return TaskSharding({...: self.STAGE}).lookup(("kernel",), variable).sharding.spec

    def test_metadata_through_the_logical_axes(self):
        assert self.spec(nnx.Param(jnp.ones((3, 4)), out_sharding=("embed", "mlp"))) == P(None, "model")
        assert self.spec(nnx.Param(jnp.ones((2, 3)), out_sharding=("model",))) == P("model")

    def test_else_replicated(self):
        assert self.spec(nnx.Param(jnp.ones((3, 4)))) == P()
        assert self.spec(array(3, 4)) == P()

    def test_errors_name_the_path(self):
        with pytest.raises(
            PlacementError, match=r"kernel \(Param.*logical axes, for task 's': dimension 0 has size 3"
        ):
            self.spec(nnx.Param(jnp.ones(3), out_sharding=("mlp",)))
        lost = TaskSharding({...: Task("s", mesh_slice={"stage": 0}, logical_axes={"mlp": "tensor"})})
        with pytest.raises(PlacementError, match=r"kernel.*'mlp' to 'tensor'.*\('stage', 'model'\)"):
            lost.lookup(("kernel",), nnx.Param(jnp.ones(4), out_sharding=("mlp",)))


class TestBadPlacement:
    def lookup(self, spec, variable, task=STAGES[1], at=("blocks", 0, "bias")):
        return TaskSharding({path("blocks", ...): (task, spec)}).lookup(at, variable)

    def test_is_a_value_error(self):
        assert issubclass(PlacementError, ValueError)

    def test_no_filter_matches(self):
        message = (
            "no filter places blocks.3.kernel (Param, float32[2, 4]). Filters, in order: path('embed'), "
            "path('blocks', range(0, 2)). path('blocks', 3) would match it"
        )
        placement = TaskSharding({path("embed"): STAGES[0], path("blocks", range(0, 2)): STAGES[1]})
        with pytest.raises(PlacementError, match=re.escape(message)):
            placement.lookup(("blocks", 3, "kernel"), nnx.Param(jnp.ones((2, 4))))
        with pytest.raises(PlacementError, match=r"path\('head'\) would match it"):
            placement.map_prefix(("head", "kernel"), array(2, 4))

    def test_one_spec_over_leaves_of_several_ranks(self):
        self.lookup(P(None, "model"), array(2, 4))
        with pytest.raises(
            PlacementError,
            match=r"blocks\.0\.bias \(float32\[4\]\) by path\('blocks', \.\.\.\): "
            r"\(task 'stage1', P\(None, 'model'\)\): "
            r"the spec has 2 entries and the shape \(4,\) has 1 dimensions",
        ):
            self.lookup(P(None, "model"), array(4))
        assert self.lookup(P("model"), array(4, 3, 3)).sharding.spec == P("model")

    def test_an_axis_the_mesh_lacks(self):
        small = Task("small", mesh=TaskMesh(devices=[0, 1], axis_names=("data",)))
        with pytest.raises(
            PlacementError, match=r"blocks\.0\.bias.*task 'small'.*no axis 'model'; it has data=2"
        ):
            self.lookup(P("model"), array(4), task=small)

    @pytest.mark.parametrize("spec", [P("model", "model"), P(("model", "model"))])
    def test_an_axis_used_twice(self, spec):
        with pytest.raises(PlacementError, match="the spec uses axis 'model' twice"):
            self.lookup(spec, array(4, 4))

    def test_a_dimension_that_does_not_divide(self):
        with pytest.raises(
            PlacementError, match="dimension 1 has size 3, which model=2 does not divide evenly"
        ):
            self.lookup(P(None, "model"), array(4, 3))
        both = Task("both", mesh=TaskMesh(devices=range(4), axis_sizes=(2, 2), axis_names=("a", "b")))
        with pytest.raises(
            PlacementError, match=r"dimension 0 has size 6, which a=2, b=2 .* a multiple of 4"
        ):
            self.lookup(P(("a", "b")), array(6), task=both)

    def test_a_filter_that_matched_nothing(self):
        placement = TaskSharding(
            {path("embd"): STAGES[0], path("a"): STAGES[1], path("b"): STAGES[2], ...: STAGES[3]}
        )
        placement.check_used({0, 1, 2})
        with pytest.raises(
            PlacementError, match=r"path\('embd'\) \(task 'stage0'\), path\('b'\) \(task 'stage2'\)"
        ):
            placement.check_used({1})


class TestLeaves:
    def test_scalars_keys_and_nested_values(self):
        placement = TaskSharding({...: (STAGES[0], P("model"))})
        assert (
            placement.lookup(("keys",), nnx.RngKey(jax.random.split(jax.random.key(0), 4), tag="x")).index
            == 0
        )
        with pytest.raises(PlacementError, match=r"key \(RngKey, key<fry>\[\]\)"):
            placement.lookup(("key",), nnx.RngKey(jax.random.key(0), tag="x"))
        with pytest.raises(PlacementError, match=r"step \(int\[\]\)"):
            placement.lookup(("step",), 3)
        placement.lookup(("pair",), nnx.Variable({"a": jnp.ones(2), "b": jnp.ones((4, 3))}))
        with pytest.raises(PlacementError, match=r"pair \(Variable, float32\[2\], float32\[3\]\)"):
            placement.lookup(("pair",), nnx.Variable({"a": jnp.ones(2), "b": jnp.ones(3)}))

    def test_tracers_and_abstract_models(self):
        placement = TaskSharding({path(..., "kernel"): (STAGES[0], P(None, "model")), ...: STAGES[1]})
        model = nnx.eval_shape(lambda: nnx.Linear(2, 4, rngs=nnx.Rngs(0)))
        matches = {p: placement.lookup(p, v).index for p, v in nnx.to_flat_state(nnx.state(model))}
        assert matches == {("kernel",): 0, ("bias",): 1}
        seen = []
        jax.jit(lambda x: seen.append(placement.lookup(("kernel",), nnx.Param(x)).index))(jnp.ones((2, 4)))
        assert seen == [0]


def test_nnx_shard_map_reads_the_specs(multimesh):
    """Tensor parallelism in one task: nnx.shard_map takes the TaskSharding where it takes a StateSharding."""

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(2, 8, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(8, 3, use_bias=False, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return self.down(jnp.sin(self.up(x)))

    placement = TaskSharding(
        {
            path("up"): (STAGES[1], P(None, "model")),
            path("down"): (STAGES[1], P("model", None)),
            ...: STAGES[1],
        }
    )
    assert placement.shardings == (P(None, "model"), P("model", None), P())
    model = MLP(nnx.Rngs(0))
    x = jnp.linspace(-1, 1, 8).reshape(4, 2)
    expected = model(x)

    @nnx.shard_map(mesh=multimesh.slice(stage=1), in_specs=(placement, P()), out_specs=P())
    def sharded(model, x):
        assert model.up.kernel.shape == (2, 4)
        return jax.lax.psum(model(x), "model")

    np.testing.assert_allclose(sharded(model, x), expected, rtol=1e-6)
    assert model.calls[...] == 2
    assert (
        model.up.kernel.get_value().sharding == placement.lookup(("up", "kernel"), model.up.kernel).sharding
    )
