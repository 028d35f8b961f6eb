"""What may be a task in a loop of microbatch: of every form, rematerialised, nested, in any order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import mmnnx as mm
from multimesh_compat.jax import (
    TaskMesh,
    microbatch,
    task,
)
from tests.multimesh.loops import (
    FOUR,
    GRAD,
    MESHES,
    TWO,
    WHOLE_AND_CUT,
    assert_same,
    by_hand,
    check,
    check_loop,
    in_stage,
    make_batch,
    make_params,
    meshes_of,
    normal,
    register_layers,
    unsplit,
)
from tests.slow import few, grid

# Tasks in every form


def dense(w, x):
    return jnp.tanh(x @ w)


def of_weights(build, count, *, sizes=TWO, schedules=("zero-bubble-h2",), meshes=None):
    """Checks gradients of a sum of squares of `build(in_stage)(weights, x)`; returns what it ran last."""

    def grad(in_stage):
        run = build(in_stage)
        return jax.value_and_grad(lambda weights, x: jnp.sum(run(weights, x) ** 2))

    weights, x = [normal(4, 4) for _ in range(count)], normal(8, 4)
    for schedule in schedules:
        program = check_loop(
            grad(in_stage),
            grad(unsplit),
            weights,
            x,
            argnum=1,
            schedule=schedule,
            sizes=sizes,
            meshes=meshes,
        )
    return program


def test_a_task_in_a_task():
    """The innermost is where work is done: stage 0, then 1, then 0 again."""

    def build(in_stage):
        outer = lambda w, x: jnp.sin(in_stage(dense, 1)(w[1], x @ w[0]) @ w[2])
        return in_stage(outer, 0)

    # A mesh that is visited twice is two stages: for schedules of any graph.
    program = of_weights(build, 3, schedules=["gpipe", "1f1b", "wavefront"])
    forward = dict.fromkeys(
        (c.stage, c.mesh.devices.flat[0].id) for c in program.calls if c.phase == "forward"
    )
    assert sorted(forward) == [(0, 0), (1, 4), (2, 0)]


def test_a_task_in_one_of_the_same_mesh():
    def build(in_stage):
        outer = lambda w, x: jnp.sin(in_stage(dense, 0)(w[1], x @ w[0]) @ w[2])
        return lambda w, x: in_stage(dense, 1)(w[3], in_stage(outer, 0)(w, x))

    assert len(of_weights(build, 4).table()) == 2


def test_the_same_task_twice_in_a_row():
    """One stage, of both."""

    def build(in_stage):
        first, last = in_stage(dense, 0), in_stage(dense, 1)
        return lambda w, x: last(w[2], first(w[1], first(w[0], x)))

    program = of_weights(build, 3)
    assert {call.stage for call in program.calls} == {None, 0, 1}


def test_the_same_task_twice_with_another_between():
    """With the same weights, too: their gradient is the sum of both."""

    def build(in_stage):
        first, last = in_stage(dense, 0), in_stage(dense, 1)
        return lambda w, x: last(w[1], first(w[0], last(w[1], first(w[0], x))))

    program = of_weights(build, 2, schedules=["gpipe", "interleaved-1f1b", "wavefront"])
    assert {call.stage for call in program.calls} == {None, 0, 1, 2, 3}


def test_tasks_against_the_order_of_the_stages():
    build = lambda in_stage: lambda w, x: in_stage(dense, 0)(w[1], in_stage(dense, 1)(w[0], x))
    program = of_weights(build, 2)
    first = next(call for call in program.calls if call.phase == "forward")
    assert first.mesh.devices.flat[0].id == 4


def test_two_tasks_that_join_in_a_third():
    def build(in_stage):
        def run(w, x):
            one, other = in_stage(dense, 0)(w[0], x), in_stage(dense, 1)(w[1], -x)
            return in_stage(lambda w, one, other: one @ w * other, 2)(w[2], one, other)

        return run

    of_weights(build, 3, sizes=FOUR, schedules=["gpipe", "1f1b", "wavefront"], meshes=MESHES[FOUR][:3])


@pytest.mark.parametrize("schedule", WHOLE_AND_CUT)
def test_tasks_of_trees_that_return_dicts(schedule):
    """Parameters and results are pytrees, with a Python int among the results."""

    def encode(params, x):
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        return {"hidden": hidden, "more": {"norm": jnp.sum(params["w"] ** 2), "rows": x.shape[0]}}

    def decode(params, encoded):
        out = encoded["hidden"] @ params["w"] + params["b"]
        return {"out": out, "penalty": encoded["more"]["norm"] / encoded["more"]["rows"]}

    def build(in_stage):
        def loss(params, x):
            got = in_stage(decode, 1)(params["decode"], in_stage(encode, 0)(params["encode"], x))
            return jnp.sum(got["out"] ** 2) + got["penalty"]

        return jax.value_and_grad(loss)

    params = {name: {"w": normal(4, 4), "b": normal(4)} for name in ("encode", "decode")}
    check_loop(build(in_stage), build(unsplit), params, normal(8, 4), argnum=1, schedule=schedule)


def test_closures_over_arrays():
    """Over numpy and jax arrays, over arguments of the loop's function, and over a task's result."""
    constants = jnp.asarray(normal(4, 4)), normal(4, 4)

    def build(in_stage):
        def run(w, x):
            hidden = in_stage(lambda x: jnp.tanh(x @ w[0] @ constants[0]), 0)(x)
            return in_stage(lambda: hidden @ w[1] @ constants[1] + constants[0][0], 1)()

        return run

    of_weights(build, 2)


def test_closures_over_what_was_computed_before_the_loop():
    """And over a traced argument of the jitted function, neither of which the loop is given."""

    def build(in_stage):
        def step(weights, scale, x, loop):
            shift = jnp.sin(scale)

            def loss(weights, x):
                hidden = in_stage(lambda x: jnp.tanh(x @ weights[0]) + shift, 0)(x)
                return jnp.sum(in_stage(lambda: hidden @ weights[1] * scale, 1)() ** 2)

            return loop(jax.value_and_grad(loss))(weights, x)

        return step

    args = [normal(4, 4), normal(4, 4)], jnp.float32(0.5), normal(8, 4)
    expected = build(unsplit)(*args, lambda grad: functools.partial(by_hand, grad, argnum=1))
    loop = lambda grad: microbatch(grad, 0, 2, argnum=1, schedule="1f1b")
    check(lambda *args: build(in_stage)(*args, loop), expected, *args)


class Dense:
    """A layer that holds its weights and takes arguments of every kind."""

    def __init__(self, w):
        self.w = w

    def __call__(self, x, *more, scale=1.0, **kwargs):
        return jnp.tanh(x @ self.w) * scale + sum(more) + kwargs.get("shift", 0)


@pytest.mark.parametrize(
    "layer",
    [
        lambda in_stage, stage, w: in_stage(Dense(w), stage),
        lambda in_stage, stage, w: in_stage(Dense, stage)(w),
    ],
    ids=["object", "class"],
)
def test_a_callable_object_and_its_class(layer):
    """Made in the loop, of weights that are traced; called by position and by name."""

    def build(in_stage):
        def run(w, x):
            hidden = layer(in_stage, 0, w[0])(x, 1, 2.0, shift=0.5)
            return layer(in_stage, 1, w[1])(x=hidden, scale=2)

        return run

    of_weights(build, 2)


def test_a_function_in_the_arguments():
    """jax.tree_util.Partial: a function whose arrays are parameters."""

    def build(in_stage):
        def run(w, x):
            return in_stage(dense, 1)(w[1], in_stage(dense, 0)(w[0], x))

        return jax.value_and_grad(lambda fun, x: jnp.sum(fun(x) ** 2)), run

    weights, x = [normal(4, 4), normal(4, 4)], normal(8, 4)
    (grad, split), (_, plain) = build(in_stage), build(unsplit)
    got = by_hand(grad, jax.tree_util.Partial(plain, weights), x, argnum=1)
    fun = jax.tree_util.Partial(split, weights)
    expected = got[0], jax.tree.unflatten(jax.tree.structure(fun), jax.tree.leaves(got[1]))
    check(microbatch(grad, 0, 2, 1, schedule="1f1b"), expected, fun, x)


def jitted(w, x):
    return jax.jit(dense)(w, x)


def scanned(w, x):
    return jax.lax.scan(lambda x, _: (dense(w, x), None), x, length=3)[0]


def branching(w, x):
    return jax.lax.cond(jnp.sum(x) > 0, dense, lambda w, x: x @ w, w, x)


def mapped(w, x):
    return jax.vmap(dense, in_axes=(None, 0))(w, x)


def differentiating(w, x):
    return jax.grad(lambda x: jnp.sum(dense(w, x)))(x)


@jax.custom_vjp
def with_its_own_gradient(w, x):
    return dense(w, x)


with_its_own_gradient.defvjp(
    lambda w, x: (dense(w, x), (w, x)),
    lambda kept, g: tuple(2 * leaf for leaf in jax.vjp(dense, *kept)[1](g)),
)


@few(2)
@pytest.mark.parametrize(
    "fun", [jitted, scanned, branching, mapped, with_its_own_gradient], ids=lambda f: f.__name__
)
def test_transformations_in_a_task(fun):
    """Jitted, a scan, a branch, mapped over rows, with a gradient rule: on both stages, cut and whole."""
    build = lambda in_stage: lambda w, x: in_stage(fun, 1)(w[1], in_stage(fun, 0)(w[0], x))
    of_weights(build, 2, schedules=WHOLE_AND_CUT)


def test_a_gradient_in_a_task():
    """A task that differentiates by itself, within what is differentiated."""
    build = lambda in_stage: lambda w, x: in_stage(dense, 1)(w[1], in_stage(differentiating, 0)(w[0], x))
    of_weights(build, 2)


def test_tasks_on_meshes_of_their_own():
    """TaskMeshes of three devices, of two in another order and of one, and no MultiMesh."""
    meshes = [
        TaskMesh(devices=[0, 1, 2], axis_names=("x",)),
        TaskMesh(devices=[7, 5], axis_sizes=(1, 2), axis_names=("x", "y")),
        TaskMesh(devices=[4]),
    ]

    def build(wrap):
        def loss(weights, x):
            for w, mesh in zip(weights, meshes):
                x = wrap(mesh)(w, x)
            return jnp.sum(x**2)

        return jax.value_and_grad(loss)

    weights, x = [normal(4, 4) for _ in range(3)], normal(8, 4)
    split = build(lambda mesh: task(dense, mesh=mesh))
    step = mm.jit(microbatch(split, 0, 2, argnum=1, schedule="1f1b"))
    assert_same(step(weights, x), by_hand(build(lambda mesh: dense), weights, x, argnum=1))
    assert meshes_of(step.program(weights, x)) == [(0, 1, 2), (4,), (7, 5)]


def test_random_numbers_from_a_key():
    """Keys that are constant over the loop, and keys that are sliced with the batch."""
    register_layers()

    def loss(params, batch, key):
        x, y, keys = batch
        for i, (w, b) in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w + b) * jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
                x = x + jax.vmap(lambda key: jax.random.uniform(key, (4,)))(keys)
        return jnp.sum((x - y) ** 2)

    grad = jax.value_and_grad(loss)
    batch = (*make_batch(), jax.random.split(jax.random.key(1), 8))
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        check_loop(grad, grad, make_params(2), batch, key, argnum=1)


# Rematerialised tasks


def deep(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def task_loss(wrap, around=lambda loss: loss):
    """Loss and gradients of two tasks, each of which `wrap` makes."""

    def loss(params, x):
        for i, w in enumerate(params):
            x = wrap(i)(w, x)
        return jnp.sum(x**2)

    return jax.value_and_grad(around(loss))


REMATERIALISED = {
    "nowhere": task_loss(lambda i: in_stage(deep, i)),
    "around the task": task_loss(lambda i: jax.checkpoint(in_stage(deep, i))),
    "in the task": task_loss(lambda i: in_stage(jax.checkpoint(deep), i)),
    "around the loss": task_loss(lambda i: in_stage(deep, i), jax.checkpoint),
    "by the Task": task_loss(lambda i: in_stage(deep, i, remat=True)),
}


@pytest.mark.parametrize("where, schedule", grid([*REMATERIALISED], WHOLE_AND_CUT, step=3))
def test_rematerialised_tasks(where, schedule):
    """The same gradients; the backward of each stage computes again what it keeps otherwise."""
    params, x = [normal(4, 4) for _ in range(2)], normal(8, 4)
    plain = task_loss(lambda i: deep)
    program = check_loop(REMATERIALISED[where], plain, params, x, argnum=1, schedule=schedule)
    for stage, ids in enumerate(MESHES[TWO]):
        backward = [f for f in program.fragments if f.name.startswith(f"stage{stage} backward")]
        assert {d.id for f in backward for d in f.mesh.devices.flat} == set(ids)
        assert any("tanh" in str(f.jaxpr) for f in backward) == (where != "nowhere")


def test_rematerialised_registered_layers():
    register_layers(remat=True)
    program = check_loop(GRAD, GRAD, make_params(2), make_batch(), argnum=1)
    backward = [str(f.jaxpr) for f in program.fragments if f.phase == "backward"]
    assert len(backward) == 2 and all("tanh" in text for text in backward)
