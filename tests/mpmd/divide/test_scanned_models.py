"""Models whose stacked layers are divided between stages train as they do on one device."""

from __future__ import annotations

import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.sharding.state_shardings import shardings_of
from tests import models
from tests.fuzz.case import OPTIMIZERS
from tests.fuzz.layers import KINDS
from tests.models import make
from tests.mpmd.divide.scanned import WAYS, Scanned
from tests.mpmd.parity import MOMENTUM, assert_parity, pipeline
from tests.mpmd.test_every_schedule import ANYWHERE, LOOPING, VEES
from tests.slow import all_but, examples, few, grid


def divided(tasks, sizes=None, spec=P()):
    """The layers of a `Scanned`, divided between tasks; what is around them with the first and the last."""
    between = mm.Division(tasks, sizes=sizes)
    kernels = {mm.path("stacks", ..., "linear", "kernel"): (between, spec)} if spec else {}
    ends = {mm.path("first"): tasks[0], mm.path("last"): tasks[-1]}
    return mm.TaskSharding(ends | kernels | {mm.path("stacks"): (between, P())})


def check(kinds, sizes, way="nnx.scan", meshes=None, spec=P(), devices=1, **options):
    """Trains a `Scanned` whose stacks are in pieces of these sizes, each on the mesh of that number."""
    meshes = range(len(sizes)) if meshes is None else meshes
    mesh, _ = pipeline(max(meshes) + 1, devices)
    tasks = [mm.Task(f"task{n}", mesh_slice={"stage": i}) for n, i in enumerate(meshes)]
    usual = {"optimizer": MOMENTUM, "steps": 2, "microbatch": 2, "whole_batch": False, "rtol": 1e-4}
    return assert_parity(
        make(Scanned, kinds, sum(sizes), way),
        models.squared_error,
        models.vectors(),
        divided(tasks, sizes, spec),
        mesh=mesh,
        **(usual | options),
    )


@pytest.mark.parametrize("kind, way", grid(list(KINDS), list(WAYS), step=12))
def test_layers(kind, way):
    """Modules made by nnx.vmap and run by nnx.scan, as in JaxPP's issue 7, and over several stages."""
    check((kind,), (2, 2), way)


@pytest.mark.parametrize("schedule", all_but(["sequential"], ANYWHERE))
def test_schedules(schedule):
    check(("tanh",), (1, 1, 1, 1), schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LOOPING)
def test_schedules_that_go_round_the_meshes(schedule):
    check(("tanh",), (1, 2, 1, 1), meshes=(0, 1, 0, 1), schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", VEES)
def test_schedules_that_turn_back(schedule):
    check(("tanh",), (1, 1, 2, 1), meshes=(0, 1, 1, 0), schedule=schedule)


ALL_OPTIMIZERS = OPTIMIZERS | {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4, eps=1e-2),
    "lamb": optax.lamb(1e-2, eps=1e-1),
    "schedule free": optax.contrib.schedule_free_adamw(1e-2, eps=1e-1),
    "finite": optax.apply_if_finite(OPTIMIZERS["adamw"], 3),
}


@few(1)
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)])
@pytest.mark.parametrize("factored", [4, 128])
def test_an_optimizer_that_is_made_for_a_model_that_is_there(sizes, factored):
    """Adafactor keeps arrays of size 1 where it has no statistics: they are not divided, and back from a
    checkpoint no less.
    """
    mesh, tasks = pipeline(2)
    kinds = make(Scanned, ("tanh",), sum(sizes), "nnx.scan")
    rule = optax.adafactor(1e-2, min_dim_size_to_factor=factored)
    adafactor = lambda model: nnx.Optimizer(model, rule, wrt=nnx.Param)
    with mesh:
        model = mm.jit(kinds, out_shardings=divided(tasks, sizes))()
        optimizer = mm.jit(adafactor)(model)
    whole = adafactor(kinds())
    for path, variable in nnx.to_flat_state(nnx.state(optimizer)):
        other = dict(nnx.to_flat_state(nnx.state(whole)))[path]
        np.testing.assert_array_equal(variable.get_raw_value(), other.get_raw_value())
    abstract = nnx.eval_shape(lambda: adafactor(kinds()))
    with mesh:
        shardings = shardings_of({"optimizer": abstract}, divided(tasks, sizes))
    for path, variable in nnx.to_flat_state(nnx.state(abstract)):
        if variable.get_raw_value().shape == (1,):
            assert isinstance(shardings["optimizer", *map(str, path)], NamedSharding)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
