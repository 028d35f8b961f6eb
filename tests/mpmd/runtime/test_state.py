"""Where state is: born on its own mesh, at home between steps, and no more of it after fifty steps than after
five.
"""

from __future__ import annotations

import functools
import gc

import jax
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
from tests.mpmd.parity import (
    ADAMW,
    arrays,
    assert_same,
    born,
    born_with_optimizer,
    homes,
    on_one_device,
    pipeline,
    place,
    rolled,
    train_step,
)
from tests.slow import grid

HALVES = ["embed", ("blocks", 0)], [("blocks", 1), "norm", "head"]


def stage_of_path(path):
    return 0 if "embed" in path or "['blocks'][0]" in path else 1


@functools.cache
def born_in_halves():
    """A MultiMesh, a model that was made on it, and the program that made it."""
    mesh, tasks = pipeline(2, 2)
    with mesh:
        init = mm.jit(make(models.Transformer, layers=2), out_shardings=place(tasks, *HALVES))
        return mesh, init(), init.program()


def test_born_on_its_own_mesh_with_the_same_values():
    mesh, model, _ = born_in_halves()
    for path, devices in homes(model).items():
        assert devices == set(mesh.devices[stage_of_path(path)].flat), path
    assert_same(model, nnx.jit(make(models.Transformer, layers=2))(), rtol=1e-6)


def test_no_device_ever_holds_the_whole_model():
    """Nothing large is made on one mesh and sent to another: each mesh makes its own, in shards where so
    placed.
    """
    mesh, model, program = born_in_halves()
    assert all(transfer.nbytes <= 64 for transfer in program.transfers), str(program)
    assert len({fragment.mesh for fragment in program.fragments}) == 2
    held = dict.fromkeys(mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(nnx.state(model)):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert all(0 < nbytes < whole for nbytes in held.values())


def test_born_sharded():
    mesh, tasks = pipeline(2, 4)
    placement = mm.TaskSharding(
        {
            mm.path("layers", 0, "kernel"): (tasks[0], P(None, "model")),
            mm.path("layers", 3, "kernel"): (tasks[1], P("model")),
            mm.path("layers", range(0, 2)): (tasks[0], P()),
            mm.path("layers"): (tasks[1], None),
        }
    )
    with mesh:
        model = mm.jit(make(models.MLP), out_shardings=placement)()
    first, last = model.layers[0].kernel[...], model.layers[3].kernel[...]
    assert {shard.data.shape for shard in first.addressable_shards} == {(8, 4)}
    assert {shard.data.shape for shard in last.addressable_shards} == {(4, 4)}
    assert_same(model, nnx.jit(make(models.MLP))(), rtol=1e-6)


def test_slots_of_an_optimizer_follow_their_parameters():
    """mu and nu need no rule: they are born where their parameter is, with its sharding."""
    mesh, tasks = pipeline(2, 2)
    placement = mm.TaskSharding(
        {
            mm.path("layers", range(0, 2), "kernel"): (tasks[0], P(None, "model")),
            mm.path("layers", range(0, 2)): (tasks[0], P("model")),
            mm.path("layers"): (tasks[1], P()),
        }
    )
    with mesh:
        model = mm.jit(make(models.MLP), out_shardings=placement)()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adamw(1e-2), wrt=nnx.Param))(model)
    for i, layer in enumerate(model.layers):
        for name in ("kernel", "bias"):
            parameter = getattr(layer, name)[...]
            for slot in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
                array = slot["layers"][i][name][...]
                assert array.sharding.is_equivalent_to(parameter.sharding, array.ndim), (
                    i,
                    name,
                    array.sharding,
                )


@pytest.mark.slow  # as `assert_parity` looks at after every step of a placed model
def test_state_stays_at_home():
    mesh, tasks = pipeline(2)
    with mesh:
        model = mm.jit(make(models.Transformer, layers=2), out_shardings=place(tasks, *HALVES))()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
        step = train_step(mm.jit, models.cross_entropy, microbatch=4)
        before = homes(model)
        step(model, optimizer, models.tokens())
        slots = homes(optimizer)
        step(model, optimizer, models.tokens())
    assert homes(model) == before
    assert homes(optimizer) == slots


