"""References: `jax.new_ref` and Variables with ref=True, as arguments of functions that mm.jit splits.

A reference is state: what it holds goes in, and what it holds after the call is seen by the caller.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import assert_same, pipeline
from tests.slow import few

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


class Watched(nnx.Module):
    """Two layers; references count the rows, and keep the sums of both activations."""

    def __init__(self):
        self.first, self.second = (nnx.Linear(8, 8, rngs=nnx.Rngs(n)) for n in range(2))
        self.rows = nnx.Variable(jnp.zeros((), jnp.int32), ref=True)
        self.first_sum, self.second_sum = (nnx.Variable(jnp.zeros(8), ref=True) for _ in range(2))

    def __call__(self, x):
        self.rows[...] += len(x)
        x = jnp.tanh(self.first(x))
        self.first_sum[...] += x.sum(0)
        x = self.second(x)
        self.second_sum[...] += x.sum(0)
        return x


def two_tasks():
    mesh, tasks = pipeline(2, 2)
    return mesh, mm.TaskSharding(
        {
            mm.path("first", "kernel"): (tasks[0], P(None, "model")),
            mm.path({"first", "first_sum"}): (tasks[0], P()),
            mm.path({"second", "second_sum"}): (tasks[1], P()),
        }
    )


def placed(mesh, placement):
    """A model with references is made outside, and moved."""
    return mm.jit(lambda m: m, out_shardings=placement)(Watched())


def held(model):
    """What the references of a model hold."""
    return {name: getattr(model, name)[...] for name in ("rows", "first_sum", "second_sum")}


MODES = [{}, {"graph": False}, {"graph_updates": False}]


@few(1)
@pytest.mark.parametrize("mode", MODES, ids=["graph", "tree", "no updates"])
def test_references_of_a_model_on_two_tasks(mode):
    """Repeated calls see, and show, what they hold; each stays where it was placed."""
    mesh, placement = two_tasks()
    alone, plain = Watched(), nnx.jit(lambda m, x: m(x), **mode)
    with mesh:
        model, f = placed(mesh, placement), mm.jit(lambda m, x: m(x), **mode)
        references = [v.get_raw_value() for v in (model.first_sum, model.second_sum)]
        homes = [mesh.slice(stage=n) for n in range(2)]
        for n in range(3):
            assert_same(f(model, X + n), plain(alone, X + n))
            assert_same(held(model), held(alone))
            for reference, home in zip(references, homes):
                assert reference.sharding.device_set == set(home.devices.flat)
        assert references == [v.get_raw_value() for v in (model.first_sum, model.second_sum)]
        assert f._fast_paths.known
    assert int(model.rows[...]) == 12


def test_a_moved_reference_has_the_sharding_that_was_asked_for():
    mesh, placement = two_tasks()
    stage1 = mm.Task("stage1", mesh_slice={"stage": 1})
    moved = mm.TaskSharding({mm.path("first_sum"): (stage1, P("model")), ...: (stage1, P())})
    with mesh:
        model, alone = placed(mesh, placement), Watched()
        mm.jit(lambda m: m, out_shardings=moved)(model)
        for n in range(2):
            assert model.first_sum.get_raw_value().sharding == NamedSharding(mesh.slice(stage=1), P("model"))
            mm.jit(lambda m, x: m(x))(model, X + n)
            alone(X + n)
        assert_same(held(model), held(alone))


@pytest.mark.slow
def test_plain_references():
    """As arguments, read and written by both tasks, made and frozen inside, and returned."""
    mesh, tasks = pipeline(2)
    a, b = (mm.task(fun, task=t) for fun, t in zip((jnp.sin, jnp.cos), tasks))

    def f(r, xs, x):
        inner = jax.new_ref(jnp.zeros(()))

        def body(carry, x):
            inner[...] += x.sum()
            r[...] += a(x)
            return carry, r[0]

        _, ys = jax.lax.scan(body, None, xs)
        r[1:] = b(r[1:] * x[1:])
        return ys, jax.freeze(inner), r

    mine, other = jax.new_ref(jnp.arange(3.0)), jax.new_ref(jnp.arange(3.0))
    with mesh:
        xs, split = jnp.ones((4, 3)), mm.jit(f)
        for x in (jnp.ones(3), 2 * jnp.ones(3)):
            *got, back = split(mine, xs, x)
            *want, _ = nnx.jit(f)(other, xs, x)
            assert back is mine
            assert_same(got, want)
            assert_same(mine[...], other[...])
        assert len({call.mesh for call in split.program(mine, xs, xs[0]).calls}) == 2


@few(1)
@pytest.mark.parametrize("size", [1, 2])
def test_references_in_a_microbatch_loop(size):
    """They are carried from each microbatch to the next, as under nnx.jit."""
    mesh, placement = two_tasks()

    def step(model, x):
        return mm.microbatch(lambda m, x: (m(x) ** 2).sum(), dim=0, size=size, argnum=1)(model, x)

    alone = Watched()
    with mesh:
        model, f = placed(mesh, placement), mm.jit(step)
        for n in range(2):
            assert_same(f(model, X + n), nnx.jit(step)(alone, X + n))
            assert_same(held(model), held(alone))


def test_references_beside_a_train_step():
    """Gradients by parameters that are no references; what is written outside of `nnx.grad` counts."""
    mesh, placement = two_tasks()

    def step(model, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        model(x)
        nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model, nnx.Param), grads))
        return loss

    alone = Watched()
    with mesh:
        model, f = placed(mesh, placement), mm.jit(step, donate_argnums=0)
        for n in range(2):
            assert_same(f(model, X + n), nnx.jit(step)(alone, X + n))
            assert_same(held(model), held(alone))
            assert_same(nnx.state(model, nnx.Param), nnx.state(alone, nnx.Param))


def test_a_reference_that_is_only_read_keeps_its_buffer():
    mesh, _ = pipeline(2)
    with mesh:
        r, w = (jax.device_put(jnp.ones(8), NamedSharding(mesh.slice(stage=n), P())) for n in (1, 0))
        r = jax.new_ref(r)
        before = r.unsafe_buffer_pointer()
        got = mm.jit(lambda w, r: (2 * w, 3 * r[...]))(w, r)
        assert r.unsafe_buffer_pointer() == before
    assert_same(got, (2 * np.ones(8, np.float32), 3 * np.ones(8, np.float32)))


def test_a_reference_is_overwritten_in_place():
    """What it held is given to what it holds next: no second buffer."""
    mesh, _ = pipeline(2)
    with mesh:
        r = jax.new_ref(jax.device_put(jnp.zeros(1024), NamedSharding(mesh.slice(stage=1), P())))
        w = jax.device_put(jnp.ones(1024), NamedSharding(mesh.slice(stage=0), P()))

        def f(w, r):
            r[...] += 1
            return 2 * w

        split = mm.jit(f)
        split(w, r)
        before = r.unsafe_buffer_pointer()
        split(w, r)
        assert r.unsafe_buffer_pointer() == before
    assert float(r[0]) == 2


def test_without_splitting():
    """mm.ignore_transforms runs all on one device; references go back to where they were."""
    mesh, placement = two_tasks()
    alone = Watched()
    with mesh:
        model = placed(mesh, placement)
        home = model.second_sum.get_raw_value().sharding
        with mm.ignore_transforms():
            got = mm.jit(lambda m, x: m(x))(model, X)
        assert_same(got, alone(X))
        assert_same(held(model), held(alone))
        assert model.second_sum.get_raw_value().sharding == home


def test_a_reference_that_a_function_makes_cannot_be_returned():
    """Nor does `jax.jit` return one; the message names it."""
    with pytest.raises(ValueError, match=r"first_sum.*ref=True.*made inside of mm\.jit.*outside"):
        mm.jit(lambda: {"model": Watched()})()


def test_a_reference_that_a_split_function_closes_over_is_refused():
    mesh, placement = two_tasks()
    r = jax.new_ref(jnp.zeros(8))

    def reads(m, x):
        r[...] += m(x).sum(0)

    with mesh, pytest.raises(ValueError, match=r"reads.*jax\.new_ref.*float32\[8\].*argument"):
        mm.jit(reads)(placed(mesh, placement), X)
    one = mm.jit(lambda x: r[...] + x)
    assert_same(one(jnp.ones(8)), jnp.ones(8))  # JAX alone runs what is in one place


def test_one_reference_twice_is_refused():
    """In tree mode, where NNX does not see to it that the function gets one; in the others it does."""
    r = jax.new_ref(jnp.zeros(8))
    on = NamedSharding(Mesh(jax.devices()[:2], ("x",)), P())
    with pytest.raises(ValueError, match=r"argument 0 and argument 1 are one jax\.Ref"):
        mm.jit(lambda a, b, c: a[...] + b[...] + c, graph=False)(r, r, jax.device_put(X[0], on))
    assert_same(mm.jit(lambda a, b: a[...] + b[...])(r, r), jnp.zeros(8))


def test_hijax_variables_are_refused():
    """By path, in every mode; where nnx.jit takes them depends on the version of Flax."""

    class Hijax(nnx.Module):
        def __init__(self):
            self.w = nnx.Variable(jnp.ones(4), hijax=True)

    for mode in MODES:
        with pytest.raises(ValueError, match=r"0\.w is a hijax Variable.*hijax=False"):
            mm.jit(lambda m: m.w[...].sum(), **mode)(Hijax())
    for stage in ("eval_shape", "trace", "lower", "program"):
        with pytest.raises(ValueError, match=r"0\.w is a hijax Variable.*hijax=False"):
            getattr(mm.jit(lambda m: m.w[...].sum()), stage)(Hijax())
