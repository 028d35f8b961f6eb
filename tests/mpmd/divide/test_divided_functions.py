"""Functions over state that spans meshes: where it lives, what a program looks like, and what callers see."""

from __future__ import annotations

from collections import Counter

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests import models
from tests.models import make
from tests.mpmd.divide.scanned import Scanned
from tests.mpmd.parity import (
    ADAMW,
    MOMENTUM,
    assert_same,
    born,
    born_with_optimizer,
    pipeline,
    train_step,
    values,
)
from tests.slow import all_but


def placement(tasks, sizes=None):
    layers = tasks if sizes is None else mm.Division(tasks, sizes=sizes)
    return mm.TaskSharding(
        {mm.path("first"): tasks[0], mm.path("last"): tasks[-1], mm.path("stacks"): (layers, P())}
    )


def stacked(depth, kind="tanh"):
    return make(Scanned, (kind,), depth)


def kernel(model):
    return model.stacks[0].linear.kernel.get_value()


STEP = train_step(mm.jit, models.squared_error, microbatch=2)


@pytest.mark.slow
def test_equal_pieces_are_one_array_of_jax():
    mesh, tasks = pipeline(4)
    with mesh:
        model, optimizer = born_with_optimizer(stacked(8), placement(tasks), ADAMW)
        for _ in range(2):
            w, moments = kernel(model), optimizer.opt_state[0].mu["stacks"][0]["linear"]["kernel"][...]
            for x in (w, moments):
                assert x.sharding == NamedSharding(mesh.mesh, P("stage"))
                assert [shard.data.shape[0] for shard in x.addressable_shards] == [2] * 4
            _, grads = STEP(model, optimizer, models.vectors())
        assert grads["stacks"][0]["linear"]["kernel"][...].sharding.device_set == w.sharding.device_set
        assert float(jnp.sum(kernel(model) ** 2)) > 0  # as any other array


@pytest.mark.slow
def test_no_piece_is_copied_on_its_way_in_or_out():
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(stacked(2), placement(tasks))
        same = mm.jit(lambda model: jax.tree.map(lambda w: w, nnx.state(model)))
        taken = same(model)  # a copy: what a function returns is the caller's
        pointers = lambda x: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
        before = pointers(kernel(model))
        step = train_step(mm.jit, models.squared_error, microbatch=2, donate_argnums=(0, 1))
        optimizer = mm.jit(lambda model: nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))(model)
        step(model, optimizer, models.vectors())
        assert pointers(kernel(model)) == before  # updated in place
        assert pointers(taken["stacks"][0]["linear"]["kernel"][...]) != before


@pytest.mark.slow
def test_a_program_does_not_grow_with_the_number_of_layers():
    programs = []
    for depth in (4, 64):
        mesh, tasks = pipeline(4)
        with mesh:
            model, optimizer = born_with_optimizer(stacked(depth), placement(tasks), MOMENTUM)
            programs.append(STEP.program(model, optimizer, models.vectors()))
    small, large = ([len(f.jaxpr.eqns) for f in program.fragments] for program in programs)
    assert small == large and len(programs[0].instructions) == len(programs[1].instructions)


