"""Models that know nothing of pipelines, split by a placement of their state alone, train as they do on one
device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from tests import models
from tests.models import make
from tests.mpmd.parity import (
    MOMENTUM,
    assert_parity,
    assert_same,
    born,
    born_with_optimizer,
    homes,
    pipeline,
    place,
    train_step,
    values,
)
from tests.slow import all_but, grid


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its loss and batch, and the paths that each stage owns."""

    make: Callable[[], nnx.Module]
    loss: Callable
    batch: Any
    stages: tuple[tuple, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def layers(*ranges: tuple[int, int]) -> tuple[tuple, ...]:
    return tuple((("layers", range(*ends)),) for ends in ranges)


TRANSFORMER = (("embed", ("blocks", 0)), (("blocks", 1), "norm", "head"))
CONVNET = (
    (("convs", 0), ("norms", 0), ("dropouts", 0)),
    (("convs", 1), ("norms", 1), ("dropouts", 1), "head"),
)

CASES = {
    "mlp": Case(
        make(models.MLP), models.squared_error, models.vectors(), layers((0, 1), (1, 2), (2, 3), (3, 4))
    ),
    "untied transformer": Case(
        make(models.Transformer, layers=2), models.cross_entropy, models.tokens(), TRANSFORMER
    ),
    "tied transformer": Case(
        make(models.Transformer, layers=2, tied=True),
        models.cross_entropy,
        models.tokens(),
        (TRANSFORMER[0], TRANSFORMER[1][:2]),
    ),
    "transformer with remat": Case(
        make(models.Transformer, layers=2, remat=True), models.cross_entropy, models.tokens(), TRANSFORMER
    ),
    "convnet with batch norm and dropout": Case(
        make(models.ConvNet), models.cross_entropy, models.images(), CONVNET, {"whole_batch": False}
    ),
    "skip from the first stage to the last": Case(
        make(models.SkipNet),
        models.squared_error,
        models.vectors(),
        (("first",), (("middle", 0),), (("middle", 1),), ("last",)),
    ),
    "submodule used in two stages": Case(
        make(models.SharedNet),
        models.squared_error,
        models.vectors(),
        (("first", "shared"), ("middle",), ("last",)),
    ),
    "stacks of layers under scan": Case(
        make(models.ScanNet),
        models.squared_error,
        models.vectors(),
        (("first", ("stacks", 0)), (("stacks", 1), "last")),
    ),
    "lstm": Case(
        make(models.RecurrentNet, nnx.LSTMCell),
        models.cross_entropy,
        models.tokens(),
        (("embed", ("layers", 0)), (("layers", 1), "head")),
    ),
    "gru": Case(
        make(models.RecurrentNet, nnx.GRUCell),
        models.cross_entropy,
        models.tokens(),
        (("embed", ("layers", 0)), (("layers", 1), "head")),
    ),
    "two encoders into one decoder": Case(
        make(models.TwoEncoders),
        models.squared_error,
        models.vectors(),
        (("left",), ("right",), ("decoder",)),
    ),
    "multi-head attention of flax": Case(
        make(models.AttentionNet),
        models.cross_entropy,
        models.tokens(),
        (("embed", ("layers", 0)), (("layers", 1), "head")),
    ),
    "cond, while loop and checkpoint": Case(
        make(models.ControlFlowNet),
        models.squared_error,
        models.vectors(),
        (("branching",), ("looping",), ("checkpointed", "last")),
        # The branch is taken by the sum over a microbatch.
        {"whole_batch": False},
    ),
    "custom_vjp": Case(
        make(models.CustomRuleNet),
        models.squared_error,
        models.vectors(),
        ((("layers", 0),), (("layers", 1), "last")),
    ),
}


@pytest.mark.parametrize(
    "name",
    all_but(
        ["mlp", "tied transformer"],
        CASES,
    ),
)
def test_split_trains_as_whole(name):
    case = CASES[name]
    mesh, tasks = pipeline(len(case.stages))
    assert_parity(
        case.make, case.loss, case.batch, place(tasks, *case.stages), mesh=mesh, microbatch=2, **case.options
    )


BORN = ["convnet with batch norm and dropout", "gru"]


@pytest.mark.parametrize("name", all_but(BORN, CASES))
def test_it_is_initialised_on_its_devices_as_on_one(name):
    """Which `assert_parity` spares itself: it brings the same values to where they live."""
    case = CASES[name]
    mesh, tasks = pipeline(len(case.stages))
    placement = place(tasks, *case.stages)
    with mesh:
        made, placed = mm.jit(case.make, out_shardings=placement)(), born(case.make, placement)
        assert homes(made) == homes(placed)
        assert_same(made, placed, rtol=1e-6)


@pytest.mark.parametrize("microbatches, schedule", grid([1, 2, 8], ["gpipe", "1f1b"], step=3))
def test_every_schedule_and_count(schedule, microbatches):
    case = CASES["mlp"]
    mesh, tasks = pipeline(4)
    assert_parity(
        case.make,
        case.loss,
        case.batch,
        place(tasks, *case.stages),
        mesh=mesh,
        microbatch=8 // microbatches,
        schedule=schedule,
        steps=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "tied transformer", "convnet with batch norm and dropout"])