@pytest.mark.parametrize(
    "donate",
    [pytest.param((), marks=pytest.mark.slow), (0, 1)],
    ids=["kept", "donated"],
)
def test_steady_memory(donate, fast_gc):
    """Fifty steps leave as many live arrays, and as many bytes, as five."""
    mesh, tasks = pipeline(3)
    placement = place(tasks, [("layers", 0)], [("layers", range(1, 3))], [("layers", 3)])
    batch = models.vectors()

    def held():
        gc.collect()
        live = jax.live_arrays()
        return len(live), sum(array.nbytes for array in live)

    with mesh:
        model = mm.jit(make(models.MLP), out_shardings=placement)()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
        step = train_step(mm.jit, models.squared_error, microbatch=2, donate_argnums=donate)
        for i in range(50):
            loss, grads = step(model, optimizer, batch)
            jax.block_until_ready((loss, jax.tree.leaves(grads)))
            if i == 4:
                early = held()
    assert held() == early


def test_a_donated_model_and_optimizer_are_updated_in_their_own_memory():
    """With donation, what was passed in is gone after the step, whichever mesh it was on, and training goes
    on.
    """
    mesh, tasks = pipeline(2)
    placement = place(tasks, [("layers", range(0, 2))], [("layers", range(2, 4))])
    with mesh:
        model = mm.jit(make(models.MLP), out_shardings=placement)()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
        step = train_step(mm.jit, models.squared_error, microbatch=2, donate_argnums=(0, 1))
        step(model, optimizer, models.vectors())
        old = {**arrays(model), **{"optimizer" + path: leaf for path, leaf in arrays(optimizer).items()}}
        loss, _ = step(model, optimizer, models.vectors())
        assert np.isfinite(float(loss))
    assert all(leaf.is_deleted() for leaf in old.values()), [
        p for p, leaf in old.items() if not leaf.is_deleted()
    ]
    assert not any(leaf.is_deleted() for leaf in (*arrays(model).values(), *arrays(optimizer).values()))


# Bad input: said before anything runs, with the task, path, axis and sizes


def test_state_that_no_filter_matches():
    mesh, tasks = pipeline(2)
    placement = place(tasks, [("layers", range(0, 2))], [("layers", 2)])
    with mesh, pytest.raises(ValueError, match=r"layers.*3.*kernel|layers.*3.*bias") as error:
        mm.jit(make(models.MLP), out_shardings=placement)()
    assert "path(" in str(error.value)  # what would match


def test_a_filter_that_matches_nothing():
    mesh, tasks = pipeline(2)
    placement = place(tasks, [("layers", range(0, 2)), "lyers"], [("layers", range(2, 4))])
    with mesh, pytest.raises(ValueError, match="lyers"):
        mm.jit(make(models.MLP), out_shardings=placement)()


def test_a_filter_that_matches_nothing_in_an_argument():
    mesh, tasks = pipeline(2)
    placement = place(tasks, ["layers"], ["heads"])
    with mesh, pytest.raises(ValueError, match="heads"):
        mm.jit(lambda model: jnp.sum(model.layers[0].bias[...]), in_shardings=(placement,))(
            make(models.MLP)()
        )


@pytest.mark.parametrize(
    "spec, words",
    [
        (P("modle"), ["modle", "stage0", "model", "kernel"]),  # an axis the mesh lacks, and those it has
        (P(None, "model"), ["stage0", "model", "3", "16", "kernel"]),  # 16 does not divide by 3
        (P(None, None, "model"), ["stage0", "kernel"]),  # longer than the array has dimensions
    ],
)
def test_specs_that_do_not_fit(spec, words):
    mesh, tasks = pipeline(2, 3)
    placement = mm.TaskSharding(
        {
            mm.path("layers", 0, "kernel"): (tasks[0], spec),
            mm.path("layers", range(0, 2)): (tasks[0], P()),
            mm.path("layers"): (tasks[1], P()),
        }
    )
    with mesh, pytest.raises(ValueError) as error:
        mm.jit(make(models.MLP), out_shardings=placement)()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_too_few_devices():
    """Meshes that want more devices than there are say how many there are."""
    with pytest.raises(ValueError, match=r"16.*8|8.*16"):
        mm.MultiMesh(axis_sizes=(16,), axis_names=("stage",))
    task = mm.Task("far", mesh=mm.TaskMesh(devices=[8, 9], axis_sizes=(2,), axis_names=("model",)))
    with pytest.raises(ValueError, match="8"):
        mm.jit(make(models.MLP), out_shardings=mm.TaskSharding({mm.path(...): task}))()


