"""What a forward keeps for its backward, and what the backward computes again."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import mmnnx as mm
from mmnnx import _compat
from mmnnx.mpmd.ir.equations import nbytes
from mmnnx.mpmd.ir.instructions import Call
from mmnnx.mpmd.partition import fragments
from tests import models
from tests.mpmd.parity import MOMENTUM, assert_parity, born, pipeline, place
from tests.slow import all_but, few

ROWS, WIDTH, LENGTH = 16, 64, 8
NEVER_AGAIN = {"dot_general", "conv_general_dilated", "random_bits", "scan"}


class Body(nnx.Module):
    """A linear layer, and after it what a subclass does."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.after(self.linear(x))


class Relu(Body):
    def after(self, x):
        return jax.nn.relu(x)


class Gelu(Body):
    def after(self, x):
        return jax.nn.gelu(x)


class Norm(Body):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.after = nnx.LayerNorm(WIDTH, rngs=rngs)


class Dropout(Body):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def after(self, x):
        return self.dropout(jnp.tanh(x))


class Attention(Body):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.attention = models.Attention(WIDTH, 2, rngs=rngs)

    def after(self, x):
        steps = jnp.arange(LENGTH)
        x = x[:, None, :] * jnp.cos(steps)[:, None]
        return self.attention(x, steps[:, None] >= steps).mean(axis=1)


class Convolution(Body):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.conv = nnx.Conv(8, 8, (3, 3), rngs=rngs)

    def after(self, x):
        x = jax.nn.relu(self.conv(x.reshape(-1, 8, 1, 8)))
        return x.reshape(-1, WIDTH)


class Loop(Body):
    def after(self, x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]


class Sine(Body):
    """A second layer, which reads the sine of the first; its gradient does, too."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def after(self, x):
        return self.second(jnp.sin(x))


class MarkedSine(Sine):
    """With a name for the sine, as `jax.checkpoint` policies ask for."""

    def after(self, x):
        return self.second(checkpoint_name(jnp.sin(x), "sine"))


class Widened(Sine):
    """The first layer in bfloat16, and the second of its tanh in float32."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.linear = nnx.Linear(8, WIDTH, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def after(self, x):
        return self.second(jnp.tanh(x.astype(jnp.float32)))


BODIES = [Relu, Gelu, Norm, Dropout, Attention, Convolution, Loop]


class Net(nnx.Module):
    """A body on the first stage and a head on the second."""

    def __init__(self, body, rngs):
        self.body = body(rngs)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body(x))


def make_net(body):
    return Net(body, nnx.Rngs(0, dropout=1))


@functools.cache
def program(body: type[Body], recompute: bool = True) -> mm.Program:
    """Loss and gradients in two microbatches; also as it would be if all were kept."""
    mesh, tasks = pipeline(2)
    with mesh, pytest.MonkeyPatch.context() as patch:
        if not recompute:
            patch.setattr(fragments, "rematerialise", lambda nodes, placement, remat: (nodes, placement))
        model = born(lambda: make_net(body), place(tasks, ["body"], ["head"]))
        grad_fn = mm.microbatch(nnx.value_and_grad(models.squared_error), 0, ROWS, argnum=1, schedule="1f1b")
        step = mm.jit(lambda model, batch: grad_fn(model, batch))
        return step.program(model, models.vectors(rows=2 * ROWS))


def fragment(program, phase, stage=0):
    (found,) = (f for f in program.fragments if f.name == f"stage{stage} {phase}")
    return found


def primitives(jaxpr) -> collections.Counter:
    """How often each primitive stands in a jaxpr and those inside it."""
    found = collections.Counter()
    for eqn in _compat.open_jaxpr(jaxpr)[2]:
        found[eqn.primitive.name] += 1
        for inner in _compat.subjaxprs(eqn):
            found += primitives(inner)
    return found


def kept(program, stage=0) -> list[str]:
    """The types of what a forward makes for the backward of its microbatch on its mesh."""
    forward, backward = fragment(program, "forward", stage), fragment(program, "backward", stage)
    return sorted(v.aval.str_short(short_dtypes=True) for v in set(backward.invars) & set(forward.outvars))


def kept_bytes(program, stage=0) -> int:
    """Bytes that the backward reads and that were there before: made or read by the forward."""
    forward, backward = fragment(program, "forward", stage), fragment(program, "backward", stage)
    return sum(nbytes(v) for v in set(backward.invars) & ({*forward.outvars, *forward.invars}))


ACTIVATION = f"f32[{ROWS},{WIDTH}]"


def test_relu_keeps_signs_alone():
    """Whether each entry was positive, a byte; neither the product nor its positive part."""
    assert kept(program(Relu)) == [f"bool[{ROWS},{WIDTH}]"]


@pytest.mark.parametrize("body", [Gelu, Norm])
def test_functions_of_one_array_keep_that_array(body):
    """Polynomials, exponentials and statistics of the product are computed again from it."""
    assert kept(program(body)) == [ACTIVATION]
    assert len(kept(program(body, recompute=False))) > 1


