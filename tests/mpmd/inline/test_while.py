"""A `while` over several tasks: the host reads its condition, and dispatches its body once more."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import mmnnx as mm
from mmnnx.mpmd.compile.rewrites import rewrite
from tests.mpmd.parity import assert_same, born, pipeline, place, values
from tests.slow import few


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.seen = nnx.BatchStat(jnp.zeros(4))

    def __call__(self, x):
        return jnp.tanh(self.b(jnp.tanh(self.a(x))))


OWNED = ["a", "drop"], ["b", "seen"]
X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


def carried(m, x, n):
    """The model is a carry, none of whose state changes."""
    body = lambda c: (c[0], c[1] + 1, c[0](c[2]))
    return nnx.while_loop(lambda c: c[1] < n, body, (m, 0, x))[2]


def closed_over(m, x, n):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, m(c[1])), (0, x))


def dynamic_bounds(m, x, n):
    return lax.fori_loop(1, n + 1, lambda i, c: m(c) * i, x)


def until_it_is_small(m, x, n):
    """The condition reads what the last task makes."""
    return lax.while_loop(lambda x: jnp.sum(x**2) > 1.0, lambda x: 0.5 * m(x), x * n)


def condition_of_several_tasks(m, x, n):
    def goes_on(c):
        i, x = c
        return (m.b(m.a(x)).sum() + m.a.kernel[...].sum() < 100.0) & (i < n)

    return lax.while_loop(goes_on, lambda c: (c[0] + 1, m(c[1]) + 1), (0, x))


def written(m, x, n):
    """State of both tasks changes, and so do keys and counters."""

    def body(c):
        m, i, x = c
        m.seen[...] += x.sum(0)
        m.a.bias[...] += m.b(x).mean(0)
        return m, i + 1, m(m.drop(x))

    return nnx.while_loop(lambda c: c[1] < n, body, (m, jnp.int32(0), x))[1:]


def on_several_meshes(m, x, n):
    """Carries are on one mesh and on the other, one is on both; they change places; one is never read."""

    def body(c):
        i, y, z, _ = c
        return i + 1, jnp.tanh(m.a(z)), jnp.tanh(m.b(y)), y + z

    return lax.while_loop(lambda c: c[0] < n, body, (0, jnp.tanh(m.a(x)), m.b(x), x))


def two(m, x, n):
    y = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, m(c[1])), (0, x))[1]
    z = lax.while_loop(lambda c: c.sum() < n, lambda c: c + jnp.abs(m(y)), jnp.zeros_like(y))
    return m(z) + y


def within_a_while(m, x, n):
    def body(c):
        i, x, total = c
        j, x = lax.while_loop(lambda c: c[0] < i, lambda c: (c[0] + 1, m(c[1]) + x), (0, x))
        return i + 1, x, total + j

    return lax.while_loop(lambda c: c[0] < n, body, (0, x, 0))


def within_a_cond(m, x, n):
    loop = lambda x: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, m(c[1])), (0, x))[1]
    return lax.cond(n == 3, loop, lambda x: m.a(x) + 1, x)


def within_a_switch_with_keys(m, x, n):
    """The branches return keys, and one of them changes state."""

    def loop(m, x, key):
        def body(c):
            m, i, x = c
            m.seen[...] += 1.0
            return m, i + 1, m(x)

        return nnx.while_loop(lambda c: c[1] < n, body, (m, 0, x))[2], jax.random.split(key)[0]

    branches = [lambda m, x, key: (m.a(x), key), loop]
    y, key = nnx.switch(n // 2, branches, m, x, jax.random.key(0))
    return y + jax.random.normal(key, y.shape)


def within_a_scan(m, x, n):
    def body(x, i):
        y = lax.while_loop(lambda c: c[0] < i, lambda c: (c[0] + 1, m(c[1])), (0, x))[1]
        return y, y.sum()

    return lax.scan(body, x, jnp.arange(2) + n)


def within_a_cond_in_a_scan(m, x, n):
    def body(x, i):
        loop = lambda x: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, m(c[1])), (0, x))[1]
        return lax.cond(i > 0, loop, lambda x: m.a(x), x), None

    return lax.scan(body, x, jnp.arange(2))[0]


def around_scans_and_conds(m, x, n):
    def body(c):
        i, x = c
        x = lax.cond(i % 2 == 0, lambda x: m(x), lambda x: m.a(m.b(x)), x)
        x, sums = lax.scan(lambda x, k: (m(x) + k, x.sum()), x, jnp.arange(2.0))
        return i + 1, x + sums.sum()

    return lax.while_loop(lambda c: c[0] < n, body, (0, x))


def training(m, x, n):
    """All of a training loop, which ends when the loss is small."""
    optimizer = nnx.Optimizer(m, optax.adam(1e-2, eps=1e-1), wrt=nnx.Param)

    def body(c):
        m, optimizer, i, _ = c
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(m)
        optimizer.update(m, grads)
        return m, optimizer, i + 1, loss

    _, optimizer, _, loss = nnx.while_loop(
        lambda c: (c[2] < n) & (c[3] > 1e-3), body, (m, optimizer, 0, jnp.float32(1.0))
    )
    return loss, nnx.state(optimizer)


def around_microbatches(m, x, n):
    def body(c):
        m, i, _ = c
        grad_fn = mm.microbatch(
            nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2)),
            dim=0, size=2, argnum=1, schedule="1f1b", reduce="mean",
        )  # fmt: skip
        loss, grads = grad_fn(m, x)
        nnx.update(m, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(m, nnx.Param), grads))
        return m, i + 1, loss

    return nnx.while_loop(lambda c: c[1] < n, body, (m, 0, jnp.float32(0.0)))[2]


def before_a_gradient(m, x, n):
    """What is found by a loop is what the loss is of."""
    y = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, m(c[1])), (0, m.a(x)))[1]
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(y) - m(x)) ** 2))(m)
    nnx.update(m, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(m, nnx.Param), grads))
    return loss


def forward_derivative(m, x, n):
    return jax.jvp(lambda x: closed_over(m, x, n)[1], (x,), (jnp.ones_like(x),))


def mapped(m, x, n):
    """The rows have different numbers of iterations."""
    loop = lambda x, n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, m(c[1])), (0, x))
    return jax.vmap(loop)(x, n + jnp.arange(2))


def constant_keys(m, x, n):
    """Each iteration draws the same, of a key that is made of literals alone."""
    noise = lambda x: jax.random.normal(jax.random.key(0), x.shape)
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, m(c[1]) + noise(x)), (0, x))


CASES = [
    carried, closed_over, dynamic_bounds, until_it_is_small, condition_of_several_tasks, written,
    on_several_meshes, two, within_a_while, within_a_cond, within_a_switch_with_keys, within_a_scan,
    within_a_cond_in_a_scan, around_scans_and_conds, training, around_microbatches, before_a_gradient,
    forward_derivative, mapped, constant_keys,
]  # fmt: skip


def compare(run, tasks, mesh, calls=(0, 3), rtol=1e-4):
    """Has `run` return and leave in the model what it does under nnx.jit, call after call."""
    whole = Model()
    expect = nnx.jit(run)
    with mesh:
        model = born(Model, place(tasks, *OWNED))
        split = mm.jit(run)
        for n in calls:
            got, want = split(model, X, jnp.int32(n)), expect(whole, X, jnp.int32(n))
            assert_same(values((got, nnx.state(model))), values((want, nnx.state(whole))), rtol)
        program = split.program(model, X, jnp.int32(0))
    rewrite(program).program.verify()
    assert len({c.mesh for c in program.calls}) == 2
    assert "while %" in str(program)


@few(5)
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_parity(run):
    """After no iteration, and after several."""
    mesh, tasks = pipeline(2)
    compare(run, tasks, mesh)


def test_what_is_handed_on_is_not_copied():
    """A model that is a carry, none of whose weights change: they stay in their buffers."""
    mesh, tasks = pipeline(2)
    with mesh:
        program = mm.jit(carried).program(born(Model, place(tasks, *OWNED)), X, jnp.int32(0))
    weights = {s for s, (v, _) in enumerate(program.values) if v.aval.shape == (4, 4)}
    assert weights and weights <= program.inputs.keys()


def test_tasks_that_are_named():
    """Where the state is new, and so in no place yet, task scopes say where an iteration runs."""
    mesh, tasks = pipeline(2)

    def run(m, x, n):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(m)
        nnx.update(m, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(m, nnx.Param), grads))
        first = mm.task(lambda x: jnp.tanh(m.a(x)), task=tasks[0])
        second = mm.task(lambda x: m.b(x), task=tasks[1])
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, second(first(c[1]))), (0, x + loss))

    compare(run, tasks, mesh)


def test_callbacks():
    """Of the body as often as it runs, of the condition once more, also if nobody reads the results."""
    said = []

    def run(m, x, n):
        def goes_on(c):
            jax.debug.callback(lambda i: said.append(("condition", int(i))), c[0])
            return c[0] < n

        def body(c):
            y = m(c[1])
            jax.debug.callback(lambda i, _: said.append(("body", int(i))), c[0], y)
            return c[0] + 1, y

        lax.while_loop(goes_on, body, (0, x))
        return m.a(x)

    mesh, tasks = pipeline(2)
    with mesh:
        mm.jit(run)(born(Model, place(tasks, *OWNED)), X, 2)
        jax.effects_barrier()
    assert sorted(said) == [("body", 0), ("body", 1), *(("condition", n) for n in range(3))]


@pytest.mark.slow
def test_a_line_search():
    """Optimizers with loops over all parameters in them, as optax has."""
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(max_linesearch_steps=8))

    def run(m, x, n):
        optimizer = nnx.Optimizer(m, tx, wrt=nnx.Param)
        graph, params, rest = nnx.split(m, nnx.Param, ...)
        value = lambda params: jnp.mean((nnx.merge(graph, params, rest)(x) - n) ** 2)
        loss, grads = jax.value_and_grad(value)(params)
        optimizer.update(m, grads, grad=grads, value=loss, value_fn=value)
        return loss

    mesh, tasks = pipeline(2)
    compare(run, tasks, mesh, calls=(1, 1))


def test_conjugate_gradients():
    """A Gauss-Newton step (Martens 2010): the products of the solver go over the layers as a model does."""

    def step(model, x):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        net = lambda params: nnx.merge(graph, params, rest)(x)
        grads = jax.grad(lambda params: (net(params) ** 2).mean())(params)

        def product(v):
            tangent = jax.jvp(net, (params,), (v,))[1]
            return jax.tree.map(lambda a, v: a + 0.1 * v, jax.vjp(net, params)[1](tangent)[0], v)

        direction, _ = jax.scipy.sparse.linalg.cg(product, grads, maxiter=3)
        nnx.update(model, jax.tree.map(lambda w, d: w - d, params, direction))
        return net(nnx.state(model, nnx.Param))

    mesh, tasks = pipeline(2)
    whole = Model()
    with mesh:
        split = born(Model, place(tasks, *OWNED))
        run = mm.jit(step)
        sent = run.program(split, X).transfers
        for _ in range(2):
            assert_same(run(split, X), nnx.jit(step)(whole, X), 1e-4)
    assert_same(nnx.state(split), nnx.state(whole), 1e-4)
    assert {t.shape for t in sent if len(t.shape) == 2} == {X.shape}  # no kernel, and no gradient of one


def test_refused():
    """In a loop of mm.microbatch, and, by JAX, in the reverse mode."""

    def loss(m, x):
        return closed_over(m, x, 3)[1].sum()

    mesh, tasks = pipeline(2)
    with mesh:
        model = born(Model, place(tasks, *OWNED))
        loop = mm.microbatch(loss, dim=0, size=1, argnum=1)
        with pytest.raises(
            ValueError, match="'while'.* 2 tasks: stage0.*stage1.* In mm.microbatch there is no"
        ):
            mm.jit(loop)(model, X)
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            mm.jit(nnx.grad(loss))(model, X)
