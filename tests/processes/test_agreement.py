"""What processes say of programs that differ, in one line."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mmnnx as mm
from mmnnx.mpmd.distributed import agreement
from mmnnx.mpmd.distributed.agreement import EXCERPT, _difference, _fingerprint

LONG = "x" * 3 * EXCERPT


@pytest.mark.parametrize(
    ("text", "other", "said"),
    [
        ("step: 2 calls\na\nb", "step: 3 calls\na\nc", "line 3 is 'b' in process 0, and 'c' in process 2"),
        (
            "step: 2 calls\na",
            "step: 3 calls\na",
            "line 1 is 'step: 2 calls' in process 0, and 'step: 3 calls'",
        ),
        ("step\na", "step\na\nb", "line 3 is missing in process 0, and 'b' in process 2"),
        (
            f"step\nb = dot[dimensions=(([2], [0]), ([], []))] {LONG}",
            f"step\nb = dot[\n  dimensions=(([2], [0]), ([], []))\n  precision=HIGH\n] {LONG}",
            "([], []))] xxx",
        ),
        (
            f"step\n{LONG} mul 1.0 {LONG}",
            f"step\n{LONG} mul 2.0 {LONG}",
            f"line 2 is '...{'x' * 35} mul 1.0 {'x' * 36}...' in process 0, and '...{'x' * 35} mul 2.0 ",
        ),
    ],
)
def test_the_first_line_that_differs_is_named_with_what_is_around_it(text, other, said):
    """The first line of all counts what a program has: it is named only if no other differs."""
    message = _difference(text, other, 2)
    assert said in message and len(message) < 400


def test_what_is_placed_nowhere_each_process_runs_by_itself(monkeypatch):
    """As under `nnx.jit`: its results are whole in each. What reads something placed is a program."""
    placed = jax.device_put(np.ones(3), NamedSharding(Mesh(jax.devices()[:1], ("x",)), PartitionSpec()))
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def is_program(f, *args):
        return mm.jit(f)._flat_traced(*args).split().prepare is not None

    assert not is_program(lambda rngs: jax.random.normal(rngs.params(), (2,)), nnx.Rngs(0))
    assert is_program(lambda x: x + 1, placed)
    assert is_program(lambda x: x + placed, np.ones(3))


def are_same(x, y):
    one, other = _fingerprint("x", x), _fingerprint("y", y)
    return not agreement._differ(one.numbers, other.numbers, one.near)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.complex64, np.float64])
def test_values_that_differ_by_more_than_rounding(dtype):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(64, 33)).astype(dtype)
    rounded = (x * (1 + float(jnp.finfo(dtype).eps) * draw.choice([-1, 0, 1], x.shape))).astype(dtype)
    assert (rounded != x).any() and are_same(x, rounded) and are_same(x, x.copy())
    assert not are_same(x, x[::-1]) and not are_same(x, 2 * x) and not are_same(x, -x)
    odd = np.where(x > 1, np.inf, x).astype(dtype)
    assert are_same(odd, odd.copy()) and not are_same(odd, x) and not are_same(odd, odd[::-1])
    for value in (np.nan, -np.inf):
        assert not are_same(odd, np.where(x > 1, value, x).astype(dtype))


def test_values_that_are_compared_exactly():
    x = np.arange(100)
    assert are_same(x, x.copy()) and not are_same(x, np.where(x == 50, 51, x))
    assert are_same(True, True) and not are_same(True, False) and not are_same(3, 4)
    assert are_same(jax.random.key(0), jax.random.key(0)) and not are_same(
        jax.random.key(0), jax.random.key(1)
    )
    assert are_same(0.1, 0.1) and not are_same(0.1, 0.11)
    assert are_same(np.zeros((0, 3)), np.zeros((0, 3)))
    assert are_same(np.array([1e300]), np.array([1e300]))
    x = np.random.default_rng(0).normal(size=(2, 512)).astype(jnp.float8_e5m2)
    assert are_same(x[0], x[0].copy()) and not are_same(x[0], x[1])


def test_of_large_arrays_blocks_are_compared(monkeypatch):
    monkeypatch.setattr(agreement, "_BLOCK", 7)
    monkeypatch.setattr(agreement, "_BLOCKS", 5)
    agreement._weights.cache_clear()
    for dtype in (np.float32, np.int32):
        x = np.arange(100).astype(dtype)
        assert [block[0] for block in agreement._blocks(x)] == [0, 21, 42, 63, 84]
        assert are_same(x, x.copy()) and not are_same(x, x + 1) and not are_same(x, x[::-1])
    monkeypatch.undo()
    agreement._weights.cache_clear()