def test_gpipe(name):
    case = CASES[name]
    mesh, tasks = pipeline(len(case.stages))
    placement = place(tasks, *case.stages)
    assert_parity(
        case.make,
        case.loss,
        case.batch,
        placement,
        mesh=mesh,
        microbatch=2,
        schedule="gpipe",
        **case.options,
    )


@pytest.mark.parametrize(
    "name",
    all_but(
        ["convnet with batch norm and dropout"],
        ["mlp", "tied transformer", "convnet with batch norm and dropout", "gru"],
    ),
)
def test_without_microbatches(name):
    case = CASES[name]
    mesh, tasks = pipeline(len(case.stages))
    # Without microbatches the step itself is that of the whole batch, Dropout and BatchNorm included.
    assert_parity(
        case.make, case.loss, case.batch, place(tasks, *case.stages), mesh=mesh, microbatch=None, steps=2
    )


def test_homes_out_of_order():
    """The layers of a chain need not lie on the meshes in the chain's order."""
    mesh, tasks = pipeline(4)
    placement = place([tasks[2], tasks[0], tasks[3], tasks[1]], *CASES["mlp"].stages)
    assert_parity(
        make(models.MLP), models.squared_error, models.vectors(), placement, mesh=mesh, microbatch=2
    )


def test_a_chain_that_returns_to_a_mesh():
    """A mesh may own layers that are not neighbours: stage 0 runs twice in the forward of one microbatch."""
    mesh, tasks = pipeline(2)
    placement = place(tasks, [("layers", 0), ("layers", 2)], [("layers", 1), ("layers", 3)])
    assert_parity(
        make(models.MLP), models.squared_error, models.vectors(), placement, mesh=mesh, microbatch=2
    )


def test_counters_and_keys_need_no_rule_of_their_own():
    """Dropout's keys and counters, which no rule names, are copied to where they are used, and advance."""
    mesh, tasks = pipeline(2)
    placement = place(tasks, [("convs", 0), ("norms", 0)], [("convs", 1), ("norms", 1), "head"])
    assert_parity(
        make(models.ConvNet),
        models.cross_entropy,
        models.images(),
        placement,
        mesh=mesh,
        microbatch=2,
        whole_batch=False,
    )


def test_dropout_differs_between_microbatches():
    """Equal rows in every microbatch, and still the losses of microbatches are not equal: each draws its own
    mask.
    """
    mesh, tasks = pipeline(2)
    one = models.images(rows=2)
    batch = {name: np.concatenate([rows] * 4) for name, rows in one.items()}
    placement = place(tasks, [("convs", 0), ("dropouts", 0)], [("convs", 1), ("dropouts", 1), "head"])
    with mesh:
        model = mm.jit(make(models.ConvNet, batch_norm=False), out_shardings=placement)()
        before = int(model.dropouts[0].rngs.count[...])
        loss_fn = lambda model, batch: models.cross_entropy(model, batch)[None]
        losses = mm.jit(mm.microbatch(loss_fn, dim=0, size=2, argnum=1, reduce="concat"))(model, batch)
    assert len(np.unique(np.asarray(losses))) == 4
    assert int(model.dropouts[0].rngs.count[...]) == before + 4


# Optimizers and gradients


OPTIMIZERS = {
    "clipping by global norm": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9)),
    "weight decay on matrices only": optax.adamw(
        3e-2, eps=1e-1, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    ),
    "warm-up, cosine decay and clipping": optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-2, 2, 10), eps=1e-1, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", all_but(OPTIMIZERS.keys() - {"clipping by global norm"}, OPTIMIZERS))
def test_optimizers(name):
    mesh, tasks = pipeline(3)
    assert_parity(
        make(models.MLP),
        models.squared_error,
        models.vectors(),
        place(tasks, *layers((0, 1), (1, 3), (3, 4))),
        mesh=mesh,
        microbatch=2,
        optimizer=OPTIMIZERS[name],
        steps=4,
    )


