"""Fragments that compute the same are known by a key, and only those."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mmnnx as mm
from mmnnx.mpmd.compile import executables
from mmnnx.mpmd.ir.equality import jaxpr_key
from tests.mpmd.inline import test_scans

X = jnp.ones((3, 3))


def key(f, *args):
    return jaxpr_key(jax.make_jaxpr(f)(*(args or (X, X))))


SAME = {
    "operations": lambda: lambda x, y: jnp.sin(x) @ y + 1,
    "a loop": lambda: lambda x, y: lax.fori_loop(0, 3, lambda i, c: c @ y, x),
    "branches": lambda: lambda x, y: lax.cond(x.sum() > 0, lambda: x, lambda: y * 2),
    "a jitted function": lambda: jax.jit(lambda x, y: jnp.where(x > y, x, -y)),
    "random bits": lambda: lambda x, y: jax.random.normal(jax.random.key(0), x.shape) + y,
}


@pytest.mark.parametrize("kind", SAME)
def test_traced_twice(kind):
    assert key(SAME[kind]()) == key(SAME[kind]())


DIFFERENT = {
    "operands": (lambda x, y: x - y, lambda x, y: y - x),
    "a number": (lambda x, y: x * 2, lambda x, y: x * 3),
    "the sign of zero": (lambda x, y: x * 0.0, lambda x, y: x * -0.0),
    "the sign of zero as a number of Python": (
        lambda x, y: jnp.where(x > 9, x, 0.0),
        lambda x, y: jnp.where(x > 9, x, -0.0),
    ),
    "its type": (lambda x, y: x > 1, lambda x, y: x.astype(int) > 1),
    "a parameter": (lambda x, y: x.sum(0), lambda x, y: x.sum(1)),
    "an order": (lambda x, y: (x + y, x * y), lambda x, y: (x * y, x + y)),
    "a result twice": (lambda x, y: (x + y, x + y), lambda x, y: [x + y] * 2),
    "inside a loop": (
        lambda x, y: lax.fori_loop(0, 3, lambda i, c: c @ y, x),
        lambda x, y: lax.fori_loop(0, 3, lambda i, c: y @ c, x),
    ),
    "precision": (
        lambda x, y: x @ y,
        lambda x, y: jnp.matmul(x, y, precision="highest"),
    ),
    "a closed-over array": (lambda x, y: x + np.zeros(3), lambda x, y: x + np.ones(3)),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different(kind):
    one, other = DIFFERENT[kind]
    assert key(one) != key(other)


@pytest.mark.parametrize("other", [X.astype(jnp.bfloat16), jnp.ones((3, 1)), 1.0])
def test_other_types(other):
    assert key(jnp.add, X, X) != key(jnp.add, X, other)


def lowerings(kind, length, monkeypatch):
    """How many fragments of how many are lowered."""
    lowered = []
    lower = executables.lower
    mesh, *split = test_scans.made()
    tokens = np.tile(test_scans.TOKENS, (2, 1, 1))[:length]
    with mesh, monkeypatch.context() as patch:
        patch.setattr(executables, "lower", lambda *args: lowered.append(args[0]) or lower(*args))
        run = mm.jit(test_scans.LOOPS[kind])
        run.lower(*split, tokens).compile()
        return len(lowered), len(run.program(*split, tokens).fragments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["training steps of microbatches", "training steps of sums"],
)
def test_an_unrolled_loop_is_lowered_once(kind, monkeypatch, no_folder):
    """However many iterations there are: those in the middle are alike."""
    short, few = lowerings(kind, 4, monkeypatch)
    long, many = lowerings(kind, 6, monkeypatch)
    assert short == long < few < many


def test_a_key_keeps_the_constants_that_it_is_for(fast_gc):
    """Else another one could come to be where the first was, and be taken for it."""

    def made(number):
        table = np.full(3, number, np.float32)  # which jax keeps as it is, as a constant of the jaxpr
        return weakref.ref(table), key(lambda x, y: x + table)

    first, key_of_first = made(1)
    gc.collect()
    assert first() is not None and key_of_first != made(1)[1]
    del key_of_first
    gc.collect()
    assert first() is None
