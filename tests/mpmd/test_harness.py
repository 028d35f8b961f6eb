"""The harness itself: what the parity check must see, it sees."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.mpmd.parity import assert_same, differences

TREE = {
    "big": np.array([100.0, -50.0], np.float32),
    "small": np.array([1e-3, 2e-3], np.float32),
    "n": np.int32(3),
}


@pytest.mark.parametrize(
    "name, value",
    [
        ("big", np.array([100.0, -50.002], np.float32)),
        ("small", np.array([1e-3, 2.02e-3], np.float32)),
        ("small", np.array([1e-3, np.nan], np.float32)),
        ("small", np.array([[1e-3, 2e-3]], np.float32)),
        ("small", np.array([1e-3, 2e-3], np.float16)),
        ("n", np.int32(4)),
    ],
)
def test_a_difference_is_named_with_its_path(name, value):
    wrong = differences({**TREE, name: value}, TREE, rtol=1e-5)
    assert len(wrong) == 1 and wrong[0].startswith(f"['{name}']")
    with pytest.raises(AssertionError, match=name):
        assert_same({**TREE, name: value}, TREE)


def test_missing_and_unexpected_leaves_are_named():
    (text,) = differences({"big": TREE["big"], "other": np.ones(1)}, TREE, rtol=1e-5)
    assert "small" in text and "other" in text


def test_rounding_is_allowed():
    close = {
        **TREE,
        "big": np.array([100.0, -50.0005], np.float32),
        "small": TREE["small"] * np.float32(1 + 1e-6),
    }
    assert not differences(close, TREE, rtol=1e-5)


def test_keys_and_counters_of_models_are_compared():
    one, other = (nnx.Dropout(0.5, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    assert any("key" in text for text in differences(one, other, rtol=1e-5))
    one(jnp.ones(3))
    assert any("count" in text for text in differences(one, nnx.Dropout(0.5, rngs=nnx.Rngs(0)), rtol=1e-5))
