"""Random programs of whiles, conds and scans in each other, over state with random homes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import mmnnx as mm
from tests.mpmd.parity import assert_same, born, pipeline, place, values
from tests.slow import examples

LAYERS, VALUES = 3, 2
X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


class Layers(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(nnx.Linear(4, 4, rngs=rngs) for _ in range(LAYERS))
        self.drop = nnx.Dropout(0.2, rngs=nnx.Rngs(1))


def run(program, m, xs, n):
    """The values after a program, a list of statements that each replace one of them."""
    for name, *args in program:
        xs = STATEMENTS[name](m, list(xs), n, *args)
    return tuple(xs)


def layer(m, xs, n, to, of, k):
    xs[to] = jnp.tanh(m.layers[k](xs[of]))
    return xs


def add(m, xs, n, to, of, k):
    xs[to] = 0.5 * (xs[to] + xs[of])
    return xs


def write(m, xs, n, to, of, k):
    m.layers[k].bias[...] += 0.1 * xs[of].mean(0)
    return xs


def drop(m, xs, n, to, of, k):
    xs[to] = m.drop(xs[of])
    return xs


def loop(m, xs, n, of, looks, body):
    def goes_on(c):
        near = jnp.abs(c[2][of]).sum() < 1000.0 if looks else True
        return (c[1] < n) & near

    return nnx.while_loop(
        goes_on, lambda c: (c[0], c[1] + 1, run(body, c[0], c[2], c[1])), (m, 0, tuple(xs))
    )[2]


def fixed(m, xs, n, of, looks, body):
    return nnx.fori_loop(0, 2, lambda i, c: (c[0], run(body, c[0], c[1], i)), (m, tuple(xs)))[1]


def branch(m, xs, n, of, looks, body):
    chosen = xs[of].sum() > 0 if looks else n > 1
    return nnx.cond(chosen, lambda m, *xs: run(body, m, xs, n), lambda m, *xs: xs, m, *xs)


STATEMENTS = {f.__name__: f for f in (layer, add, write, drop, loop, fixed, branch)}

number = st.integers(0, VALUES - 1)
plain = st.tuples(
    st.sampled_from(["layer", "layer", "layer", "add", "write", "drop"]),
    number,
    number,
    st.integers(0, LAYERS - 1),
)
programs = st.recursive(
    st.lists(plain, min_size=1, max_size=3),
    lambda body: st.lists(
        plain | st.tuples(st.sampled_from(["loop", "loop", "fixed", "branch"]), number, st.booleans(), body),
        min_size=1,
        max_size=3,
    ),
    max_leaves=4,
)


@examples(16)
@given(
    body=programs,
    before=st.lists(plain, max_size=2),
    after=st.lists(plain, max_size=2),
    homes=st.permutations([0, 0, 1, 2][: LAYERS + 1]),
)
def test_random_whiles(body, before, after, homes):
    program = [*before, ("loop", 0, True, body), *after]
    function = lambda m, x, n: run(program, m, [x] * VALUES, n)
    mesh, tasks = pipeline(3)
    owned = [[("layers", k) for k in range(LAYERS) if homes[k] == n] for n in range(3)]
    owned[homes[-1]].append("drop")
    whole, expect = Layers(), nnx.jit(function)
    with mesh:
        model = born(Layers, place(tasks, *owned))
        split = mm.jit(function)
        for n in (0, 2):
            got, want = split(model, X, jnp.int32(n)), expect(whole, X, jnp.int32(n))
            assert_same(values((got, nnx.state(model))), values((want, nnx.state(whole))), 1e-4)
