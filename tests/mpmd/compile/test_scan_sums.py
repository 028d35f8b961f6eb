"""What a scan stacks for a sum is added row by row inside the scan, if nothing else reads it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx import _compat
from mmnnx.mpmd.compile.scan_sums import rewrite_fragment
from mmnnx.mpmd.ir.fragments import Fragment
from tests.slow import all_but

ROWS = jnp.arange(12.0, dtype=jnp.float32).reshape(4, 3) / 7
TOTAL = jnp.linspace(1, 2, 12, dtype=jnp.float32).reshape(4, 3)


def scan(rows: jax.Array, reverse: bool = False) -> tuple[jax.Array, jax.Array]:
    """A running product, and what it was at each row."""
    step = lambda carry, row: (carry * (1 + row), jnp.sin(carry) * row)
    return jax.lax.scan(step, jnp.ones(3), rows, reverse=reverse)


def added_later(total, rows):
    carry, stack = scan(rows)
    return carry, stack + total


def backwards(total, rows):
    return total + scan(rows, reverse=True)[1]


def transposed(total, rows):
    return total.T + scan(rows)[1].T


def in_another_type(total, rows):
    stack = scan(rows)[1]
    return total + stack.astype(jnp.float16).astype(jnp.float32)


def two_of_one_scan(total, rows):
    step = lambda carry, row: (carry, (row * 2, row * 3, row * 4))
    _, (a, b, kept) = jax.lax.scan(step, 0, rows)
    return a + total, total.T.T * 2, kept, b


def gradients_with_a_carry_that_stays(total, rows):
    """The gradient of a sum goes back through a scan as it is."""

    def loss(rows, start):
        step = lambda carry, row: ((jnp.sin(carry[0]) * row, carry[1] + carry[0].sum()), None)
        (x, added), _ = jax.lax.scan(step, (jnp.ones(3), start), rows)
        return x.sum() + added**2

    of_rows, of_start = jax.grad(loss, argnums=(0, 1))(rows, 1.0)
    return total + of_rows, of_start


def as_a_fragment(fun: Callable, *args: jax.Array) -> Fragment:
    closed = jax.make_jaxpr(fun)(*args)
    jaxpr = closed.jaxpr
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    return Fragment("f", "task", mesh, "none", None, closed, tuple(jaxpr.invars), tuple(jaxpr.outvars))


def scanned_stacks(f: Fragment) -> int:
    """How many values the scans of a fragment stack."""
    eqn = [e for e in f.jaxpr.eqns if e.primitive.name == "scan"][-1]
    _, carries = _compat.scan_counts(eqn.params)
    return len(eqn.outvars) - carries


def check(fun: Callable, total: jax.Array = TOTAL, rows: jax.Array = ROWS) -> tuple[Fragment, Fragment]:
    """Fragments of `fun` and of what it is rewritten to, which give the same bits."""
    before = as_a_fragment(fun, total, rows)
    after = rewrite_fragment(before)
    wanted, got = (jax.jit(jex.jaxpr_as_fun(f.jaxpr))(total, rows) for f in (before, after))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert (after.invars, after.outvars) == (before.invars, before.outvars)
    return before, after


@pytest.mark.parametrize("fun", [added_later, backwards, in_another_type, gradients_with_a_carry_that_stays])
def test_it_is_added_inside(fun):
    before, after = check(fun)
    assert scanned_stacks(before) == 1 and scanned_stacks(after) == 0


def test_rows_that_are_another_dimension_of_the_sum():
    """The sum has the layout of the weight, as where the stacked dimension is not the first."""
    fun = lambda total, rows: total + scan(rows)[1].T
    _, after = check(fun, TOTAL.T)
    assert scanned_stacks(after) == 0


@pytest.mark.parametrize(
    "fun",
    [
        transposed,  # the sum is not an input
        two_of_one_scan,  # the sum is read twice
        lambda total, rows: (lambda stack: (total + stack, stack))(scan(rows)[1]),
        lambda total, rows: (lambda stack: stack + stack)(scan(rows)[1]) * total,
        lambda total, rows: total + jnp.sin(scan(rows)[1]),
    ],
)
def test_what_is_read_elsewhere_stays_as_it_is(fun):
    before, after = check(fun)
    assert after is before


def test_no_rows():
    before, after = check(added_later, TOTAL[:0], ROWS[:0])
    assert after is before


@pytest.mark.parametrize(
    "schedule, per_call",
    all_but([("1f1b", 1)], [("1f1b", 1), ("zero-bubble-h1", 1), ("1f1b", 2)]),
)
def test_a_stage_holds_the_gradient_of_one_layer_beside_its_sums(schedule, per_call):
    """Compiled for TPUs: without this a second stack of gradients, as large as the first."""
    mesh = mm.MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "data"), devices=mm.target("v5e:2x4"))
    stages = [mm.Task(f"stage{i}", mesh_slice={"stage": i}) for i in range(4)]

    def loss_fn(weights, x):
        layer = lambda x, w: (x + jnp.tanh(x @ w), None)
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    with mesh:
        placed = mm.TaskSharding({...: (stages, P())})

        @mm.jit(in_shardings=(placed, None), out_shardings=placed, donate_argnums=0)
        def step(weights, batch):
            loop = dict(dim=0, size=4, argnum=1, reduce="mean", schedule=schedule, per_call=per_call)
            grad_fn = mm.microbatch(jax.grad(loss_fn), **loop)
            return weights - 0.1 * grad_fn(weights, batch)

        weights = jax.ShapeDtypeStruct((16, 4096, 4096), jnp.float32)
        plan = mm.plan(step, weights, jax.ShapeDtypeStruct((32, 4096), jnp.float32))
    makes_gradients = "backward" if schedule == "1f1b" else "backward-weight"
    backwards = [f for f in plan.fragments if f.name.endswith(makes_gradients)]
    assert len(backwards) == 4
    for f in backwards:
        assert f.temporary_bytes < 0.6 * f.output_bytes, f.name