@pytest.mark.parametrize("frozen", all_but([1], [0, 1, 3]))
def test_frozen_parameters(frozen):
    """Parameters that no gradient is asked of stay as they were, whether first, in the middle or last."""
    mesh, tasks = pipeline(4)
    assert_parity(
        make(models.MLP),
        models.squared_error,
        models.vectors(),
        place(tasks, *CASES["mlp"].stages),
        mesh=mesh,
        microbatch=2,
        wrt=nnx.All(nnx.Param, nnx.Not(mm.path("layers", frozen))),
    )


def test_auxiliary_outputs():
    """What the loss function hands out beside the loss comes from every stage, each reduced as asked."""
    mesh, tasks = pipeline(2)

    def loss(model, batch):
        hidden = jnp.tanh(model.layers[0](batch["x"]))
        out = model.layers[3](jnp.tanh(model.layers[2](jnp.tanh(model.layers[1](hidden)))))
        aux = {
            "hidden": hidden,
            "norms": (jnp.mean(hidden**2), jnp.mean(out**2)),
            "rows": batch["x"].shape[0],
        }
        return 0.5 * jnp.mean(jnp.sum((out - batch["y"]) ** 2, axis=-1)), aux

    aux_reduce = {"hidden": "concat", "norms": "mean", "rows": "sum"}
    assert_parity(
        make(models.MLP),
        loss,
        models.vectors(),
        place(tasks, *layers((0, 2), (2, 4))),
        mesh=mesh,
        microbatch=2,
        optimizer=MOMENTUM,
        has_aux=True,
        reduce=(("mean", aux_reduce), "mean"),
    )


# Precision


@pytest.mark.slow  # tests/mpmd/test_bfloat16.py has bounds that are sharper
@pytest.mark.parametrize("param_dtype, rtol", [(jnp.float32, 3e-2), (jnp.bfloat16, 6e-2)])
def test_bfloat16(param_dtype, rtol):
    """Computing in bfloat16, with float32 parameters and with bfloat16 ones.

    With bfloat16 parameters one device is itself off float32 by up to 3e-2 of a leaf (1.9e-2 on JAX 0.10,
    3.0e-2 on 0.12), so two runs may be twice that apart. The next test has the sharper bound.
    """
    mesh, tasks = pipeline(2)
    assert_parity(
        make(models.Transformer, layers=2, dtype=jnp.bfloat16, param_dtype=param_dtype),
        models.cross_entropy,
        models.tokens(),
        place(tasks, *TRANSFORMER),
        mesh=mesh,
        microbatch=4,
        optimizer=MOMENTUM,
        steps=2,
        rtol=rtol,
    )


@pytest.mark.slow
def test_bfloat16_is_as_near_to_float32_as_on_one_device():
    """Splitting adds no error of its own: gradients are as far from those of float32 as unsplit ones are."""
    mesh, tasks = pipeline(2)
    half = make(models.Transformer, layers=2, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    batch = models.tokens()
    grad_fn = nnx.grad(models.cross_entropy)
    whole = half()
    full = make(models.Transformer, layers=2)()
    nnx.update(full, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.state(whole)))
    truth = values(nnx.jit(grad_fn)(full, batch))
    with mesh:
        split = mm.jit(half, out_shardings=place(tasks, *TRANSFORMER))()
        step = mm.jit(mm.microbatch(grad_fn, dim=0, size=4, argnum=1, reduce="mean"))
        got, expected = values(step(split, batch)), values(nnx.jit(grad_fn)(whole, batch))

    def error(grads):
        return max(np.abs(grads[path] - want).max() / np.abs(want).max() for path, want in truth.items())

    assert 0 < error(got) <= 1.5 * error(expected)


def test_casts_by_hand():
    """Parameters cast to bfloat16 in the loss function, gradients back: casts follow parameters."""
    mesh, tasks = pipeline(2)

    def loss(model, batch):
        graphdef, state = nnx.split(model)
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
        batch = {**batch, "x": batch["x"].astype(jnp.bfloat16)}
        return models.squared_error(nnx.merge(graphdef, half), batch)

    assert_parity(
        make(models.MLP),
        loss,
        models.vectors(),
        place(tasks, *layers((0, 2), (2, 4))),
        mesh=mesh,
        microbatch=2,
        optimizer=MOMENTUM,
        rtol=3e-2,
    )


# Without gradients


@pytest.mark.parametrize(
    "name, microbatch",
    all_but(
        [("mlp", None), ("tied transformer", 2)],
        itertools.product(["mlp", "tied transformer", "two encoders into one decoder", "lstm"], [None, 2]),
    ),
)
def test_inference(name, microbatch):
    case = CASES[name]
    mesh, tasks = pipeline(len(case.stages))

    def predict(model, x):
        run = lambda model, x: model(x)
        if microbatch is not None:
            run = mm.microbatch(run, dim=0, size=microbatch, argnum=1, reduce="concat")
        return run(model, x)

    expected = nnx.jit(predict)(case.make(), case.batch["x"])
    with mesh:
        model = born(case.make, place(tasks, *case.stages))
        got = mm.jit(predict)(model, case.batch["x"])
    assert_same(got, expected)


