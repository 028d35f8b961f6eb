"""Calls like an earlier one take a short way past Flax's own, in every style, and do the same."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd.jit.fast_path import FastPath
from tests.nnx.modes import FUNCTIONAL, TREE, in_every_style
from tests.slow import few


@pytest.fixture
def taken(monkeypatch):
    """Grows by one with every call that takes it."""
    calls = []
    whole = FastPath.__call__
    monkeypatch.setattr(FastPath, "__call__", lambda *args: calls.append(1) or whole(*args))
    return calls


def model():
    return nnx.Dict(
        w=nnx.Param(jnp.ones(2)),
        b=nnx.Param(jnp.zeros(2)),
        still=nnx.Param(jnp.ones(2)),
        n=nnx.BatchStat(jnp.array(1)),
    )


def step(model, x):
    """Results before and after their updates, in a tree."""
    y = x * model.w + model.b
    model.b[...] += y
    model.w[...] *= 2
    model.n.set_value(model.n.get_value() + 1)
    return {"y": y, "still": model.still + 1}, model.b[...]


@few(6)
@in_every_style
@pytest.mark.parametrize("options", [{}, dict(donate_argnums=0)], ids=["kept", "donated"])
def test_each_call_is_as_by_flax(place, taken, style, options):
    ours, theirs = place.put(model()), model()
    f, by_flax = place.jit(step, **options, **style), nnx.jit(step, **style)
    for n in range(4):
        x = np.full(2, n, np.float32)
        (out, b), (out_by_flax, b_by_flax) = f(ours, x), by_flax(theirs, x)
        for key in ("y", "still"):
            np.testing.assert_array_equal(out[key], out_by_flax[key])
        np.testing.assert_array_equal(b, b_by_flax)
        for key in ("w", "b", "still", "n"):
            np.testing.assert_array_equal(ours[key][...], theirs[key][...])
    assert len(taken) == (0 if place.jit is nnx.jit else 3)


def test_what_does_not_take_it(place, taken):
    """Structure that changes inside, modules as results, and for trees one Variable in two arguments."""

    def grow(model, x):
        model.new = nnx.Param(x)
        return model.w + x

    x = np.ones(2, np.float32)
    for style in (FUNCTIONAL, TREE):
        grown, copied = place.jit(grow, **style), place.jit(lambda m, x: nnx.clone(m), **style)
        m = place.put(model())
        for _ in range(3):
            np.testing.assert_array_equal(grown(m, x), np.full(2, 2.0))
            assert not hasattr(m, "new") and copied(m, x).w is not m.w
    assert not taken
    add = place.jit(lambda a, b: a[...] + b[...], **TREE)
    a, b = place.put(nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2)))
    for _ in range(2):
        np.testing.assert_array_equal(add(a, b), np.full(2, 2.0))
        with pytest.raises(ValueError, match="Duplicate Param"):
            add(a, a)


@in_every_style
def test_the_style_is_part_of_the_function(style):
    """Each style of one function repeats its own calls."""
    f, other = mm.jit(step, **style), mm.jit(step, **(TREE if style is FUNCTIONAL else FUNCTIONAL))
    m, x = model(), np.ones(2, np.float32)
    for n in range(1, 4):
        f(m, x), other(m, x)
        np.testing.assert_array_equal(m.w[...], np.full(2, 4.0**n))
