"""Random loops over randomly placed layers: differentiated, in microbatches, and forwards alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import mmnnx as mm
from tests.mpmd.parity import assert_same, born, pipeline, place, values
from tests.slow import examples

WIDTH, STEPS, ROWS = 3, 4, 4
X = np.random.default_rng(0).normal(size=(ROWS, STEPS, WIDTH)).astype(np.float32)


class Loop(nnx.Module):
    """A recurrent network given as data.

    Attributes:
      nodes: of the body: ("layer", k, a) is layer k of result a, ("mix", a, b) is made of two results. The
        first results are the input of the iteration and the carries.
      carries: for each carry, the result that it becomes.
      out: the result that an iteration gives.
      reverse, remat: how the loop runs.
    """

    def __init__(self, nodes, layers, carries, out, reverse, remat):
        self.nodes, self.carries, self.out = nodes, carries, out
        self.reverse, self.remat = reverse, remat
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(n)) for n in range(layers))

    def __call__(self, x):
        def body(carry, x):
            results = [x, *carry]
            for node in self.nodes:
                match node:
                    case ("layer", k, a):
                        results.append(jnp.tanh(self.layers[k](results[a])))
                    case ("mix", a, b):
                        results.append(results[a] * jnp.cos(results[b]))
            return tuple(results[n] for n in self.carries), results[self.out]

        body = jax.checkpoint(body) if self.remat else body
        init = tuple(jnp.full((x.shape[0], WIDTH), 0.1 * n) for n in range(len(self.carries)))
        carry, ys = jax.lax.scan(body, init, jnp.swapaxes(x, 0, 1), reverse=self.reverse)
        return ys.sum(0) + sum(carry)


@st.composite
def loops(draw):
    """The arguments of a Loop, and the stage of each layer."""
    layers, carried = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    order = draw(st.permutations([*range(layers), *draw(st.lists(st.just("mix"), max_size=3))]))
    nodes = []
    for what in order:
        seen = st.integers(0, carried + len(nodes))
        nodes.append(("mix", draw(seen), draw(seen)) if what == "mix" else ("layer", what, draw(seen)))
    result = st.integers(0, carried + len(nodes))
    carries = tuple(draw(st.lists(result, min_size=carried, max_size=carried)))
    loop = tuple(nodes), layers, carries, draw(result), draw(st.booleans()), draw(st.booleans())
    return loop, draw(st.lists(st.integers(0, 2), min_size=layers, max_size=layers))


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def gradients(model, x):
    return nnx.value_and_grad(loss_fn)(model, x)


def microbatches(model, x):
    return mm.microbatch(nnx.value_and_grad(loss_fn), 0, 2, argnum=1, reduce="mean")(model, x)


def forwards(model, x):
    return model(x), mm.microbatch(lambda x: model(x), 0, 2, reduce="concat")(x)


def whole_batch(model, x):
    def loss_and_result(model, x):
        y = model(x)
        return (y**2).mean(), y

    (loss, y), grads = nnx.value_and_grad(loss_and_result, has_aux=True)(model, x)
    return loss, grads, y


@given(loops())
@examples(20)
def test_parity(found):
    loop, stages = found
    mesh, tasks = pipeline(3)
    paths = [[("layers", n) for n, stage in enumerate(stages) if stage == s] for s in range(3)]
    # Microbatches are of one size: the mean of their means is that of the batch.
    loss, grads, y = nnx.jit(whole_batch)(Loop(*loop), X)
    with mesh:
        split = born(lambda: Loop(*loop), place(tasks, *paths))
        for step, expected in ((gradients, (loss, grads)), (microbatches, (loss, grads)), (forwards, (y, y))):
            assert_same(values(mm.jit(step)(split, X)), values(expected), 1e-4)