def test_a_slice_without_a_multimesh():
    """A task that is a slice of a MultiMesh needs one to be current, and the error says how."""
    _, tasks = pipeline(2)
    placement = place(tasks, [("layers", range(0, 2))], [("layers", range(2, 4))])
    with pytest.raises(ValueError, match="MultiMesh"):
        mm.jit(make(models.MLP), out_shardings=placement)()


def test_a_callback_that_returns_no_task():
    mesh, _ = pipeline(2)
    mm.register_task("encoder", callback=lambda name, backprop: "stage0")

    def f(x):
        with jax.named_scope("encoder"):
            return x + 1

    with mesh, pytest.raises((TypeError, ValueError), match=r"encoder") as error:
        mm.jit(f)(jnp.ones(3))
    assert "stage0" in str(error.value)


def test_a_donated_array_used_again():
    """Between two meshes as on one: an array that was donated is named as such when it comes again."""
    mesh, _ = pipeline(2)
    a, b = (jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh.slice(stage=i), P())) for i in range(2))
    with mesh:
        f = mm.jit(lambda a, b: (a + 1, (a @ b) + 1), donate_argnums=(0, 1))
        a_after, _ = f(a, b)
        assert a.is_deleted() and b.is_deleted()
        with pytest.raises((RuntimeError, ValueError), match=r"[Dd]eleted|donated"):
            f(a, b)
        assert not a_after.is_deleted()


@pytest.mark.parametrize("values", ["JAX", "NumPy"])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_that_exists_is_moved_to_its_place(stages, values):
    """out_shardings place results that are arguments as they came, on one mesh as on several."""
    mesh, tasks = pipeline(2)
    placement = place(tasks[:stages], *[[("layers", range(0, 2))], [("layers", range(2, 4))]][:stages])
    if stages == 1:
        placement = mm.TaskSharding({...: tasks[1]})
    model = make(models.MLP)()
    before = {path: np.asarray(v.get_raw_value()) for path, v in nnx.to_flat_state(nnx.state(model))}
    if values == "NumPy":  # as pretrained weights may be
        nnx.update(model, jax.tree.map(np.asarray, nnx.state(model)))
    with mesh:
        moved = mm.jit(lambda model: model, out_shardings=placement)(model)
    for path, variable in nnx.to_flat_state(nnx.state(moved)):
        stage = 1 if stages == 1 else int(path[1] >= 2)
        assert variable.get_raw_value().sharding.device_set == set(mesh.slice(stage=stage).devices.flat), path
        np.testing.assert_array_equal(variable.get_raw_value(), before[path])


def test_a_trained_scalar_stays_on_every_mesh():
    """It has no rule, is used on one stage, and is where it was after each step."""

    class Scaled(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.layers = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x * self.scale[...]

    mesh, tasks = pipeline(2)
    with mesh:
        model = born(lambda: Scaled(rngs=nnx.Rngs(0)), place(tasks, [("layers", 0)], [("layers", 1)]))
        where = model.scale.get_raw_value().sharding
        assert len(where.device_set) == 2

        @mm.jit
        def step(model, x):
            grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))

        other, alone = Scaled(rngs=nnx.Rngs(0)), nnx.jit(step.__wrapped__)
        for _ in range(2):
            step(model, jnp.ones((4, 8)))
            alone(other, jnp.ones((4, 8)))
            assert model.scale.get_raw_value().sharding.is_equivalent_to(where, 0)
        np.testing.assert_allclose(model.scale[...], other.scale[...], rtol=1e-5)


