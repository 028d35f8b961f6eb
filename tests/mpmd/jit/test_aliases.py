"""Variables that come to hold one value: each keeps its home, and its updates, call after call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests.mpmd.parity import assert_same, homes, pipeline, values
from tests.slow import examples, few, grid

NAMES = "abc"


class PlacedVar(nnx.Module):
    """Three Variables of one shape."""

    def __init__(self, start):
        for n, name in enumerate(NAMES):
            setattr(self, name, nnx.Variable(jnp.full(4, start * 10.0**n)))


def two():
    return PlacedVar(1), PlacedVar(2)


def swapped(m, n, x):
    m.a[...], n.a[...] = n.a[...], m.a[...]
    m.b[...] += x
    return m.b[...].sum()


def queue(m, n, x):
    m.c[...] = m.b[...]
    m.b[...] = m.a[...]
    m.a[...] = x
    return x.sum()


def argument(m, n, x):
    m.a[...] = x
    n.a[...] = x
    return m.b[...] + x, x


def target(m, n, x):
    n.a[...] = m.a[...]
    m.a[...] += x
    return m.a[...]


def all_of_it(m, n, x):
    m.a[...] += x
    nnx.update(n, nnx.state(m))
    return m.a[...], m.a[...], n.b[...]


def chosen(m, n, x):
    m.a[...] += x
    nnx.update(n, jax.lax.cond(m.a[0] > 3, lambda: nnx.state(m), lambda: nnx.state(n)))


def constant(m, n, x):
    value = jnp.arange(4.0) * x.sum()
    for name in NAMES:
        getattr(m, name)[...] = getattr(n, name)[...] = value


def written_in_a_loop(m, n, x):
    def body(m, n, row):
        m.a[...] += row.sum()
        m.b[...] = n.b[...] = m.a[...]
        n.c[...] = m.b[...]
        return (m.c[...] * n.c[...]).sum() * row.sum()

    return mm.microbatch(body, 0, 2, argnum=2, schedule="1f1b")(m, n, x)


def placed(stage, other):
    """Two modules, each on a mesh of two devices."""
    mesh, tasks = pipeline(2, 2)
    rules = [mm.TaskSharding({...: (tasks[n], spec)}) for n, spec in ((stage, P()), (other, P("model")))]
    with mesh:
        return mesh, *mm.jit(two, out_shardings=tuple(rules))()


def assert_alike(step, other, donate, graph=True):
    """Four calls do to two modules on meshes what they do on one device."""
    whole, alone = two(), nnx.jit(step)
    mesh, *split = placed(0, other)
    with mesh:
        run = mm.jit(step, donate_argnums=(0, 1) if donate else (), graph=graph)
        before = homes(nnx.state(tuple(split)))
        for n in range(4):
            x = jnp.arange(4.0) + n
            assert_same(
                values((run(*split, x), *map(nnx.state, split))),
                values((alone(*whole, x), *map(nnx.state, whole))),
            )
            assert homes(nnx.state(tuple(split))) == before


STEPS = [swapped, queue, argument, target, all_of_it, chosen, constant, written_in_a_loop]


@pytest.mark.parametrize(
    "other", [pytest.param(0, marks=pytest.mark.slow, id="one mesh"), pytest.param(1, id="two meshes")]
)
@pytest.mark.parametrize("step, donate", grid(STEPS, [False, True]))
def test_each_call_is_as_on_one_device(step, other, donate):
    assert_alike(step, other, donate)


def exchanged(m):
    m.a, m.b = m.b, m.a
    m.a[...] += 10


def replaced(m):
    m.a = nnx.Variable(m.a[...] + 1)


def exchanged_modules(m):
    m.first, m.second = m.second, m.first
    m.first.a[...] += 10


@few(1)
@pytest.mark.parametrize("step", [exchanged, replaced, exchanged_modules])
def test_variables_that_others_hold_too(step):
    """What a call writes is in those that the modules held then."""

    class Both(PlacedVar):
        def __init__(self):
            super().__init__(1)
            self.first, self.second = two()

    mesh, tasks = pipeline(2)
    rules = mm.TaskSharding({mm.path("a"): tasks[0], mm.path("first"): tasks[0], mm.path(...): tasks[1]})
    with mesh:
        found = []
        for jit, model in ((nnx.jit, Both()), (mm.jit, mm.jit(Both, out_shardings=rules)())):
            run, held = jit(step), [model.a, model.b, model.first.a, model.second.a]
            for _ in range(4):
                run(model)
                held.append(model.a)
            found.append([float(v[0]) for v in held])
    assert found[0] == found[1]


@st.composite
def assignments(draw):
    """What a step writes into which Variable: another, the argument, or something new."""
    variable = st.tuples(st.integers(0, 1), st.sampled_from(NAMES))
    what = st.one_of(variable, st.sampled_from(["argument", "sum"]))
    return draw(st.lists(st.tuples(variable, what), min_size=1, max_size=6))


@examples(25)
@given(assignments(), st.sampled_from([0, 1]), st.booleans())
def test_any_assignments(found, other, donate):
    def step(m, n, x):
        nodes = m, n
        for (node, name), what in found:
            to = getattr(nodes[node], name)
            if what == "argument":
                to[...] = x
            elif what == "sum":
                to[...] += x
            else:
                to[...] = getattr(nodes[what[0]], what[1])[...]

    assert_alike(step, other, donate)


TABLE = jnp.arange(4.0)


@pytest.mark.parametrize(
    "table", [lambda: TABLE, lambda: jnp.cos(jnp.arange(4.0))], ids=["closed over", "computed"]
)
def test_one_table_is_born_on_every_mesh(table):
    def make():
        held, value = PlacedVar(1), table()
        for name in NAMES:
            getattr(held, name)[...] = value
        return held

    mesh, tasks = pipeline(3, 2)
    with mesh:
        held = mm.jit(
            make, out_shardings=mm.TaskSharding({mm.path(n): tasks[k] for k, n in enumerate(NAMES)})
        )()
    for k, name in enumerate(NAMES):
        assert getattr(held, name)[...].sharding.device_set == set(mesh.mesh.devices[k].flat)
        np.testing.assert_array_equal(getattr(held, name)[...], table())


@pytest.mark.parametrize("stage", [0, 1], ids=["its mesh", "another"])
def test_a_copy_goes_where_it_is_asked_to_and_the_model_stays(stage):
    mesh, model, _ = placed(0, 1)
    before = homes(model)
    rules = mm.TaskSharding({...: (mm.Task("copy", mesh_slice={"stage": stage}), P("model"))})
    with mesh:
        copy = mm.jit(nnx.clone, out_shardings=rules)(model)
        where = NamedSharding(mesh.slice(stage=stage), P("model"))
    assert homes(model) == before and model.a[...].sharding.spec == P()
    assert all(x.sharding.is_equivalent_to(where, 1) for x in jax.tree.leaves(nnx.state(copy)))
    assert_same(copy, nnx.state(model))


@pytest.mark.parametrize("other", [0, 1], ids=["one mesh", "two meshes"])
def test_what_is_returned_is_the_callers_own(other):
    """A later call that is given the model for good does not take it along."""
    mesh, m, n = placed(0, other)
    with mesh:
        run = mm.jit(all_of_it, donate_argnums=(0, 1))
        returned = [run(m, n, TABLE) for _ in range(4)]
    for k, (a, again, b) in enumerate(returned):
        np.testing.assert_array_equal(a, 1 + (k + 1) * TABLE)
        np.testing.assert_array_equal(again, a)
        np.testing.assert_array_equal(b, np.full(4, 10))


def test_what_tree_mode_returns_is_the_callers_own():
    mesh, m, _ = placed(0, 1)
    with mesh:
        value, total = mm.jit(lambda m: (m.a[...], m.b[...].sum()), graph=False)(m)
        mm.jit(lambda m: nnx.update(m, jax.tree.map(lambda x: x + 1, nnx.state(m))), donate_argnums=0)(m)
    np.testing.assert_array_equal(value, np.ones(4))
    assert float(total) == 40


def test_a_variable_takes_its_home_along():
    """Homes are those of Variables, whichever path they have after the call."""

    class Listed(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Param(jnp.full(4, float(n))) for n in range(4)])

    mesh, tasks = pipeline(2, 2)
    rules = {mm.path("layers", {0, 1}): (tasks[0], P()), mm.path("layers", {2, 3}): (tasks[1], P("model"))}
    with mesh:
        model = mm.jit(Listed, out_shardings=mm.TaskSharding(rules))()
        third = model.layers[2]
        before = third[...].sharding
        mm.jit(lambda model: model.layers.pop(0) and None)(model)
    assert model.layers[1] is third and third[...].sharding == before
    assert [float(v[0]) for v in model.layers] == [1, 2, 3]


def test_numpy_values_are_placed_too():
    def make():
        held = PlacedVar(1)
        held.a.set_value(np.arange(4, dtype=np.float32))
        return held

    mesh, tasks = pipeline(2, 2)
    rules = mm.TaskSharding({mm.path("a"): (tasks[1], P("model")), mm.path(...): (tasks[0], P())})
    with mesh:
        held = mm.jit(make, out_shardings=rules)()
        before = homes(held)
        assert before["['a'].value"] == set(mesh.mesh.devices[1].flat)
        mm.jit(lambda held: held.a.set_value(np.ones(4, np.float32)))(held)
        assert homes(held) == before
    np.testing.assert_array_equal(held.a[...], np.ones(4))


@pytest.mark.parametrize("other", [0, 1], ids=["one mesh", "two meshes"])
def test_new_values_keep_the_spec(other):
    mesh, m, n = placed(0, other)
    with mesh:
        before = [x.sharding for x in jax.tree.leaves(nnx.state((m, n)))]

        @mm.jit
        def step(m, n):
            for name in NAMES:
                mine, others = getattr(m, name), getattr(n, name)
                mine[...] = 0.9 * mine[...] + 0.1 * others[...]

        step(m, n)
        after = [x.sharding for x in jax.tree.leaves(nnx.state((m, n)))]
    assert all(a.is_equivalent_to(b, 1) for a, b in zip(after, before))


def test_two_models_whose_paths_are_alike():
    """Copies of state and gradients are where the state is."""
    mesh, m, n = placed(0, 1)
    with mesh:
        copies = mm.jit(lambda m, n: (nnx.clone(m), nnx.clone(n)))(m, n)
        assert homes(nnx.state(copies)) == homes(nnx.state((m, n)))
        grad_fn = nnx.grad(lambda n, x: (n.a[...] * n.b[...] * n.c[...] * x).sum())
        program = mm.jit(lambda m, n, x: mm.microbatch(grad_fn, 0, 2, argnum=1)(n, x)).program(
            m, n, jnp.ones((4, 4))
        )
    assert not program.transfers


@pytest.mark.parametrize("other", [0, 1], ids=["one mesh", "two meshes"])
def test_donating_one_array_twice_is_refused(other):
    mesh, m, n = placed(0, other)
    n.a.set_value(m.a.get_value())
    with (
        mesh,
        pytest.raises(ValueError, match=r"0\.a and 1\.a are one array, and donating it would take both"),
    ):
        mm.jit(target, donate_argnums=(0, 1))(m, n, TABLE)
    assert not m.a.get_value().is_deleted()