def test_of_as_many_arrays_the_smaller_ones_are_kept():
    """What is widened later is kept as it was before."""
    assert kept(program(Widened)) == [f"bf16[{ROWS},{WIDTH}]"]


def test_a_norm_is_computed_again():
    backward = primitives(fragment(program(Norm), "backward").jaxpr)
    without = primitives(fragment(program(Norm, recompute=False), "backward").jaxpr)
    assert backward["rsqrt"] == 1 and without["rsqrt"] == 0


def test_softmax_attention_keeps_no_more_than_its_weights():
    """Of all that has the size of the scores, one array; and what the products read."""
    scores = f"f32[{ROWS},2,{LENGTH},{LENGTH}]"
    assert kept(program(Attention)).count(scores) == 1
    assert kept(program(Attention, recompute=False)).count(scores) > 1
    backward = primitives(fragment(program(Attention), "backward").jaxpr)
    assert backward["dot_general"] == 9  # two for each of five products, but one where the input is data


def test_dropout_keeps_what_came_of_its_random_bits():
    """The mask is drawn once on the mesh: the backward reads it, or what was made with it."""
    bits = [
        primitives(fragment(program(Dropout), phase).jaxpr)["random_bits"]
        for phase in ("forward", "backward")
    ]
    assert bits == [1, 0]


def test_what_is_kept_anyway_is_not_kept_in_another_form():
    """A middle stage of linear layers and tanh keeps what it was given, which the gradient of its weights
    reads: the derivative of the tanh before it, 1 - x², is made of that again.
    """
    mesh, tasks = pipeline(3)
    with mesh:
        placement = place(tasks, *[[("layers", i)] for i in range(3)])
        model = born(models.make(models.MLP, layers=3, width=WIDTH), placement)
        grad_fn = mm.microbatch(nnx.value_and_grad(models.squared_error), 0, ROWS, argnum=1, schedule="1f1b")
        step = mm.jit(lambda model, batch: grad_fn(model, batch))
        found = step.program(model, models.vectors(rows=2 * ROWS))
    assert kept_bytes(found, 1) == (ROWS * WIDTH + WIDTH * WIDTH) * 4  # the activation and the kernel
    assert kept(found, 1) == []


def test_a_name_costs_nothing():
    """What has a name for `jax.checkpoint` is computed again like anything else."""
    assert kept(program(Sine)) == [ACTIVATION]
    assert kept(program(MarkedSine)) == kept(program(Sine))


@few(3)
@pytest.mark.parametrize("body", BODIES)
def test_nothing_dear_is_computed_again(body):
    """Products, convolutions, loops and random bits of a forward are in no backward of that mesh.

    Counted: the fragments of a mesh hold as many as if everything were kept.
    """
    for stage in range(2):
        counts = []
        for recompute in (True, False):
            backward = fragment(program(body, recompute), "backward", stage).jaxpr
            counts.append({k: n for k, n in primitives(backward).items() if k in NEVER_AGAIN})
        assert counts[0] == counts[1], f"stage{stage}"


@pytest.mark.parametrize("body", BODIES)
def test_it_never_keeps_more(body):
    for stage in range(2):
        assert kept_bytes(program(body), stage) <= kept_bytes(program(body, recompute=False), stage)


@pytest.mark.parametrize("body", [Gelu, Norm, Attention])
def test_it_keeps_less(body):
    assert kept_bytes(program(body)) < kept_bytes(program(body, recompute=False))


@pytest.mark.parametrize("body", BODIES)
def test_forwards_make_nothing_in_vain(body):
    """What a forward makes is read by someone, or is a result."""
    made = program(body)
    read = {s for i in made.instructions for s in i.inputs} | {s for buffers in made.outputs for s in buffers}
    in_vain = [s for i in made.instructions if isinstance(i, Call) for s in i.outputs if s not in read]
    assert not in_vain


@pytest.mark.parametrize("body", all_but([Norm], [Relu, Norm, Attention, Convolution]))
def test_what_is_computed_again_is_the_same(body):
    mesh, tasks = pipeline(2)
    assert_parity(
        lambda: make_net(body),
        models.squared_error,
        models.vectors(rows=4),
        place(tasks, ["body"], ["head"]),
        mesh=mesh,
        microbatch=2,
        optimizer=MOMENTUM,
        steps=1,
    )


def test_a_mask_drawn_on_one_mesh_is_the_same_in_forward_and_backward():
    """The gradient is nought exactly where the forward dropped."""
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(lambda: make_net(Dropout), place(tasks, ["body"], ["head"]))
        x = np.ones((ROWS, 8), np.float32)

        def loss(model, x):
            y = model.body(x)
            return jnp.sum(model.head(y)), y

        (_, y), grads = mm.jit(lambda model, x: nnx.value_and_grad(loss, has_aux=True)(model, x))(model, x)
        slopes = model.head.kernel[...].sum(axis=1)
    derivative = 1 - np.tanh(x @ np.asarray(model.body.linear.kernel[...])) ** 2
    expected = x.T @ (2 * (np.asarray(y) != 0) * derivative * np.asarray(slopes))
    np.testing.assert_allclose(
        grads["body"]["linear"]["kernel"][...], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
    )