@pytest.mark.slow
def test_one_transfer_each_way_at_each_boundary_for_each_microbatch():
    mesh, tasks = pipeline(4)
    with mesh:
        model, optimizer = born_with_optimizer(stacked(8), placement(tasks), MOMENTUM)
        program = STEP.program(model, optimizer, models.vectors())
    names = program.names
    sent = Counter((names[t.source_mesh], names[t.target_mesh]) for t in program.transfers)
    pairs = [(f"stage{i}", f"stage{i + 1}") for i in range(3)]
    assert sent == {pair: 4 for a, b in pairs for pair in ((a, b), (b, a))}


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("stage"), P("stage", None, "model")])
def test_an_array_that_is_put_over_the_axis_of_the_stages_means_the_same(spec):
    mesh, tasks = pipeline(2, 2)
    ends = mm.TaskSharding({mm.path("first"): tasks[0], mm.path("last"): tasks[1], ...: tasks[0]})
    with mesh:
        model = born(stacked(4), ends)
        state = nnx.state(model.stacks)
        put = lambda x: jax.device_put(x, NamedSharding(mesh.mesh, spec if x.ndim == 3 else P("stage")))
        nnx.update(model.stacks, jax.tree.map(put, state))
        optimizer = mm.jit(lambda model: nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param))(model)
        program = STEP.program(model, optimizer, models.vectors())
        loss, _ = STEP(model, optimizer, models.vectors())
        assert len({call.mesh for call in program.calls if call.phase == "forward"}) == 2
        assert kernel(model).sharding.is_equivalent_to(NamedSharding(mesh.mesh, spec), 3)
    whole = born(stacked(4), None)
    expected, _ = train_step(nnx.jit, models.squared_error, microbatch=2)(
        whole, nnx.Optimizer(whole, MOMENTUM, wrt=nnx.Param), models.vectors()
    )
    assert_same(loss, expected)
    assert_same(model, whole, rtol=1e-4)


@pytest.mark.slow
def test_plain_arrays_of_a_function_without_modules():
    mesh, _ = pipeline(2)
    layers, head = jax.random.normal(jax.random.key(0), (4, 8, 8)) / 3, jnp.ones((8, 2))

    def loss(params, x):
        layers, head = params
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
        return jnp.mean((x @ head) ** 2)

    grad = mm.microbatch(jax.value_and_grad(loss), dim=0, size=2, argnum=1, reduce="mean")
    x = jnp.ones((8, 8))
    with mesh:
        on = lambda x, spec, m: jax.device_put(x, NamedSharding(m, spec))
        params = on(layers, P("stage"), mesh.mesh), on(head, P(), mesh.slice(stage=1))
        run = mm.jit(grad)
        program, found = run.program(params, x), run(params, x)
    assert len({call.mesh for call in program.calls}) == 2
    assert_same(found, jax.jit(grad)((layers, head), x))


@pytest.mark.parametrize("spec", [P("rows"), P(None, "rows")])
def test_a_batch_that_another_mesh_of_these_devices_divides(spec):
    mesh, tasks = pipeline(2)
    rows = jax.sharding.Mesh(jax.devices()[:2], ("rows",))
    x = models.vectors()["x"]
    with mesh:
        model = born(
            make(models.MLP), mm.TaskSharding({mm.path("layers", range(2)): tasks[0], ...: tasks[1]})
        )
        given = jax.device_put(x, NamedSharding(rows, spec))
        found = mm.jit(lambda m, x: m(x))(model, given)
    np.testing.assert_allclose(found, make(models.MLP)()(x), rtol=1e-5, atol=1e-6)


def test_an_empty_cache_is_divided_as_the_layers_are():
    """Its zeros depend on nothing."""
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(stacked(4), placement(tasks))

        def with_cache(model):
            model.stacks[0].cache = nnx.Cache(jnp.zeros((4, 3)))

        mm.jit(with_cache)(model)
        assert model.stacks[0].cache.get_value().sharding == NamedSharding(mesh.mesh, P("stage"))


