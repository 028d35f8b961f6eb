"""Checkpoints: what comes back is what was saved, where it lives now, and no more is kept than is wanted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mmnnx.train.checkpoint import Checkpoints


class Net(nnx.Module):
    """Two layers in a list, as the blocks of a model are, with state that is no parameter."""

    def __init__(self, seed: int):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)


def build(seed: int) -> dict:
    model = Net(seed)
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}


def arrays(nodes: dict) -> list[np.ndarray]:
    # A copy: NumPy may otherwise look into memory that a later step gives away.
    return [np.array(leaf, copy=True) for node in nodes.values() for leaf in jax.tree.leaves(nnx.state(node))]


def step(nodes: dict) -> None:
    def update(model, optimizer):
        grads = nnx.grad(lambda model: sum((layer.kernel[...] ** 2).sum() for layer in model.layers))(model)
        optimizer.update(model, grads)

    nnx.jit(update, donate_argnums=(0, 1))(nodes["model"], nodes["optimizer"])


def spread(nodes: dict) -> None:
    """Layer i to a two-device mesh of its own, its kernel split over it."""
    for i, layer in enumerate(nodes["model"].layers):
        mesh = Mesh(np.array(jax.devices()[2 * i : 2 * i + 2]), ("model",))
        layer.kernel.set_value(jax.device_put(layer.kernel[...], NamedSharding(mesh, P(None, "model"))))


def test_round_trip(tmp_path):
    nodes = build(0)
    step(nodes)
    expected = arrays(nodes)
    saved = Checkpoints(tmp_path)
    saved.save(1, nodes, {"batches": {"next_index": 7}}, val_bits_per_byte=3.0)
    saved.close()

    other = build(1)
    extra = Checkpoints(tmp_path).restore(1, other)
    assert extra == {"batches": {"next_index": 7}}
    for before, after in zip(expected, arrays(other), strict=True):
        np.testing.assert_array_equal(before, after)


def test_the_state_may_change_while_it_is_written(tmp_path):
    nodes = build(0)
    expected = arrays(nodes)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, nodes, {}, val_bits_per_byte=3.0)
    for _ in range(5):
        step(nodes)
    checkpoints.close()
    other = build(1)
    Checkpoints(tmp_path).restore(1, other)
    for before, after in zip(expected, arrays(other), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("saved_spread", [False, True])
def test_arrays_come_back_to_where_they_live_now(tmp_path, saved_spread):
    nodes, other = build(0), build(1)
    spread(nodes if saved_spread else other)
    expected = arrays(nodes)
    homes = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(other["model"]))]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, nodes, {}, val_bits_per_byte=3.0)
    checkpoints.close()
    Checkpoints(tmp_path).restore(1, other)
    assert [leaf.sharding for leaf in jax.tree.leaves(nnx.state(other["model"]))] == homes
    for before, after in zip(expected, arrays(other), strict=True):
        np.testing.assert_array_equal(before, after)


def test_latest_and_best_are_kept(tmp_path):
    nodes = build(0)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest is None
    for number, bits in enumerate([5.0, 2.0, 3.0, 4.0, 3.5], start=1):
        checkpoints.save(number, nodes, {}, val_bits_per_byte=bits)
    checkpoints.close()
    assert Checkpoints(tmp_path).steps == [2, 5]
    assert Checkpoints(tmp_path).latest == 5


def test_types_are_kept(tmp_path):
    node = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"model": node}, {}, val_bits_per_byte=1.0)
    checkpoints.close()
    other = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
    Checkpoints(tmp_path).restore(1, {"model": other})
    assert other.kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(other.kernel), np.asarray(node.kernel))
