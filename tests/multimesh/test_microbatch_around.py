"""What stands around a loop of microbatch: the rest of a train step, donation, transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from multimesh_compat.jax import (
    microbatch,
)
from tests.multimesh.loops import (
    FOUR,
    GRAD,
    MESHES,
    TWO,
    assert_same,
    by_hand,
    check,
    check_loop,
    in_stage,
    loss_fn,
    make_batch,
    make_params,
    meshes_of,
    multimesh,
    normal,
    register_layers,
    unsplit,
)
from tests.slow import few

# Work around the loop


def adam(params, moments, grads):
    """One step of Adam on clipped gradients, by hand."""
    first, second, count = moments
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, second, grads)
    move = lambda p, m, v: p - 0.1 * m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.99**count)) + 0.1)
    return jax.tree.map(move, params, first, second), (first, second, count)


def normalised(batch):
    x, y = batch
    return (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-3), y


def train_step(grad_fn):
    """Normalises a batch, takes gradients, and updates parameters and moments."""

    def step(params, moments, batch):
        loss, grads = grad_fn(params, normalised(batch))
        return (*adam(params, moments, grads), loss)

    return step


def fresh_state(count):
    params = jax.tree.map(jnp.asarray, make_params(count))
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)
    return params, (zeros(), zeros(), jnp.int32(0))


PLAIN_STEP = jax.jit(train_step(lambda params, batch: by_hand(GRAD, params, batch, argnum=1)))


@few(1)
@pytest.mark.parametrize("sizes", [TWO, FOUR], ids=["2x2x2", "4x2x1"])
def test_work_before_and_after_the_loop(sizes):
    """Each stage normalises what it reads, and updates its own parameters and moments; they stay with it."""
    register_layers()
    state, batch = fresh_state(sizes[0]), make_batch()
    expected = state
    with multimesh(sizes):
        step = mm.jit(train_step(microbatch(GRAD, 0, 2, argnum=1, schedule="1f1b")))
        program = step.program(*state, batch)
        for _ in range(3):
            *state, loss = step(*state, batch)
            *expected, expected_loss = PLAIN_STEP(*expected, batch)
            assert_same((state, loss), (expected, expected_loss))
    assert meshes_of(program) == MESHES[sizes]
    phases = [call.phase for call in program.calls if call.microbatch is None]
    assert phases and set(phases) == {"none"}
    params, (first, second, _) = state
    for tree in (params, first, second):
        for layer, ids in zip(tree, MESHES[sizes]):
            assert all({d.id for d in leaf.sharding.device_set} == set(ids) for leaf in layer)


def test_tasks_before_and_after_the_loop():
    """Both are tasks of their own, one of them on another stage than what it feeds."""
    register_layers()
    update = lambda layer, grad: jax.tree.map(lambda p, g: p - 0.1 * g, layer, grad)

    def build(in_stage):
        def step(params, batch, grad_fn):
            _, grads = grad_fn(params, in_stage(normalised, 1)(batch))
            return [in_stage(update, i)(p, g) for i, (p, g) in enumerate(zip(params, grads))]

        return step

    params, batch = make_params(2), make_batch()
    loop = microbatch(GRAD, 0, 2, argnum=1, schedule="1f1b")
    expected = build(unsplit)(params, batch, lambda *args: by_hand(GRAD, *args, argnum=1))
    program = check(lambda *args: build(in_stage)(*args, loop), expected, params, batch)
    assert program.calls[0].mesh.devices.flat[0].id == 4  # where the batch is normalised


def test_two_loops_in_one_function():
    """A step and then a validation with the new parameters, in larger microbatches."""
    register_layers()

    def step(train, validate):
        def run(params, batch):
            loss, grads = train(params, batch)
            params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
            return params, loss, validate(params, batch)

        return run

    params, batch = make_params(2), make_batch()
    loops = microbatch(GRAD, 0, 2, 1, schedule="1f1b"), microbatch(loss_fn, 0, 4, 1, schedule="gpipe")
    program = check(step(*loops), step(GRAD, loss_fn)(params, batch), params, batch)
    assert [(loop.schedule, loop.length) for loop in program.loops] == [("1f1b", 4), ("gpipe", 2)]


def test_steps_in_a_scan():
    """Several train steps in one call: a scan whose body is a loop."""
    register_layers()

    def steps(grad_fn):
        def step(params, batch):
            loss, grads = grad_fn(params, batch)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

        return lambda params, batches: jax.lax.scan(step, params, batches)

    params, batches = make_params(2), (normal(3, 8, 4), normal(3, 8, 4))
    program = check(
        steps(microbatch(GRAD, 0, 2, 1, schedule="1f1b")), steps(GRAD)(params, batches), params, batches
    )
    assert [loop.schedule for loop in program.loops] == ["1f1b"] * 3


# Donation


@few(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h2"])
@pytest.mark.parametrize("placed", [False, True], ids=["on one device", "on their stages"])
def test_donated_state_is_gone_and_its_successor_right(placed, schedule):
    """Every array of parameters and moments, in each of three steps."""
    register_layers()
    mesh, state, batch = multimesh(TWO), fresh_state(2), make_batch()
    expected = jax.tree.map(jnp.copy, state)
    if placed:
        put = lambda tree: [
            jax.device_put(layer, NamedSharding(mesh.slice(stage=i), P())) for i, layer in enumerate(tree)
        ]
        params, (first, second, count) = state
        state = put(params), (put(first), put(second), count)
    with mesh:
        grad_fn = microbatch(GRAD, 0, 2, argnum=1, schedule=schedule)
        step = mm.jit(train_step(grad_fn), donate_argnums=(0, 1))
        assert meshes_of(step.program(*state, batch)) == MESHES[TWO]
        for _ in range(3):
            donated = jax.tree.leaves(state)
            *state, loss = step(*state, batch)
            *expected, expected_loss = PLAIN_STEP(*expected, batch)
            assert all(leaf.is_deleted() for leaf in donated)
            assert_same((state, loss), (expected, expected_loss))


def test_what_is_not_donated_stays():
    register_layers()
    state, batch = fresh_state(2), make_batch()
    with multimesh(TWO):
        mm.jit(train_step(microbatch(GRAD, 0, 2, argnum=1)), donate_argnums=0)(*state, batch)
    params, moments = state
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert not any(
        leaf.is_deleted() for leaf in jax.tree.leaves((moments, batch)) if hasattr(leaf, "is_deleted")
    )


def test_a_donated_batch():
    register_layers()
    params, batch = make_params(2), make_batch()
    expected = GRAD(params, batch)
    with multimesh(TWO):
        step = mm.jit(microbatch(GRAD, 0, 2, argnum=1, schedule="1f1b"), donate_argnums=1)
        for _ in range(2):
            once = jax.tree.map(jnp.array, batch)
            assert_same(step(params, once), expected)
            assert all(leaf.is_deleted() for leaf in once)


def test_donated_twice():
    """The message says which, and that it is gone."""
    register_layers()
    state, batch = fresh_state(2), make_batch()
    with multimesh(TWO):
        step = mm.jit(train_step(microbatch(GRAD, 0, 2, argnum=1)), donate_argnums=0)
        step(*state, batch)
        with pytest.raises(ValueError, match=r"0\.0\.0 was donated"):
            step(*state, batch)


# Transformations


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_transformations_around_loss_and_loop(around):
    """Of the function that the loop runs, and of the loop itself: its schedule holds."""
    register_layers()
    params, batch = make_params(2), make_batch()
    for fun in (
        microbatch(around(GRAD), 0, 2, 1, schedule="1f1b"),
        around(microbatch(GRAD, 0, 2, 1, schedule="1f1b")),
    ):
        program = check(fun, by_hand(GRAD, params, batch, argnum=1), params, batch)
        assert [loop.schedule for loop in program.loops] == ["1f1b"]


def test_tangents():
    """Forward mode in the loop, alone and over the gradient."""
    register_layers()
    params, batch = make_params(2), make_batch()

    def tangent(params, batch):
        return jax.jvp(lambda params: loss_fn(params, batch), (params,), (params,))

    def curvature(params, batch):
        return jax.jvp(lambda params: jax.grad(loss_fn)(params, batch), (params,), (params,))

    for fun in (tangent, curvature):
        check_loop(fun, fun, params, batch, argnum=1)


def test_a_loop_in_a_gradient_is_unrolled_and_says_so():
    register_layers()
    loop = microbatch(loss_fn, 0, 2, 1, schedule="1f1b")
    params, batch = make_params(2), make_batch()
    with (
        multimesh(TWO),
        pytest.warns(UserWarning, match="mm.microbatch is inside a grad.* its schedule has no"),
    ):
        got = mm.jit(jax.value_and_grad(loop))(params, batch)
    assert_same(got, jax.value_and_grad(microbatch(loss_fn, 0, 2, 1))(params, batch))
