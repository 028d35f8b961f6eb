"""What crosses between meshes: together where it can, and without anybody waiting for it."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx import _compat
from mmnnx.mpmd.runtime import transfers
from tests.mpmd.parity import MOMENTUM, assert_parity, assert_same, born, pipeline, place, values
from tests.slow import all_but, few, grid

WIDTH = 8
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)


class Encoded(nnx.Module):
    """Its first stage makes three values for the second, one of them large."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.heads = nnx.List(nnx.Linear(WIDTH, n, rngs=rngs) for n in (WIDTH, 1, 1))
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        h, gate, scale = (jnp.tanh(head(x)) for head in self.heads)
        return self.layer(h) * gate + jnp.sin(self.layer(h)) * scale


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


PLACES = (["heads"], ["layer"])


@pytest.fixture
def copies(monkeypatch):
    """Grows by the number of arrays in each call that copies some."""
    counts = []
    copy = _compat.copy_to

    def counted(arrays, shardings):
        counts.append(len(arrays))
        return copy(arrays, shardings)

    monkeypatch.setattr(_compat, "copy_to", counted)
    return counts


@few(1)
@pytest.mark.parametrize("per_stage", [(), (2,)], ids=["one device a stage", "two"])
def test_arrays_that_cross_together_travel_together(copies, per_stage):
    """One call for each of the ways between the stages and each microbatch, whatever crosses there."""
    mesh, tasks = pipeline(2, *per_stage)
    program = assert_parity(
        *(Encoded, loss_fn, X, place(tasks, *PLACES)),
        **dict(mesh=mesh, microbatch=2, optimizer=MOMENTUM, steps=1, schedule="1f1b"),
    )
    ways = {(t.source, t.target, t.microbatch) for t in program.transfers}
    assert len(ways) == 8 and len(program.transfers) == 3 * len(ways)
    assert len(copies) == len(ways) and sum(copies) == len(program.transfers)


