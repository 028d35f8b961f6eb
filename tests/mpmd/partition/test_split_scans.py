"""The backward of stacked layers in two parts: from layer to layer, and the gradients of the weights."""

from collections import Counter

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx import _compat
from mmnnx.modules.lm import LM, LMConfig
from mmnnx.mpmd.ir.equations import Equation, is_var
from mmnnx.mpmd.ir.origin import at_home
from mmnnx.mpmd.ir.placement import Location, Placement, Reason
from mmnnx.mpmd.partition.split_scans import can_be_split, split_scans
from tests import models
from tests.models import make
from tests.mpmd.parity import MOMENTUM, assert_parity, pipeline, place
from tests.slow import few

INPUT, WEIGHT = "backward-input", "backward-weight"
SCHEDULES = ["zero-bubble-h1", "zero-bubble-h2", "interleaved-zero-bubble"]


def products(program: mm.Program) -> dict[str, Counter]:
    """By stage: the matrix products in the scans of each phase, and outside of scans."""
    found: dict[str, Counter] = {}

    def count(jaxpr, key):
        for e in jaxpr.eqns:
            found.setdefault(stage, Counter())[key] += e.primitive.name == "dot_general"
            for inner in jaxprs_in_params(e.params):
                count(inner, (key[0], key[1] or e.primitive.name == "scan"))

    for f in program.fragments:
        if f.position is not None:
            stage = f.task
            count(f.jaxpr.jaxpr, (f.phase, False))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stacks_of_two_layers(schedule):
    mesh, tasks = pipeline(2)
    program = assert_parity(
        make(models.ScanNet),
        models.squared_error,
        models.vectors(rows=8),
        place(tasks, ["first", ("stacks", 0)], [("stacks", 1), "last"]),
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
    )
    for counts in products(program).values():
        assert counts[INPUT, True] and counts[WEIGHT, True]


@pytest.mark.slow
def test_over_a_data_axis():
    """Its gradients are still reduced once a step."""
    mesh, tasks = pipeline(2, 2)
    program = assert_parity(
        make(models.ScanNet),
        models.squared_error,
        models.vectors(rows=16),
        place(tasks, ["first", ("stacks", 0)], [("stacks", 1), "last"]),
        mesh=mesh,
        microbatch=4,
        schedule="zero-bubble-h1",
        arg_shardings=P(mesh.axis_names[-1]),
        optimizer=MOMENTUM,
        steps=2,
    )
    assert not program.notes
    assert all(counts[INPUT, True] and counts[WEIGHT, True] for counts in products(program).values())


def language_model() -> LM:
    return LM(LMConfig(vocab=16, layers=4, width=8, heads=2, kv_heads=1, mlp=12, scan=2), rngs=nnx.Rngs(0))


def loss(model: LM, tokens: jax.Array) -> jax.Array:
    return model.loss(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_language_model(schedule):
    """Half of the products of the backward are of the weight part: one for each weight."""
    mesh, tasks = pipeline(2)
    placement = mm.TaskSharding(
        {
            mm.path("embed"): tasks[0],
            mm.path("blocks", "segments", 0): tasks[0],
            mm.path(...): tasks[1],
        }
    )
    program = assert_parity(
        language_model,
        loss,
        np.random.default_rng(0).integers(0, 16, (8, 6), np.int32),
        placement,
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        rtol=2e-5,
    )
    for counts in products(program).values():
        assert counts[WEIGHT, True] == 7  # kernels of a block; scales of norms come without a product
        assert counts[INPUT, True] > 0


# By itself


SHAPES = (3, 3), (5, 3), (3,)
W, ROWS, X = (np.random.default_rng(n).normal(size=s).astype(np.float32) for n, s in enumerate(SHAPES))


def step(w, carry, row):
    """One iteration: what goes on, and products that nothing waits for."""
    carry = jnp.tanh(w @ carry + row)
    return carry, (jnp.outer(carry, row) @ w, carry @ w * row, row + 1)


def scan(body=step, **options):
    return lambda w, x, rows: jax.lax.scan(lambda carry, row: body(w, carry, row), x, rows, **options)


def twice(w, carry, row):
    carry, (a, b, _) = step(w, carry, row)
    return carry, (a, a, b)


def part_of_another(w, carry, row):
    """What one is made of is made for another anyway, which is there twice."""
    carry, (a, *_) = step(w, carry, row)
    made = a + 1
    return carry, (made, made, a)


def read_on(w, carry, row):
    """The gradient is what the next iteration begins with."""
    carry = carry @ w + row
    return carry, carry


def shared(w, carry, row):
    """Two that are made of a third."""
    after = jnp.tanh(w @ carry)
    third = jnp.outer(carry, row) @ w
    return after, (third @ w, third.T @ w)


def printing(w, carry, row):
    jax.debug.callback(lambda x: None, row)
    return step(w, carry, row)


def nested(w, carry, row):
    carry, (a, *_) = step(w, carry, row)
    return carry, jax.jit(lambda a: a @ w)(a)


@few(4)
@pytest.mark.parametrize(
    "fun, gradients",
    [
        (scan(), 2),
        (scan(reverse=True), 2),
        (scan(unroll=2), 2),
        (scan(twice), 1),
        (scan(part_of_another), 0),
        (scan(read_on), 0),
        (scan(shared), 2),
        (scan(printing), 0),
        (scan(nested), 1),
        (scan(jax.checkpoint(step)), 0),  # one equation makes all, of what it computes again
        (lambda w, x, rows: jax.lax.map(lambda row: row @ w, rows), 0),
    ],
)
def test_the_parts_make_what_the_scan_made(fun, gradients):
    closed = jax.make_jaxpr(fun)(W, X, ROWS)
    (eqn,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
    placement = Placement()
    node = Equation(eqn, "")
    placement.put(node, Location(pipeline(1)[0].mesh, 0), "backward", Reason.READS_SAVED)
    assert can_be_split(node, placement) == bool(gradients)
    placement.where.update({v: at_home(None) for v in (*eqn.invars, *eqn.outvars) if is_var(v)})
    parts, _ = split_scans([node], placement, {0})
    assert len([e for e in parts if e.name == "scan"]) == 1 + gradients
    eqns = [new for e in closed.jaxpr.eqns for new in ([p.eqn for p in parts] if e is eqn else [e])]
    invars, outvars, _, constants = _compat.open_jaxpr(closed)
    rewritten = _compat.close_jaxpr(invars, outvars, eqns, dict(constants))
    for got, expected in zip(jex.jaxpr_as_fun(rewritten)(W, X, ROWS), jex.jaxpr_as_fun(closed)(W, X, ROWS)):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