@pytest.mark.parametrize(
    "sizes, meshes", all_but([((1, 3), (0, 1))], [((1, 3), (0, 1)), ((1, 1, 1, 1), (0, 1, 0, 1))])
)
def test_other_pieces_are_one_divided_array(sizes, meshes):
    mesh, _ = pipeline(2)
    tasks = [mm.Task(f"task{n}", mesh_slice={"stage": i}) for n, i in enumerate(meshes)]
    with mesh:
        model, optimizer = born_with_optimizer(stacked(4), placement(tasks, sizes), ADAMW)
        w = kernel(model)
        assert isinstance(w, mm.DividedArray) and isinstance(w, jax.Array)
        assert [piece.shape[0] for piece in w.pieces] == list(sizes)
        slices = [mesh.slice(stage=i).devices.flat for i in meshes]
        assert [piece.sharding.device_set for piece in w.pieces] == [set(each) for each in slices]
        step = train_step(mm.jit, models.squared_error, microbatch=2, donate_argnums=(0, 1))
        for _ in range(3):  # the first, its fast path, and that again
            _, grads = step(model, optimizer, models.vectors())
            assert isinstance(kernel(model), mm.DividedArray)
        assert isinstance(grads["stacks"][0]["linear"]["kernel"][...], mm.DividedArray)
        assert w.is_deleted()
        with pytest.raises(ValueError, match="argument 0 was donated to an earlier call and is gone"):
            mm.jit(jnp.sum)(w)
        assert float(mm.jit(jnp.sum)(kernel(model))) == pytest.approx(float(np.asarray(kernel(model)).sum()))
        fetched = mm.fetch(kernel(model))
    np.testing.assert_array_equal(fetched, np.asarray(kernel(model)))
    assert fetched.shape == (4, 4, 4)


def test_state_from_the_host_goes_back_in_pieces():
    mesh, tasks = pipeline(2)
    with mesh:
        model, optimizer = born_with_optimizer(stacked(4), placement(tasks, (1, 3)), ADAMW)
        STEP(model, optimizer, models.vectors())
        nnx.update(model, jax.tree.map(lambda x: 2 * np.asarray(x), nnx.state(model)))
        STEP(model, optimizer, models.vectors())
        assert [piece.shape[0] for piece in kernel(model).pieces] == [1, 3]


@pytest.mark.slow
def test_compiled_ahead_of_time():
    for sizes in (None, (1, 3)):
        mesh, tasks = pipeline(2)
        with mesh:
            model, optimizer = born_with_optimizer(stacked(4), placement(tasks, sizes), MOMENTUM)
            lowered = STEP.lower(model, optimizer, models.vectors())
            compiled = lowered.compile()
            inputs, outputs = compiled.input_shardings, compiled.output_shardings
            assert inputs is not None and outputs is not None
            loss, _ = compiled(model, optimizer, models.vectors())
            assert np.isfinite(float(loss)) and compiled.memory_analysis() is not None


def test_what_cannot_be_done_in_pieces_is_named_with_its_line():
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(stacked(4), placement(tasks))
        sort = mm.jit(lambda model: jnp.sort(model.stacks[0].linear.kernel[...], axis=0))
        with pytest.raises(mm.PlacementError, match=r"linear.kernel is divided .*'sort'.*test_divided_func"):
            sort(model)
        assert values(model)  # nothing is lost


@pytest.mark.parametrize("sizes", [None, (1, 3)])
def test_divided_along_one_dimension_and_sharded_along_another(sizes):
    mesh, tasks = pipeline(2, 2)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    where = mm.TaskSharding({mm.path(): (mm.Division(tasks, dim=1, sizes=sizes), P("model"))})
    with mesh:
        weight = mm.jit(lambda: nnx.Param(jnp.asarray(x)), out_shardings=where)()
        added = mm.jit(lambda w: mm.task(lambda w: w + 1, task=tasks[0])(w[...]))(weight)
        np.testing.assert_array_equal(weight[...], x)
        np.testing.assert_array_equal(added, x + 1)


def test_the_types_of_many_results_are_listed_once(monkeypatch):
    """JAX lists all of them at each look."""
    seen, types = [], jex.ClosedJaxpr.out_avals
    monkeypatch.setattr(jex.ClosedJaxpr, "out_avals", property(lambda j: seen.append(1) or types.fget(j)))
    many = mm.jit(lambda xs: [x + 1 for x in xs]).program([1.0] * 50)
    assert many.fragments and len(seen) < 10
