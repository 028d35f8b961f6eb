"""Dtypes and Python scalars in loops of microbatch: those of plain JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mmnnx as mm
from multimesh_compat.jax import (
    microbatch,
)
from tests.multimesh.loops import (
    GRAD,
    MESHES,
    RNG,
    TWO,
    WHOLE_AND_CUT,
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

# Dtypes


@few(1)
@pytest.mark.parametrize("schedule", WHOLE_AND_CUT)
def test_tokens_masks_and_two_precisions(schedule):
    """int32 tokens, a bool mask and uint8 pixels in; bfloat16 inside; float32 logits, loss and counts out."""
    vocabulary, width = 16, 8
    params = {
        "embedding": normal(vocabulary, width).astype(jnp.bfloat16),
        "hidden": normal(width, width).astype(jnp.bfloat16),
        "head": normal(width, vocabulary),
    }
    batch = {
        "tokens": RNG.integers(0, vocabulary, size=(8, 5)).astype(np.int32),
        "mask": RNG.random((8, 5)) > 0.3,
        "pixels": RNG.integers(0, 256, size=(8, 5, width)).astype(np.uint8),
    }

    def embed(table, tokens, pixels):
        return table[tokens] + pixels.astype(jnp.bfloat16) / 255

    def head(hidden, head, x, tokens, mask):
        assert x.dtype == jnp.bfloat16
        logits = jax.nn.gelu(x @ hidden).astype(jnp.float32) @ head
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
        hits = (jnp.argmax(logits, axis=-1) == tokens) & mask
        return jnp.where(mask, losses, 0).sum(), mask.sum(dtype=jnp.uint32), hits

    def build(in_stage):
        def loss(params, batch):
            x = in_stage(embed, 0)(params["embedding"], batch["tokens"], batch["pixels"])
            total, count, hits = in_stage(head, 1)(
                params["hidden"], params["head"], x, batch["tokens"], batch["mask"]
            )
            return total, {
                "count": count,
                "hits": hits.sum(),
                "any": hits.any(),
                "pixel": batch["pixels"].max(),
            }

        return jax.value_and_grad(loss, has_aux=True)

    program = check_loop(
        build(in_stage), build(unsplit), params, batch, argnum=1, schedule=schedule, rtol=3e-2
    )
    sent = {(t.dtype.name, t.shape) for t in program.transfers if t.microbatch is not None}
    assert ("bfloat16", (2, 5, width)) in sent and not any(name == "float32" for name, _ in sent)


@pytest.mark.parametrize("schedule", WHOLE_AND_CUT)
def test_gradients_of_bfloat16_summed_in_float32(schedule):
    """The loop adds up whatever its function returns, in the dtype that it returns."""
    register_layers()
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_params(2))

    def grad(params, batch):
        batch = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), batch)
        loss, grads = GRAD(params, batch)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (loss, grads))

    batch = make_batch(16)
    check_loop(grad, grad, params, batch, argnum=1, schedule=schedule, rtol=3e-2)
    out = jax.eval_shape(microbatch(grad, 0, 2, argnum=1), params, batch)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(out)} == {"float32"}


@few(1)
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "bfloat16"])
def test_tasks_of_one_dtype(dtype):
    """Nothing on the way makes it another: neither tasks, nor transfers, nor what becomes of the results."""
    x = jnp.asarray(RNG.integers(0, 5, size=(8, 3))).astype(dtype)
    one, three = jnp.asarray(1, dtype), jnp.asarray(3, dtype)

    def build(in_stage):
        def fun(x):
            y = in_stage(lambda x: x * three, 1)(in_stage(lambda x: x + one, 0)(x))
            return y, y, y

        return fun

    plain = build(unsplit)
    expected = by_hand(plain, x)[0], plain(x)[1], plain(x[6:])[2]
    loop = microbatch(build(in_stage), 0, 2, reduce=("sum", "concat", "last"))
    program = check(loop, expected, x, rtol=0)
    assert {leaf.dtype for leaf in expected} == {jnp.dtype(dtype)}
    assert {t.dtype.name for t in program.transfers} == {dtype}


def test_half_precision_throughout():
    register_layers()
    half = lambda tree: jax.tree.map(lambda leaf: leaf.astype(np.float16), tree)
    check_loop(GRAD, GRAD, half(make_params(2)), half(make_batch()), argnum=1, rtol=1e-2)


def test_integers_counted_in_the_layers():
    """What a loop puts out next to its loss: counts, a maximum and a histogram, each from its stage."""
    register_layers()

    def loss(params, batch):
        (x, y), seen = batch, []
        for i, (w, b) in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w + b)
                bins = jnp.zeros(4, jnp.int32).at[jnp.argmax(x, axis=-1)].add(1)
                seen.append({"positive": (x > 0).sum(dtype=jnp.uint8), "bins": bins, "any": (x > 0.5).any()})
        return jnp.sum((x - y) ** 2), seen

    grad = jax.value_and_grad(loss, has_aux=True)
    for schedule in WHOLE_AND_CUT:
        check_loop(grad, grad, make_params(2), make_batch(), argnum=1, schedule=schedule)


@pytest.mark.parametrize(
    "reduce, x, expected",
    [
        ("mean", np.array([True, True, True, False]), 0.75),
        ("max", np.array([False, True]), True),
        ("mean", np.full(8, 200, np.uint8), 200),
        ("mean", np.ones(1024, jnp.bfloat16), 1),
        ("sum", np.ones(1024, jnp.bfloat16), 1024),
    ],
)
def test_reductions_of_narrow_dtypes(reduce, x, expected):
    for jit in (lambda f: f, jax.jit, mm.jit):
        assert float(jit(microbatch(lambda x: x[0], 0, 1, reduce=reduce))(x)) == expected


def test_sums_keep_the_dtype_of_what_they_sum():
    for dtype in (jnp.bfloat16, jnp.float32, jnp.int8):
        assert microbatch(lambda x: x[0], 0, 1)(jnp.ones(4, dtype)).dtype == dtype
    with pytest.raises(TypeError, match="reduce='max' has no meaning for complex64"):
        microbatch(lambda x: x[0], 0, 1, reduce="max")(jnp.ones(2, jnp.complex64))


@pytest.mark.parametrize("reduce", ["sum", "last"])
def test_gradients_of_integers(reduce):
    register_layers()
    grad = jax.grad(lambda p, n, b: loss_fn(p, b) * n, argnums=(0, 1), allow_int=True)
    with multimesh(TWO):
        loop = mm.jit(microbatch(grad, 0, 2, 2, schedule="1f1b", reduce=reduce))
        got = loop(make_params(2), np.int32(3), make_batch())[1]
    assert got.dtype == jax.dtypes.float0 and got.shape == ()


# Python scalars


def scaled(x, w, scale, times, flip, bias, *, function):
    """Needs Python values: to count with, to branch on, and to look up."""
    assert (type(scale), type(times), type(flip), bias) == (float, int, bool, None)
    for _ in range(times):
        x = getattr(jnp, function)(x @ w) * scale
    return -x if flip else x


@pytest.mark.parametrize("schedule", WHOLE_AND_CUT)
def test_tasks_that_take_python_scalars(schedule):
    """By position, by name and through functools.partial: they stay what they are."""

    def build(in_stage):
        def loss(params, x):
            x = in_stage(functools.partial(scaled, function="tanh"), 0)(x, params[0], 0.5, 2, True, None)
            last = in_stage(functools.partial(scaled, function="sin", flip=False), 1)
            return jnp.sum(last(x, params[1], scale=2.0, times=1, bias=None) ** 2)

        return jax.value_and_grad(loss)

    params = [normal(4, 4), normal(4, 4)]
    check_loop(build(in_stage), build(unsplit), params, normal(8, 4), argnum=1, schedule=schedule)


def test_tasks_that_return_python_scalars():
    """Next to arrays, and handed from one task to the next. The loop sums them: they are arrays then."""

    def build(in_stage):
        def fun(w, x):
            hidden, scale, count, flag, none = in_stage(lambda w, x: (x @ w, 1.5, 3, True, None), 0)(w, x)
            out = in_stage(lambda w, x, scale: (jnp.sum(x @ w) * scale, count), 1)(w, hidden, scale)
            return *out, scale, flag, none

        return fun

    w, x = normal(4, 4), normal(8, 4)
    check(microbatch(build(in_stage), 0, 2, 1), by_hand(build(unsplit), w, x, argnum=1), w, x)
    with multimesh(TWO):
        _, count, scale, flag, none = mm.jit(microbatch(build(in_stage), 0, 2, 1))(w, x)
    assert (int(count), float(scale), bool(flag), none) == (12, 6.0, True, None)


@pytest.mark.parametrize("how", ["traced", "constant", "keywords"])
def test_loops_that_take_python_scalars(how):
    """As arguments of the jitted function, in the loop's call, and by name."""
    register_layers()
    loss = lambda params, batch, scale, count, flag: (
        loss_fn(params, batch) * scale * count + jnp.where(flag, 1.0, 0.0)
    )
    grad = jax.value_and_grad(loss)
    loop = microbatch(grad, 0, 2, argnum=1, schedule="1f1b")
    params, batch = make_params(2), make_batch()
    expected = by_hand(grad, params, batch, 0.5, 3, True, argnum=1)
    if how == "traced":
        check(loop, expected, params, batch, 0.5, 3, True)
    elif how == "constant":
        check(lambda params, batch: loop(params, batch, 0.5, 3, True), expected, params, batch)
    else:
        check(lambda *args: loop(*args, flag=True, scale=0.5, count=3), expected, params, batch)


def test_a_static_string():
    """Training and evaluation by one function: each is traced by itself."""
    register_layers()
    params, batch = make_params(2), make_batch()

    def run(params, batch, mode):
        return microbatch(GRAD if mode == "train" else loss_fn, 0, 2, argnum=1)(params, batch)

    with multimesh(TWO):
        jitted = mm.jit(run, static_argnums=2)
        assert_same(jitted(params, batch, "train"), GRAD(params, batch))
        assert_same(jitted(params, batch, "evaluate"), loss_fn(params, batch))
        assert meshes_of(jitted.program(params, batch, "evaluate")) == MESHES[TWO]
