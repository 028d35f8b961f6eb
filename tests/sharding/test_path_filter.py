"""Paths of state and the filters that match them."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from mmnnx.sharding import MultiMesh, PlacementError, Task, TaskSharding, path
from mmnnx.sharding.path_filter import is_catch_all

P = PartitionSpec
STAGES = [Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(4)]


@pytest.fixture(autouse=True)
def multimesh():
    with MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model")) as mesh:
        yield mesh


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class TestPath:
    @pytest.mark.parametrize(
        ("pattern", "state", "covered"),
        [
            (path("embed"), ("embed", "kernel"), True),
            (path("embed"), ("embed",), True),
            (path("embed"), ("embedding",), False),
            (path("embed"), ("a", "embed"), False),
            (path("a", "b"), ("a",), False),
            (path(...), (), True),
            (path(), ("a",), True),
            (path(..., "kernel"), ("kernel",), True),
            (path(..., "kernel"), ("a", 0, "kernel", "rest"), True),
            (path(..., "kernel"), ("a", 0, "bias"), False),
            (path("blocks", range(0, 2), ..., "kernel"), ("blocks", 1, "mlp", "up", "kernel"), True),
            (path("blocks", range(0, 2), ..., "kernel"), ("blocks", 2, "mlp", "kernel"), False),
            (path("blocks", range(0, 2), ..., "kernel"), ("blocks", "1", "kernel"), True),
            (path("blocks", {"0", 3}), ("blocks", 0), True),
            (path("blocks", {"0", 3}), ("blocks", "3"), True),
            (path("blocks", ["q", "k"]), ("blocks", "v"), False),
            (path(("q", "k")), ("k",), True),
            (path(..., "a", ..., "a"), ("a", "b"), False),
            (path(..., "a", ..., "a"), ("x", "a", "b", "a"), True),
        ],
    )
    def test_examples(self, pattern, state, covered):
        assert pattern(state, None) is covered

    @given(
        st.lists(
            st.one_of(
                st.just(...),
                st.sampled_from(["a", "b", 0, 1]),
                st.builds(range, st.integers(0, 2), st.integers(0, 3)),
                st.sets(st.sampled_from(["a", "b", 0, "1"]), min_size=1),
            ),
            max_size=4,
        ),
        st.lists(st.sampled_from(["a", "b", 0, 1, "0", "1"]), max_size=5),
    )
    def test_agrees_with_writing_out_every_run(self, pattern, state):
        """Each `...` replaced by each number of free keys, then compared key by key."""

        def allowed(key):
            if isinstance(key, str | int):
                return {str(key)}
            return {str(k) for k in key}

        texts = list(map(str, state))
        runs = sum(key is ... for key in pattern)
        expected = False
        for lengths in itertools.product(range(len(state) + 1), repeat=runs):
            length = iter(lengths)
            written_out = [
                w for key in pattern for w in ([None] * next(length) if key is ... else [allowed(key)])
            ]
            expected |= len(written_out) <= len(texts) and all(
                wanted is None or text in wanted for wanted, text in zip(written_out, texts, strict=False)
            )
        assert path(*pattern)(tuple(state), None) is expected

    def test_is_a_value(self):
        assert path("a", range(2), ...) == path("a", range(2), ...)
        assert hash(path("a", {"b"}, ["c"])) == hash(path("a", frozenset({"b"}), ("c",)))
        assert path("a") != path("b")
        assert repr(path("blocks", range(0, 2), ..., 3)) == "path('blocks', range(0, 2), ..., 3)"

    def test_is_an_nnx_filter(self):
        model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
        first, rest = nnx.state(model, path("layers", 0), ...)
        assert len(jax.tree.leaves(first)) == len(jax.tree.leaves(rest)) == 2

    @pytest.mark.parametrize("key", [1.5, None, {"a": 1}, [1.5], slice(0, 2)])
    def test_refuses(self, key):
        with pytest.raises(TypeError, match=r"path\(\) takes attribute names"):
            path("a", key)

    def test_refuses_to_count_from_the_end(self):
        with pytest.raises(ValueError, match="counted from the front"):
            path("blocks", -1)

    def test_explains_keys_in_one(self):
        unused = TaskSharding({path("a.b"): Task("first"), ...: Task("second")})
        with pytest.raises(PlacementError, match=r"path\('a', 0\), not path\('a.0'\)"):
            unused.check_used({1})
        for plain in (path("a", ..., "b"), nnx.Param):  # which print dots of their own
            with pytest.raises(PlacementError) as error:
                TaskSharding({plain: Task("first"), ...: Task("second")}).check_used({1})
            assert "one key at a time" not in str(error.value)

    def test_explains_slices(self):
        with pytest.raises(TypeError, match=r"write range\(start, stop\)"):
            path("a", slice(0, 2))

    @pytest.mark.parametrize(
        "filter", [..., True, nnx.filterlib.Everything(), path(...), path(), path(..., ...)]
    )
    def test_catches_all(self, filter):
        assert is_catch_all(filter)

    @pytest.mark.parametrize("filter", [path("a"), path(..., "a"), nnx.Param, "params", None, False, 1])
    def test_does_not_catch_all(self, filter):
        assert not is_catch_all(filter)