def test_inference_in_eval_mode():
    """BatchNorm on its running averages and no Dropout: nothing is updated, and the answer is that of one
    device.
    """
    mesh, tasks = pipeline(2)
    predict = lambda model, x: nnx.view(model, deterministic=True, use_running_average=True)(x)
    batch = models.images()
    expected = nnx.jit(predict)(make(models.ConvNet)(), batch["x"])
    with mesh:
        model = mm.jit(make(models.ConvNet), out_shardings=place(tasks, *CONVNET))()
        assert_same(mm.jit(predict)(model, batch["x"]), expected)


@pytest.mark.slow
def test_gradients_of_gradients():
    """A gradient penalty: the derivative of a derivative, split."""
    mesh, tasks = pipeline(2)

    def loss(model, batch):
        energy = lambda x: jnp.sum(model(x) ** 2)
        return models.squared_error(model, batch) + 0.01 * jnp.mean(jax.grad(energy)(batch["x"]) ** 2)

    assert_parity(
        make(models.MLP),
        loss,
        models.vectors(),
        place(tasks, *layers((0, 2), (2, 4))),
        mesh=mesh,
        microbatch=4,
    )


def test_two_losses_in_one_step():
    """A step may hold two microbatched loops, of two losses, and an update after each."""
    mesh, tasks = pipeline(2)
    batch = models.vectors()

    def make_step(jit):
        @jit
        def step(model, optimizer, batch):
            losses = []
            for scale in (1.0, 0.5):
                grad_fn = nnx.value_and_grad(lambda m, b, scale=scale: scale * models.squared_error(m, b))
                loss, grads = mm.microbatch(grad_fn, dim=0, size=2, argnum=1, reduce="mean")(model, batch)
                optimizer.update(model, grads)
                losses.append(loss)
            return losses

        return step

    whole = make(models.MLP)()
    whole_optimizer = nnx.Optimizer(whole, MOMENTUM, wrt=nnx.Param)
    with mesh:
        placement = place(tasks, *layers((0, 2), (2, 4)))
        split, split_optimizer = born_with_optimizer(make(models.MLP), placement, MOMENTUM)
        got = make_step(mm.jit)(split, split_optimizer, batch)
    assert_same(got, make_step(nnx.jit)(whole, whole_optimizer, batch))
    assert_same(split, whole)


def test_ignore_transforms_is_plain_jax():
    """Under mm.ignore_transforms the same step runs on one device, and gives the same."""
    case = CASES["mlp"]
    mesh, tasks = pipeline(4)
    with mesh, mm.ignore_transforms():
        model = mm.jit(case.make, out_shardings=place(tasks, *case.stages))()
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param))(model)
        loss, grads = train_step(mm.jit, case.loss, microbatch=2)(model, optimizer, case.batch)
    whole = case.make()
    expected = nnx.jit(nnx.value_and_grad(case.loss))(whole, case.batch)
    assert_same((loss, grads), expected)
    devices = {d for leaf in jax.tree.leaves(nnx.state(model)) for d in leaf.sharding.device_set}
    assert len(devices) == 1


def test_spec_of_a_placement_is_kept():
    """After steps, parameters still have the sharding their rule gives, on the mesh of their task."""
    mesh, tasks = pipeline(2, 2)
    placement = mm.TaskSharding(
        {
            mm.path("layers", range(0, 2), "kernel"): (tasks[0], P(None, "model")),
            mm.path("layers", range(0, 2)): (tasks[0], P("model")),
            mm.path("layers"): (tasks[1], P()),
        }
    )
    with mesh:
        model, optimizer = born_with_optimizer(make(models.MLP), placement, optax.adam(1e-2))
        step = train_step(mm.jit, models.squared_error, microbatch=2)
        for _ in range(2):
            step(model, optimizer, models.vectors())
        meshes = [task.to_mesh() for task in tasks]
    for i, spec in enumerate([P(None, "model")] * 2 + [P()] * 2):
        home = jax.sharding.NamedSharding(meshes[i // 2], spec)
        kernels = [
            model.layers[i].kernel[...],
            optimizer.opt_state[0].mu["layers"][i]["kernel"][...],
            optimizer.opt_state[0].nu["layers"][i]["kernel"][...],
        ]
        assert all(kernel.sharding.is_equivalent_to(home, 2) for kernel in kernels), [
            k.sharding for k in kernels
        ]