@pytest.mark.slow
def test_keys_travel_as_well(copies):
    """A typed PRNG key cannot be copied shard by shard: it goes by itself, and the others together."""
    mesh, tasks = pipeline(2)

    class Noisy(nnx.Module):
        def __init__(self):
            self.inner = Encoded()
            self.key = nnx.Variable(jax.random.key(0))

    def step(model, x):
        key = jax.random.fold_in(model.key[...], 1)
        noise = jax.random.uniform(key, (WIDTH,)) * model.inner.layer.bias[...]
        return model.inner(x) + noise, key

    with mesh:
        placement = place(tasks, [("inner", "heads"), "key"], [("inner", "layer")])
        split = mm.jit(step)(born(Noisy, placement), X)
    whole = nnx.jit(step)(nnx.jit(Noisy)(), X)
    np.testing.assert_allclose(split[0], whole[0], rtol=1e-6)
    assert jnp.array_equal(jax.random.key_data(split[1]), jax.random.key_data(whole[1]))
    assert copies and max(copies) >= 2


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(((1,), (1,)), marks=pytest.mark.slow),
        ((2,), (4,)),
        pytest.param(((2,), (2,)), marks=pytest.mark.slow),
    ],
)
def test_a_call_returns_before_the_work_is_done(sizes):
    """Nothing in a step waits for a device, also where layouts differ on the two sides."""
    start, tasks = 0, []
    for n, (size,) in enumerate(sizes):
        devices = np.array(jax.devices()[start : start + size])
        tasks.append(mm.Task(f"stage{n}", mesh=jax.sharding.Mesh(devices, ("model",))))
        start += size
    width = 512

    class Deep(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List(nnx.Linear(width, width, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            for layer in self.layers:
                for _ in range(12):
                    x = jnp.tanh(layer(x))
            return x

    def step(model, x):
        grad_fn = nnx.value_and_grad(loss_fn)
        return mm.microbatch(grad_fn, dim=0, size=256, argnum=1, schedule="1f1b")(model, x)

    x = np.ones((1024, width), np.float32)
    rules = {mm.path("layers", 0, "kernel"): (tasks[0], P(None, "model"))}
    rules |= {mm.path("layers", n): (task, P("model")) for n, task in enumerate(tasks)}
    placement = mm.TaskSharding(rules)
    model = born(Deep, placement)
    jitted = mm.jit(step)
    jax.block_until_ready(jitted(model, x))
    loss, grads = jitted(model, x)
    pending = [leaf for leaf in jax.tree.leaves((loss, grads)) if not leaf.is_ready()]
    assert pending, "the call waited for the devices"
    jax.block_until_ready(grads)


@pytest.mark.parametrize("where, home", grid(["another stage", "both"], [0, 1], step=2))
def test_slices_of_a_sharded_batch_that_other_stages_read(home, where):
    """They arrive with the layout that those stages were compiled for, whatever it is at home."""
    mesh, tasks = pipeline(2, 2, axes=("data",))
    placement = place(tasks, ["heads"], ["layer"])

    def loss_fn(model, batch):
        own = model.layer(jnp.tanh(model.heads[0](batch["x"])))
        if where == "both":
            own = own * model.heads[0](batch["y"])
        return jnp.mean(own * model.layer(batch["y"]))

    def loss(model, batch):
        return mm.microbatch(nnx.value_and_grad(loss_fn), dim=0, size=4, argnum=1, reduce="mean")(
            model, batch
        )

    with mesh:
        there = NamedSharding(mesh.slice(stage=home), P("data"))
        batch = {"x": X, "y": jax.device_put(X, there)}
        got = mm.jit(loss)(born(Encoded, placement), batch)
    assert_same(got, nnx.jit(loss)(Encoded(), {"x": X, "y": X}))


@pytest.mark.parametrize("shapes", [((2, 2), (2, 2)), ((2,), (4,)), ((4,), (2,))])
@pytest.mark.parametrize("given", [P(), P("a"), P(None, "a")])
@pytest.mark.parametrize("asked", [P(), P("a"), P(None, "a")])
def test_any_layout_to_any_other(shapes, given, asked):
    devices = np.array(jax.devices())
    first, second = (
        Mesh(d.reshape(shape), ("a", "b")[: len(shape)])
        for d, shape in zip((devices[:4], devices[4:]), shapes)
        for d in [d[: np.prod(shape)]]
    )
    source, target = NamedSharding(first, given), NamedSharding(second, asked)
    x = jax.device_put(np.arange(64.0).reshape(8, 8), source)
    (out,) = transfers.sender([(source, target, x.aval)])(x)
    assert out.sharding.is_equivalent_to(target, 2)
    np.testing.assert_array_equal(out, x)
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(x)[shard.index])


class Scaled(nnx.Module):
    """A residual chain, every step of it scaled by one number."""

    def __init__(self, kind):
        self.layers = nnx.List(nnx.Linear(8, 8, rngs=nnx.Rngs(n)) for n in range(4))
        make = {"parameter": nnx.Param, "variable": nnx.Variable}.get(kind)
        self.scale = 0.5 if make is None else make(jnp.float32(0.5))

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x)) * self.scale
        return x


def test_a_value_of_an_earlier_trace():
    """NNX leaves a plain array that a Module makes inside of a jit as a tracer."""
    mesh, tasks = pipeline(2)

    def make():
        model = Scaled("number")
        model.scale = jnp.float32(0.5)
        return model

    def step(model, x):
        grad_fn = nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))
        return mm.microbatch(grad_fn, 0, 2, argnum=1, reduce="mean")(model, x)

    with mesh:
        paths = [[("layers", range(2))], [("layers", range(2, 4))]]
        model = mm.jit(make, out_shardings=place(tasks, *paths))()
        if isinstance(model.scale, jax.core.Tracer):
            with pytest.raises(ValueError, match="step reads a value of another trace.*make it a Variable"):
                mm.jit(step)(model, jnp.ones((8, 8)))
        else:
            assert jnp.isfinite(mm.jit(step)(model, jnp.ones((8, 8)))[0])


@pytest.mark.parametrize("kind", all_but(["number"], ["number", "variable", "parameter"]))
def test_a_scalar_of_all_stages_brings_no_second_gradient(kind):
    """One activation goes forward and one gradient comes back, though each stage scales it."""
    mesh, tasks = pipeline(4)
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)

    def step(model, x):
        grad_fn = nnx.value_and_grad(lambda model, x: jnp.mean((model(x) - 1) ** 2))
        return mm.microbatch(grad_fn, 0, 2, argnum=1, reduce="mean", schedule="1f1b")(model, x)

    expected = nnx.jit(step)(Scaled(kind), x)
    with mesh:
        model = born(lambda: Scaled(kind), place(tasks, *([("layers", n)] for n in range(4))))
        run = mm.jit(step)
        assert_same(values(run(model, x)), values(expected))
        sent = Counter((t.source, t.target) for t in run.program(model, x).transfers if t.shape == (2, 8))
    assert set(sent.values()) == {4} and len(sent) == 6