def test_optimizers(optimizer):
    check(("mlp",), (1, 1), optimizer=ALL_OPTIMIZERS[optimizer])


def test_losses_of_the_layers_of_two_stages_on_a_mesh():
    """Their gradients are added up on that mesh alone, and their sum is read on the other."""
    check(("tanh",), (1, 1, 1, 1), "with losses", (0, 1, 0, 1), schedule="interleaved-1f1b")


SPECS = [P(None, "data"), P(None, "data", "model"), P("data"), P()]


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_data_parallel_and_sharded_over_it(spec):
    """Data and tensor parallelism inside of a stage, and weights sharded over the data axis (FSDP)."""
    mesh, tasks = pipeline(2, 2, 2, axes=("data", "model"))
    assert_parity(
        make(Scanned, ("tanh",), 4),
        models.squared_error,
        models.vectors(),
        divided(tasks, None, spec),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        steps=2,
        arg_shardings=P("data"),
        rtol=1e-4,
    )


@st.composite
def layouts(draw):
    """Sizes of pieces, the mesh of each, and a schedule for them."""
    size = st.sampled_from([1, 2, 4]) if draw(st.booleans()) else st.just(draw(st.sampled_from([1, 2])))
    kind = draw(st.sampled_from(["chain", "chain", "round", "turn"]))
    meshes = {"chain": range(draw(st.integers(2, 4))), "round": (0, 1, 0, 1), "turn": (0, 1, 1, 0)}[kind]
    schedules = {"chain": ANYWHERE, "round": LOOPING, "turn": VEES}[kind]
    sizes = tuple(draw(size) for _ in meshes)
    return sizes, tuple(meshes), draw(st.sampled_from(schedules))


_FITS = {
    "in pairs": lambda sizes, schedule: all(n % 2 == 0 for n in sizes),
    "backwards": lambda sizes, schedule: schedule in ANYWHERE,  # it would begin where the others end
}


@pytest.mark.slow
@examples(20)
@given(data=st.data())
def test_random_models(data):
    sizes, meshes, schedule = data.draw(layouts(), label="layout")
    # A bias in front of BatchNorm has a gradient of nothing but rounding. Many layers of attention diverge;
    # 32 of "stack" make 1e-2 of the last bit of a weight, on one device too.
    kind = st.sampled_from([kind for kind in KINDS if kind not in ("batch norm", "attention", "stack")])
    most = 1 if schedule in VEES else 2  # two stacks would turn back twice
    kinds = tuple(data.draw(st.lists(kind, min_size=1, max_size=most), label="kinds"))
    has_kernels = {"tanh", "where", "cond", "dropout"}.intersection(kinds)
    specs = [P(), P(None, None, "model"), P(None, "model")] if has_kernels else [P()]
    left_out = {way for way, fits in _FITS.items() if not fits(sizes, schedule)}
    ways = [way for way in WAYS if way not in left_out]
    check(
        kinds,
        sizes,
        data.draw(st.sampled_from(ways), label="way"),
        meshes,
        spec=data.draw(st.sampled_from(specs), label="spec"),
        devices=2,
        schedule=schedule,
        optimizer=OPTIMIZERS[data.draw(st.sampled_from(list(OPTIMIZERS)), label="optimizer")],
        microbatch=data.draw(st.sampled_from([2, 4] if schedule in ANYWHERE else [2]), label="microbatch"),
    )
