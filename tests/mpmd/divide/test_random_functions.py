"""Random functions over values in pieces compute what they do over whole ones, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given, note
from hypothesis import strategies as st

import mmnnx as mm
from mmnnx.mpmd.divide.values import Cut
from tests.mpmd.divide.compare import assert_same_in_pieces
from tests.slow import examples

L = 6  # layers
CUTS = [Cut(0, (2, 2, 2)), Cut(0, (3, 2, 1)), Cut(0, (6,)), Cut(0, (1, 5))]

Operation = tuple[str, Callable[..., Any], int]  # what it is called, what it does, and of how many values

BETWEEN = st.tuples(st.integers(0, L), st.integers(0, L)).map(sorted)


def of_slice(ends: list[int]) -> Operation:
    start, end = ends
    return f"[{start}:{end}]", lambda x: x[start:end], 1


def of_pad(ends: list[int]) -> Operation:
    low, high = ends
    config = [(low, high - low, 0), (0, 0, 0)]
    return f"pad {config}", lambda x: jax.lax.pad(x, jnp.asarray(0.5, x.dtype), config), 1


def grad_of_slice(ends: list[int]) -> Operation:
    start, end = ends
    return f"gradient of [{start}:{end}]", jax.grad(lambda x: (x[start:end] ** 2).sum()), 1


OPERATIONS = st.one_of(
    BETWEEN.map(of_slice),
    BETWEEN.map(of_pad),
    BETWEEN.map(grad_of_slice),
    st.sampled_from(
        [
            ("tanh", jnp.tanh, 1),
            ("add", lambda x, y: x + y if x.shape == y.shape else x, 2),
            ("concatenate", lambda x, y: jnp.concatenate([x, y]), 2),
            ("reverse", lambda x: x[::-1], 1),
            ("every other", lambda x: x[::2], 1),
            ("centre", lambda x: x - x.sum(0, keepdims=True), 1),
            ("product", lambda x: x @ jnp.ones((x.shape[1], 3)), 1),
            ("transposed", lambda x: (x.T * 2).T, 1),
            ("running sum", lambda x: jnp.cumsum(x, 0), 1),
            ("running sum of each layer", lambda x: jnp.cumsum(x, 1), 1),
            ("scan", lambda x: jax.lax.scan(lambda c, row: (c + row, c * row), x.sum(0) * 0, x)[1], 1),
            ("drawn", lambda x: jax.random.normal(jax.random.key(x.shape[0]), x.shape), 1),
            ("custom", jax.nn.relu, 1),
            ("where", lambda x: jnp.where(x > 0, x, 0 * x), 1),
            ("softmax over layers", lambda x: jax.nn.softmax(x, 0), 1),
            ("all pairs", lambda x: (x[:, :, None] * x[:, None, :]).sum(-1), 1),
            ("contracted", lambda x: x + jnp.sum(x.T @ x), 1),
            ("reshaped", lambda x: x.reshape(-1).reshape(-1, 3) + 1, 1),
            ("taken", lambda x: x[jnp.arange(x.shape[0])[::-1]], 1),
            ("updated", lambda x: x.at[1:2].set(0.5), 1),
            ("added to", lambda x: x.at[jnp.array([0])].add(1), 1),
            ("sorted", lambda x: jnp.sort(x, 0), 1),
            ("largest of each layer", lambda x: x + x.argmax(1, keepdims=True), 1),
            ("rolled", lambda x: jnp.roll(x, 1, 0), 1),
            ("repeated", lambda x: jnp.repeat(x, 2, 0), 1),
            ("stacked", lambda x: jnp.stack([x, 2 * x]).sum(0), 1),
            ("split", lambda x: sum(jnp.split(x, 2)) if x.shape[0] % 2 == 0 else x, 1),
            ("for each layer", jax.vmap(lambda row: row @ jnp.ones((3, 3)) + row.max()), 1),
            ("cond", lambda x: jax.lax.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, x), 1),
            ("loop", lambda x: jax.lax.fori_loop(0, 2, lambda _, y: jnp.sin(y), x), 1),
            ("loop that sums", lambda x: jax.lax.fori_loop(0, 2, lambda _, s: s + x.sum(), 0.0) + x, 1),
            (
                "scan backwards",
                lambda x: jax.lax.scan(lambda c, r: (c * r, c), x[:1].sum(0) * 0 + 1, x, reverse=True)[1],
                1,
            ),
            (
                "gradient of a scan",
                jax.grad(
                    lambda x: jax.lax.scan(lambda c, r: (jnp.tanh(c + r), None), x.sum(0) * 0, x)[0].sum()
                ),
                1,
            ),
            ("checkpoint", jax.checkpoint(lambda x: jnp.exp(-(x**2))), 1),
            ("barrier", lambda x: jax.lax.optimization_barrier((x, x))[1], 1),
        ]
    ),
)


@examples(200)
@given(
    cuts=st.lists(st.sampled_from([*CUTS, None]), min_size=2, max_size=2),
    steps=st.lists(st.tuples(OPERATIONS, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    asked=st.lists(st.sampled_from([*CUTS, None]), min_size=10, max_size=10),
)
def test_random_functions(cuts, steps, asked):
    def fun(*values):
        values = list(values)
        for (_, operation, arity), *picks in steps:
            operands = [values[pick % len(values)] for pick in picks[:arity]]
            if all(x.shape[0] <= 4 * L for x in operands):
                values.append(operation(*operands))
        return values

    note(" ".join(f"{name}{picks[:arity]}" for (name, _, arity), *picks in steps))
    args = [jax.random.normal(jax.random.key(n), (L, 3)) for n in range(2)]
    whole = jax.make_jaxpr(fun)(*args)
    wanted = [cut if aval.shape[0] == L else None for cut, aval in zip(asked, whole.out_avals)]
    wanted += [None] * (len(whole.out_avals) - len(wanted))
    try:
        assert_same_in_pieces(whole, args, cuts, wanted, 1e-4)
    except mm.PlacementError as error:
        assert "argument" in str(error)  # which is named
