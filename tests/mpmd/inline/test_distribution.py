"""Scans over several tasks inside of derivatives and microbatches: one scan for each task, if that can be."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.inline.distribution import distribute
from tests.mpmd.parity import MOMENTUM, assert_same, born_with_optimizer, pipeline, values
from tests.slow import grid

STEPS = 3
X = np.random.default_rng(0).normal(size=(8, STEPS, 6)).astype(np.float32)
WIDTH = 8


class Recurrent(nnx.Module):
    """Two recurrent layers, and what a step of them hands to the next."""

    def __init__(self, kind: str):
        rngs = nnx.Rngs(params=0, dropout=1)
        self.first = nnx.GRUCell(6, WIDTH, rngs=rngs)
        self.second = nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 3, rngs=rngs)
        self.kind = kind

    def __call__(self, x):
        zeros = jnp.zeros((x.shape[0], WIDTH))
        start = {"first": zeros, "second": (zeros, zeros), "handed": zeros, "n": 0.0, "sum": 0.0}

        def body(c, x):
            if self.kind == "feedback":
                x = x + c["handed"][:, :6]
            if self.kind == "counted":
                x = x * jnp.cos(c["n"])
            first, h = self.first(c["first"], x)
            second, g = self.second(c["second"], c["handed"] if self.kind == "delayed" else h)
            handed = g if self.kind == "feedback" else h
            carry = {
                "first": first,
                "second": second,
                "handed": handed,
                "n": c["n"] + 1,
                "sum": c["sum"] + h.mean(),
            }
            return carry, self.out(g * (1 + c["sum"]))

        body = jax.checkpoint(body) if self.kind == "remat" else body
        final, ys = jax.lax.scan(body, start, jnp.swapaxes(x, 0, 1), reverse=self.kind == "last first")
        return ys.sum(0) + final["n"] + final["sum"] + final["second"][0][:, :3]


@functools.cache
def recurrent(kind: str) -> Callable[[], Recurrent]:
    """A function that makes the model: the same for the same kind, so that tests share what it compiles."""
    return lambda: Recurrent(kind)


KINDS = ["stacked", "delayed", "counted", "remat", "last first", "feedback"]


def loss_fn(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def whole_batch(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


def microbatches(model, optimizer, x):
    grad_fn = mm.microbatch(nnx.value_and_grad(loss_fn), 0, 2, argnum=1, reduce="mean", schedule="1f1b")
    loss, grads = grad_fn(model, x)
    optimizer.update(model, grads)
    return loss


def forwards(model, optimizer, x):
    return mm.microbatch(lambda x: model(x), 0, 4, reduce="concat")(x)


def made(kind: str, devices: int):
    """The model and its optimizer on two meshes of so many devices, and the MultiMesh."""
    mesh, tasks = pipeline(2, devices)
    spec = P(None, "model")
    rules = {
        mm.path("first", ..., "kernel"): (tasks[0], spec),
        mm.path("second", ..., "kernel"): (tasks[1], spec),
    }
    rules |= {mm.path("first"): (tasks[0], P()), mm.path(...): (tasks[1], P())}
    with mesh:
        return mesh, *born_with_optimizer(recurrent(kind), mm.TaskSharding(rules), MOMENTUM)


# Each kind and each step on meshes of one device and of two, though not each kind with each step on both.
QUICK = {("last first", whole_batch), ("remat", microbatches)}
CASES = [
    pytest.param(
        *(kind, step, 1 + (i + j) % 2),
        id=f"{kind}-{step.__name__}",
        marks=[] if (kind, step) in QUICK else pytest.mark.slow,
    )
    for i, kind in enumerate(KINDS)
    for j, step in enumerate([whole_batch, microbatches, forwards])
]


@pytest.mark.parametrize("kind, step, devices", CASES)
def test_parity(kind, step, devices):
    model = recurrent(kind)()
    whole, run = (model, nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param)), nnx.jit(step)
    expected = [values((run(*whole, X), *map(nnx.state, whole))) for _ in range(2)]
    mesh, *split = made(kind, devices)
    with mesh:
        run = mm.jit(step)
        for each in expected:
            assert_same(values((run(*split, X), *map(nnx.state, split))), each, 1e-4)


@functools.cache
def program(kind, step, length=STEPS):
    mesh, *split = made(kind, 1)
    with mesh:
        return mm.jit(step).program(*split, np.zeros((8, length, 6), np.float32))


@pytest.mark.parametrize(
    "kind, step",
    grid([k for k in KINDS if k not in ("remat", "feedback")], [microbatches, whole_batch], step=2),
)
def test_what_crosses(kind, step):
    """The states of the first layer go forward, all at once, and their gradients come back."""
    found = [t.shape for t in program(kind, step).transfers if len(t.shape) > 1 and t.microbatch in (None, 0)]
    rows = 2 if step is microbatches else 8
    assert found == [(STEPS, rows, WIDTH)] * 2


@pytest.mark.parametrize("kind, step", grid(KINDS, [microbatches, whole_batch]))
def test_programs_do_not_grow(kind, step):
    def equations(length):
        return sum(len(f.jaxpr.eqns) for f in program(kind, step, length).fragments)

    assert (equations(2) == equations(STEPS)) == (kind != "feedback")


def test_a_loop_of_no_iterations():
    mesh, *split = made("stacked", 1)

    def run(model, optimizer, x):
        def body(c, x):
            c, h = model.first(c, x)
            return c, model.out(model.second((h, h), h)[1])

        return jax.lax.scan(body, jnp.zeros((8, WIDTH)), x)

    with mesh:
        carry, ys = mm.jit(run)(*split, jnp.zeros((0, 8, 6)))
        assert carry.shape == (8, WIDTH) and ys.shape == (0, 8, 3) and not carry.any()


@dataclasses.dataclass(eq=False)
class Node:
    """Like an equation."""

    invars: list[Any]
    outvars: list[Any]
    mesh: int | None


@st.composite
def bodies(draw):
    """Random equations over what was made before them, in this iteration or in the last."""
    count = draw(st.integers(1, 9))
    carried = draw(st.lists(st.integers(0, count - 1), unique=True, max_size=4))
    made = [jex.Var(jax.typeof(np.zeros(draw(st.integers(0, 3))))) for _ in range(count)]
    enters = [jex.Var(made[n].aval) for n in carried]
    nodes = []
    for n in range(count):
        atoms = [jex.Var(jax.typeof(0.0)), *made[:n], *enters]
        read = draw(st.lists(st.sampled_from(atoms), max_size=3, unique=True))
        nodes.append(Node(read, [made[n]], draw(st.sampled_from([None, None, 0, 1, 2]))))
    return nodes, enters, [made[n] for n in carried]


@given(bodies())
def test_parts_of_random_loops(found):
    nodes, carry_in, carry_out = found
    parts = distribute(nodes, carry_in, carry_out, lambda n: n.mesh, lambda v: ())
    maker = {v: i for i, n in enumerate(nodes) for v in n.outvars}
    made_by = maker | {v: maker[out] for v, out in zip(carry_in, carry_out)}
    reach = {(made_by[a], i) for i, n in enumerate(nodes) for a in n.invars if a in made_by}
    for k, i, j in itertools.product(range(len(nodes)), repeat=3):  # who depends on whom, at last (Warshall)
        if (i, k) in reach and (k, j) in reach:
            reach.add((i, j))
    tied = [n.mesh for n in nodes]
    both = [
        (i, j) for i, j in reach if (j, i) in reach and None not in (tied[i], tied[j]) and tied[i] != tied[j]
    ]
    assert (parts is None) == bool(both)
    if parts is None:
        return
    assert sorted(nodes.index(n) for part in parts for n in part.nodes) == list(range(len(nodes)))
    assert sorted(i for part in parts for i in part.carries) == list(range(len(carry_in)))
    given: set[Any] = set()
    for part in parts:
        assert {n.mesh for n in part.nodes} <= {None, part.mesh}
        own = {v for n in part.nodes for v in n.outvars} | {carry_in[i] for i in part.carries}
        needed = {a for n in part.nodes for a in n.invars if a in made_by} - own
        assert needed == set(part.takes) <= given
        given.update(part.gives)
        assert set(part.gives) <= own