@pytest.mark.parametrize(
    "sharing, donate, size",
    grid([([0, 1], [0]), ([1], [0, 1]), ([0, 1], [1, 2]), (range(4), [0, 1])], [(), (0, 1)], [4, 8]),
)
def test_tasks_that_share_devices(sharing, donate, size):
    """Each keeps its state on all of its own devices, whatever else is on them."""
    mesh = mm.MultiMesh(axis_sizes=(size,), axis_names=("x",), devices=jax.devices()[:size])
    first, second = sharing
    tasks = [
        mm.Task(name, mm.TaskMesh(devices=devices, axis_names=("y",)))
        for name, devices in (("first", first), ("second", second))
    ]
    make_model, placement = make(models.MLP, layers=2), place(tasks, [("layers", 0)], [("layers", 1)])
    expected = on_one_device(make_model, models.squared_error, models.vectors(), microbatch=4)
    with mesh:
        model, optimizer = born_with_optimizer(make_model, placement, ADAMW)
        step = train_step(mm.jit, models.squared_error, microbatch=4, donate_argnums=donate)
        homes_at_birth = homes(model)
        for path, devices in homes_at_birth.items():
            assert {d.id for d in devices} == set(second if "[1]" in path else first), path
        for n, want in enumerate(expected.steps):
            loss, grads = step(model, optimizer, rolled(models.vectors(), n))
            assert_same((loss, grads), (want["losses"], want["gradients"]))
            assert_same(model, want["model states"])
            assert_same(optimizer, want["optimizer states"])
            assert homes(model) == homes_at_birth
            for moments in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
                assert list(homes(moments).values()) == list(homes_at_birth.values())


def test_a_memory_that_is_not_the_devices_own():
    mesh, _ = pipeline(2)
    host = NamedSharding(mesh.slice(stage=1), P(), memory_kind="pinned_host")
    with mesh, pytest.raises(ValueError, match="'device' memory, not in 'pinned_host'"):
        mm.jit(lambda x: 2 * x, out_shardings=host)(jnp.ones(8))


def test_counters_with_a_stage_to_spare():
    """Where no task has some of the devices, scalars are on all of them nevertheless, and stay there."""
    mesh, tasks = pipeline(3, 2)
    with mesh:
        model = mm.jit(
            lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
            out_shardings=mm.TaskSharding({mm.path("kernel"): tasks[0], mm.path("bias"): tasks[1]}),
        )()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)

        @mm.jit
        def step(model, optimizer, x):
            optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).mean())(model))

        def where():
            return optimizer.step[...].sharding, optimizer.opt_state[0].count[...].sharding

        before = where()
        for n in range(2):
            step(model, optimizer, jnp.ones((2, 4)))
            assert where() == before and int(optimizer.step[...]) == n + 1
        assert before[0].device_set == set(mesh.mesh.devices.flat)


@pytest.mark.parametrize("made", ["in the function", "before"])
def test_scalars_that_a_model_is_born_with(made):
    """A scalar or a random key that nobody places is where steps keep it from the start, also one that was
    there before."""
    mesh, tasks = pipeline(2)

    class Counting(nnx.Module):
        def __init__(self, count, key):
            self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.out = nnx.Linear(4, 1, rngs=nnx.Rngs(1))
            self.count = nnx.Variable(count)
            self.key = nnx.RngKey(key, tag="noise")

    def scalars():
        return jnp.asarray(3.5), jax.random.key(7)

    before = scalars() if made == "before" else None

    @mm.jit
    def step(model, x):
        model.count[...] += 1
        model.key[...] = jax.random.fold_in(model.key[...], 1)
        return model.out(jnp.tanh(model.linear(x))).sum()

    with mesh:
        model = mm.jit(
            lambda: Counting(*(before or scalars())),
            out_shardings=mm.TaskSharding({mm.path("linear"): tasks[0], mm.path("out"): tasks[1]}),
        )()
        born_at = model.count[...].sharding, model.key[...].sharding
        for n in range(1, 4):
            step(model, jnp.ones((2, 4)))
            assert float(model.count[...]) == 3.5 + n
            assert (model.count[...].sharding, model.key[...].sharding) == born_at
    assert born_at[0].device_set == set(mesh.mesh.devices.flat)


class TwoAttentions(nnx.Module):
    def __init__(self):
        self.first, self.second = (
            nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(n)) for n in range(2)
        )

    def __call__(self, x):
        return self.second(self.first(x))


