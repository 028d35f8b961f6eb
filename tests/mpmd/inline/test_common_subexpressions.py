"""What a step computes twice from weights is computed and sent once, and nothing else is merged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import mmnnx as mm
from tests import models
from tests.models import make
from tests.mpmd.parity import (
    MOMENTUM,
    assert_parity,
    assert_same,
    born,
    born_with_optimizer,
    pipeline,
    place,
    train_step,
)

PATHS = [("embed",), ("blocks", 0)], [("blocks", 1), ("norm",), ("head",)]


def log_probs(model, batch):
    tokens, targets = batch["x"], batch["target"]
    return jnp.take_along_axis(jax.nn.log_softmax(model(tokens)), targets[..., None], -1)


def once(model, batch):
    new = log_probs(model, batch)
    return -jnp.exp(new - lax.stop_gradient(new)).mean()


def twice(model, batch):
    old = lax.stop_gradient(log_probs(model, batch))
    return -jnp.exp(log_probs(model, batch) - old).mean()


def work(program: mm.Program) -> tuple[int, int, int]:
    """How many products its calls make, in how many transfers it sends how many bytes."""
    made = sum(e.primitive.name == "dot_general" for c in program.calls for e in c.fragment.jaxpr.eqns)
    return made, len(program.transfers), sum(t.nbytes for t in program.transfers)


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [None, 2])
def test_a_forward_for_the_loss_and_one_beside_it(microbatch):
    """The activations of an embedding, attention, GELU and a softmax are sent once."""
    mesh, tasks = pipeline(2)
    model, batch = make(models.Transformer, layers=2), models.tokens()
    placement, options = place(tasks, *PATHS), dict(microbatch=microbatch, schedule="1f1b")
    program = assert_parity(
        *(model, twice, batch, placement),
        **dict(mesh=mesh, optimizer=MOMENTUM, steps=2, whole_batch=False, **options),
    )
    with mesh:
        placed = born_with_optimizer(model, placement, MOMENTUM)
        assert work(program) == work(train_step(mm.jit, once, **options).program(*placed, batch))


class Two(nnx.Module):
    """A layer for each of two tasks, and dropout between them."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.b(self.dropout(nnx.relu(self.a(x))))


MESH, TASKS = pipeline(2)
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def ran(fun):
    """The program of a function of the model and X, whose results are those of `nnx.jit`."""
    placement = place(TASKS, ["a", "dropout"], ["b"])
    with MESH:
        jitted = mm.jit(fun)
        program = jitted.program(born(make_two, placement), X)
        model = born(make_two, placement)
        got = jitted(model, X)
    expected_model = make_two()
    assert_same(got, nnx.jit(fun)(expected_model, X))
    assert_same(model, expected_model)
    return program, got


def make_two():
    return Two(nnx.Rngs(0))


def products(program: mm.Program) -> list[str]:
    """The fragments that hold a product, once for each."""
    return [f.name for f in program.fragments for e in f.jaxpr.eqns if e.primitive.name == "dot_general"]


def test_each_result_is_an_array_of_its_own():
    def forward_twice(model, x):
        return model.b(model.a(x)), model.b(model.a(x))

    program, (first, second) = ran(forward_twice)
    assert len(program.transfers) == 1
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()


def test_other_random_numbers_are_another_value():
    def forward_twice(model, x):
        return model(x) + model(x)

    program, _ = ran(forward_twice)
    assert products(program) == ["stage0", "stage1", "stage1"]  # before and after what is dropped


def test_in_the_body_of_a_while():
    def decode(model, x):
        step = lambda x: jnp.tanh(model.b(model.a(x)) - model.b(model.a(x)).mean())
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x))

    program, _ = ran(decode)
    assert len(products(program)) == 2


@pytest.mark.parametrize("count", [None, 2])
def test_a_norm_that_clips_and_is_a_metric(count):
    """Both are made of what was summed over the microbatches."""

    def clipped(model, x):
        grad_fn = nnx.grad(lambda model, x: jnp.sin(model(x)).mean())
        grads = mm.microbatch(grad_fn, dim=0, count=count, argnum=1)(model, x) if count else grad_fn(model, x)
        return optax.clip_by_global_norm(1e-3).update(grads, ())[0], grads

    def and_its_norm(model, x):
        updates, grads = clipped(model, x)
        return updates, grads, 2 * optax.tree.norm(grads)

    alone, with_norm = (ran(fun)[0].transfers for fun in (clipped, and_its_norm))
    assert [(t.source, t.target) for t in with_norm] == [(t.source, t.target) for t in alone]


def test_two_tasks_compute_one_each():
    def in_both(model, x):
        multiply = lambda task: mm.task(jnp.dot, task=task)(x, model.a.kernel[...])
        return sum(map(multiply, TASKS))

    program, _ = ran(in_both)
    assert sorted(products(program)) == ["stage0", "stage1"]


NARROW = {
    "repeat": (lambda h: jnp.repeat(h[:, :2], 4, axis=1), 2),
    "norm": (lambda h: h * lax.rsqrt((h * h).mean(-1, keepdims=True)), 8),
}


@pytest.mark.parametrize("kind", NARROW)
def test_layers_of_two_meshes_do_the_same_to_a_value(kind):
    """Keys of fewer heads, which each layer repeats; or a norm without weights. The value is sent, and not
    what both make of it, which is as large or larger."""
    widen, features = NARROW[kind]

    def loss_fn(model, x):
        h = model.a(x)
        after = model.b(widen(h)) + (h if features == 8 else 0)
        return (model.a(widen(h)) ** 2).mean() + (after**2).mean()

    program, _ = ran(nnx.grad(loss_fn))
    shapes = [t.shape for t in program.transfers if np.prod(t.shape) > 4]  # not what is made of each row
    assert shapes == [(4, features)] * 2  # there, and its gradient back


def test_what_a_barrier_keeps_apart():
    def forward_twice(model, x):
        y, z = (lax.optimization_barrier(model.a(x)) for _ in range(2))
        return model.b(y - z)

    program, _ = ran(forward_twice)
    barriers = [
        e for f in program.fragments for e in f.jaxpr.eqns if e.primitive.name == "optimization_barrier"
    ]
    assert len(barriers) == 2


def test_what_is_printed_twice(capfd):
    def say_twice(model, x):
        for _ in range(2):
            jax.debug.print("mean {}", model.a(x).mean())
        return x

    ran(say_twice)
    assert capfd.readouterr().out.count("mean") == 2 * 2  # by `nnx.jit` as well


def test_a_checkpoint_over_two_tasks_is_computed_again():
    def loss_fn(model, x):
        forward = lambda model: jnp.tanh(model.b(jnp.tanh(model.a(x))))
        return nnx.remat(forward)(model).mean()

    program, _ = ran(nnx.value_and_grad(loss_fn))
    assert products(program).count("stage0 backward") == 2  # a forward, and a weight's gradient