@pytest.mark.slow
@pytest.mark.parametrize("returned", [False, True])
def test_caches_of_decoding(returned):
    """They depend on nothing, and are born beside the weights of their layer; with each new batch size."""
    mesh, tasks = pipeline(2, 2)

    def start(model, size):
        model = nnx.clone(model) if returned else model
        for layer in (model.first, model.second):
            layer.init_cache((size, 6, 8))
        return model if returned else None

    def decode(model, x):
        return model(x)

    split, whole = mm.jit(decode), nnx.jit(decode)
    with mesh:
        model = born(TwoAttentions, place(tasks, ["first"], ["second"]))
        reference = TwoAttentions()
        begin = mm.jit(start, static_argnums=1)
        for size in (2, 3):
            model, reference = begin(model, size) or model, start(reference, size) or reference
            for n in range(3):
                x = jax.random.normal(jax.random.key(n), (size, 1, 8))
                assert_same(split(model, x), whole(reference, x))
            for n, layer in enumerate((model.first, model.second)):
                devices = set(mesh.slice(stage=n).devices.flat)
                assert layer.cached_key[...].sharding.device_set == devices
                assert layer.cached_key.shape == (size, 6, 2, 4)
            (crossing,) = split.program(model, x).transfers
            assert crossing.shape == x.shape


def test_state_of_a_new_shape_stays_at_home():
    """With its own sharding, as far as that fits; whatever it is made of."""
    mesh, tasks = pipeline(2, 2)

    class Remembering(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.seen = nnx.Variable(jnp.zeros((2, 4)))

    @mm.jit
    def step(model, x):
        model.seen.set_value(jnp.concatenate([model.seen[...], model.first(x)]))

    with mesh:
        rules = {mm.path("first"): tasks[0], mm.path("seen"): (tasks[1], P("model"))}
        model = mm.jit(Remembering, out_shardings=mm.TaskSharding(rules))()
        home = model.seen[...].sharding
        for rows, spec in ((2, P("model")), (1, P()), (1, P())):
            before, x = np.asarray(model.seen[...]), np.ones((rows, 4), np.float32)
            step(model, x)
            assert_same(model.seen[...], np.concatenate([before, model.first(x)]))
            assert model.seen[...].sharding.is_equivalent_to(NamedSharding(home.mesh, spec), 2)


def test_rules_for_several_paths_of_one_module():
    """The first rule that matches one of them places it; those for the others are not missed."""
    mesh, tasks = pipeline(2)

    class Shared(nnx.Module):
        def __init__(self):
            first, second = (nnx.Linear(4, 4, rngs=nnx.Rngs(n)) for n in range(2))
            self.layers = nnx.List([first, second, first])

    rules = {mm.path("layers", n): tasks[n % 2] for n in range(3)}
    with mesh:
        model = mm.jit(Shared, out_shardings=mm.TaskSharding(rules))()
        for layer, n in zip(model.layers, (0, 1, 0)):
            assert layer.kernel[...].sharding.device_set == set(mesh.slice(stage=n).devices.flat)
        with pytest.raises(mm.PlacementError, match="layers.*3"):
            mm.jit(Shared, out_shardings=mm.TaskSharding({**rules, mm.path("layers", 3): tasks[0]}))()


def test_statistics_that_are_made_on_another_mesh_come_home_in_shards():
    """One of a single device, where their home has two."""
    home, other = (
        mm.Task(name, mesh=jax.sharding.Mesh(jax.devices()[devices], ("model",)))
        for name, devices in (("home", slice(2)), ("other", slice(2, 3)))
    )
    make_norm = lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

    def step(norm, x):
        run = mm.task(lambda norm, x: norm(x).sum(), task=other)
        return mm.microbatch(run, dim=0, size=4, argnum=1)(norm, x)

    norm, whole = born(make_norm, mm.TaskSharding({...: (home, P("model"))})), make_norm()
    before = {path: v.get_raw_value().sharding for path, v in nnx.to_flat_state(nnx.state(norm))}
    assert {s.spec for s in before.values()} == {P("model")}
    mm.jit(step)(norm, x)
    assert before == {path: v.get_raw_value().sharding for path, v in nnx.to_flat_state(nnx.state(norm))}
    for rows in (x[:4], x[4:]):
        whole(rows)
    assert_same(norm, whole)
