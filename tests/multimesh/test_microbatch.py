"""microbatch in programs written for multimesh.jax: plain functions over pytrees, layers registered by name.

Every loop is split over the meshes of its tasks, and its results, their dtypes included, are those of the
plain functions on the same slices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from multimesh_compat.jax import (
    Task,
    microbatch,
    register_task,
    with_sharding_constraint,
)
from tests.multimesh.loops import (
    FOUR,
    GRAD,
    MESHES,
    RNG,
    SCHEDULES,
    TWO,
    WHOLE_AND_CUT,
    assert_same,
    by_hand,
    check,
    check_loop,
    in_stage,
    layers,
    loss_fn,
    make_batch,
    make_params,
    meshes_of,
    multimesh,
    normal,
    register_layers,
    unsplit,
)
from tests.slow import few

# Schedules, over layers registered by name


@few(2)
@pytest.mark.parametrize("sizes", [TWO, FOUR], ids=["2x2x2", "4x2x1"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_value_and_grad_over_registered_layers(schedule, sizes):
    """Every stage runs its layer, with as many forwards before its first backward as the schedule says."""
    register_layers()
    stages, count = sizes[0], 8
    params, batch = make_params(stages), make_batch(2 * count)
    program = check_loop(GRAD, GRAD, params, batch, argnum=1, schedule=schedule, sizes=sizes)
    ahead = {
        "gpipe": lambda left: count,
        "1f1b": lambda left: left,
        "wavefront": lambda left: 2 * left - 1,
        "zero-bubble-h2": lambda left: 2 * left - 1,
    }[schedule]
    parts = ["backward-input", "backward-weight"] if schedule == "zero-bubble-h2" else ["backward"]
    for row in program.table():
        stage, phases = row[0].stage, [action.phase for action in row]
        assert {action.stage for action in row} == {stage}
        assert phases.index(parts[0]) == ahead(stages - stage)
        assert sorted(phases) == sorted(count * ["forward", *parts])
    assert len(program.table()) == stages


def test_without_a_schedule():
    """One is chosen; gradients and the results' homes do not depend on it."""
    register_layers()
    params, batch = make_params(4), make_batch()
    with multimesh(FOUR):
        loss, grads = mm.jit(microbatch(GRAD, 0, 2, argnum=1))(params, batch)
    assert_same((loss, grads), GRAD(params, batch))
    for grad, ids in zip(grads, MESHES[FOUR]):
        assert all({d.id for d in leaf.sharding.device_set} == set(ids) for leaf in grad)


NAMES = [
    ["stage0 forward"] * 4 + ["stage0 backward"] * 4,
    ["stage1 forward", "stage1 backward"] * 4,
]
PAIRS = [
    [(m, "stage0 forward") for m in (1, 0, 2, 3)] + [(m, "stage0 backward") for m in (3, 2, 1, 0)],
    [(m, f"stage1 {phase}") for m in range(4) for phase in ("forward", "backward")],
]


@pytest.mark.parametrize(
    "rows, first", [(NAMES, [0, 1, 2, 3]), (PAIRS, [1, 0, 2, 3])], ids=["names", "pairs"]
)
def test_a_custom_schedule(rows, first):
    """Layers without a name go by that of their slice. The stages run what the rows say, in that order."""
    register_layers()
    params, batch = make_params(2), make_batch()
    loop = microbatch(GRAD, 0, 2, argnum=1, schedule="custom", custom_schedule=rows)
    program = check(loop, by_hand(GRAD, params, batch, argnum=1), params, batch)
    row, other = program.table()
    assert [a.microbatch for a in row if a.phase == "forward"] == first
    assert [a.phase for a in row] == ["forward"] * 4 + ["backward"] * 4
    assert [a.phase for a in other] == ["forward", "backward"] * 4


def test_a_custom_schedule_of_named_layers():
    """A callback's Task has a name: its forward and backward go by it, and halves by their own names."""
    register_task(
        r"layer\d+",
        callback=lambda name, backprop: Task(
            name, mesh_slice={"stage": int(name[5:])}, split_backprop=(f"{name} B", f"{name} W")
        ),
    )
    rows = [
        ["layer0 forward"] * 4 + ["layer0 B"] * 4 + ["layer0 W"] * 4,
        ["layer1 forward", "layer1 B"] * 4 + ["layer1 W"] * 4,
    ]
    params, batch = make_params(2), make_batch()
    loop = microbatch(GRAD, 0, 2, argnum=1, schedule="custom", custom_schedule=rows)
    program = check(loop, by_hand(GRAD, params, batch, argnum=1), params, batch)
    ran = [[c.name for c in program.calls if c.stage == s and c.microbatch is not None] for s in range(2)]
    assert ran == rows


@pytest.mark.parametrize(
    "rows",
    [[["stage0"] * 4, ["stage1"] * 4], [[(m, "stage0") for m in (2, 3, 1, 0)]]],
    ids=["names", "pairs"],
)
def test_a_custom_schedule_of_tasks_without_gradients(rows):
    """A task that only runs forward goes by its own name; what is left out follows."""
    register_layers()
    params, (x, _) = make_params(2), make_batch()
    loop = microbatch(layers, 0, 2, 1, schedule="custom", custom_schedule=rows, reduce="concat")
    program = check(loop, layers(params, x), params, x)
    order = [entry[0] for entry in rows[0]] if isinstance(rows[0][0], tuple) else [0, 1, 2, 3]
    assert [[a.microbatch for a in row] for row in program.table()] == [order, order]


def test_a_custom_schedule_that_names_another_task():
    register_layers()
    with multimesh(TWO), pytest.raises(ValueError, match="'layer7' is not there .*'stage0 forward'"):
        mm.jit(microbatch(GRAD, 0, 2, 1, schedule="custom", custom_schedule=[["layer7"]]))(
            make_params(2), make_batch()
        )


@pytest.mark.parametrize("schedule", WHOLE_AND_CUT)
def test_layers_whose_backward_is_another_task(schedule):
    """The callback is told which it is asked for, and may send it to another mesh."""
    register_task(
        r"layer\d+",
        callback=lambda name, backprop: Task(
            f"{name} {backprop}", mesh_slice={"stage": int(name[5:]) + 2 * backprop}
        ),
    )
    program = check_loop(GRAD, GRAD, make_params(2), make_batch(), argnum=1, schedule=schedule, sizes=FOUR)
    run_on = lambda *names: {c.mesh.devices.flat[0].id for c in program.calls if c.name.startswith(names)}
    assert run_on("layer0 False forward", "layer1 False forward") == {0, 2}
    assert run_on("layer0 True backward", "layer1 True backward") == {4, 6}


@pytest.mark.parametrize("by", ["devices", "callback"])
def test_layers_registered_in_the_earlier_form(by):
    """By device numbers and the shape of their mesh, without a MultiMesh: tasks go by their scopes' names."""
    numbers = {"layer0": [0, 2], "layer1": [1, 3, 5, 7]}
    for name, devices in numbers.items():
        shape = dict(dims=(2, len(devices) // 2), device_axes=("x", "y"))
        which = dict(devices=devices) if by == "devices" else dict(callback=numbers.get)
        register_task(name, **shape, **which)
    params, batch = make_params(2), make_batch()
    step = mm.jit(microbatch(GRAD, 0, 2, argnum=1, schedule="1f1b"))
    assert_same(step(params, batch), by_hand(GRAD, params, batch, argnum=1))
    program = step.program(params, batch)
    assert meshes_of(program) == [(0, 2), (1, 3, 5, 7)]
    assert {c.name for c in program.calls if c.stage == 1} == {"layer1 forward", "layer1 backward"}


def test_more_layers_than_stages():
    register_layers()
    with multimesh(TWO), pytest.raises(ValueError, match="index 2 is outside axis 'stage'.* size 2"):
        mm.jit(microbatch(GRAD, 0, 2, argnum=1))(make_params(3), make_batch())


def test_layers_without_a_multimesh():
    register_layers()
    with pytest.raises(ValueError, match="no.* current.*with MultiMesh"):
        mm.jit(microbatch(GRAD, 0, 2, argnum=1))(make_params(2), make_batch())


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["no jit", "jax.jit"])
@pytest.mark.parametrize("schedule", [*WHOLE_AND_CUT, None])
def test_outside_of_any_split(schedule, jit):
    """Without mm.jit a schedule and registered layers make no difference, MultiMesh or not."""
    register_layers()
    params, batch = make_params(2), make_batch()
    with multimesh(TWO):
        got = jit(microbatch(GRAD, 0, 2, argnum=1, schedule=schedule))(params, batch)
    assert_same(got, GRAD(params, batch))


def test_a_custom_schedule_outside_of_any_split():
    loop = microbatch(GRAD, 0, 2, argnum=1, schedule="custom", custom_schedule=NAMES)
    params, batch = make_params(2), make_batch()
    assert_same(jax.jit(loop)(params, batch), GRAD(params, batch))


def test_arguments_and_defaults():
    """As documented: what goes by position, and what the rest is if it is not given."""
    arguments = inspect.signature(microbatch).parameters
    assert list(arguments)[:4] == ["fun", "dim", "size", "argnum"]
    assert arguments["dim"].default is arguments["size"].default is inspect.Parameter.empty
    assert arguments["argnum"].default == 0
    names = ["schedule", "num_stages", "interleave", "unrolling", "arg_shardings", "custom_schedule"]
    assert list(arguments)[4:10] == names
    for name in names:
        assert arguments[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert arguments[name].default is None


def test_custom_rows_that_name_the_tasks_of_callbacks():
    def stage(name, backprop):
        return Task(f"{name}_{'bwd' if backprop else 'fwd'}", mesh_slice={"stage": int(name[5:])})

    register_task(r"layer\d+", callback=stage)
    rows = [["layer0_fwd"] * 4 + ["layer0_bwd"] * 4, ["layer1_fwd", "layer1_bwd"] * 4]
    params, batch = make_params(2), make_batch()
    loop = microbatch(GRAD, 0, 2, argnum=1, schedule="custom", custom_schedule=rows)
    check(loop, by_hand(GRAD, params, batch, argnum=1), params, batch)


def test_an_error_names_the_registered_scope():
    register_layers()
    with multimesh(TWO), pytest.raises(ValueError, match=r"index 2 is outside axis 'stage'.*layer2"):
        mm.jit(microbatch(GRAD, 0, 2, argnum=1))(make_params(3), make_batch())


# What is sliced


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    image: jax.Array
    label: jax.Array


def images():
    return RNG.integers(0, 256, size=(8, 2, 4)).astype(np.uint8), RNG.integers(0, 4, size=8).astype(np.int32)


def classify(params, image, label):
    """Layers over an image of 2x4, and the cross entropy with a label."""
    logits = layers(params, image.astype(jnp.float32).sum(axis=1) / 255)
    return -jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(label.shape[0]), label])


@few(1)
@pytest.mark.parametrize(
    "pack, unpack",
    [
        (lambda image, label: (image, label), lambda batch: batch),
        (lambda image, label: {"in": [image], "out": (label, None)}, lambda b: (b["in"][0], b["out"][0])),
        (Batch, lambda batch: (batch.image, batch.label)),
    ],
    ids=["tuple", "tree", "dataclass"],
)
def test_slices_a_tree_of_arrays(pack, unpack):
    """Arrays of other ranks and dtypes, cut along the same dimension, in whatever holds them."""
    register_layers()
    grad = jax.value_and_grad(lambda params, batch: classify(params, *unpack(batch)))
    check_loop(grad, grad, make_params(2), pack(*images()), argnum=1)


@pytest.mark.parametrize("argnum", [0, 1, 2])
def test_slices_any_argument(argnum):
    """The others are the same for every microbatch: trees, arrays and Python scalars."""
    register_layers()
    others = [make_params(2), 0.5]
    args = [*others[:argnum], make_batch(), *others[argnum:]]

    def loss(*args):
        params, scale = (a for n, a in enumerate(args) if n != argnum)
        return scale * loss_fn(params, args[argnum])

    grad = jax.value_and_grad(loss, argnums=tuple(n for n in range(3) if n != argnum))
    check_loop(grad, grad, *args, argnum=argnum)


@few(1)
@pytest.mark.parametrize("dim", [1, 2, -1, -3])
def test_slices_any_dimension(dim):
    """Negative ones count from the last."""
    register_layers()
    x = normal(6, 8, 4)

    def loss(params, x):
        assert x.shape[dim] == 2
        return jnp.sum(layers(params, jnp.moveaxis(x, dim, -1).reshape(-1, 2)) ** 2)

    params = [(normal(2, 2), normal(2)) for _ in range(2)]
    grad = jax.value_and_grad(loss)
    program = check_loop(grad, grad, params, x, argnum=1, dim=dim)
    assert program.loops[0].length == x.shape[dim] // 2


@pytest.mark.parametrize("dim", [1, -2])
def test_results_are_joined_along_the_dimension_that_was_sliced(dim):
    """Gradients of the batch itself are put together again, next to sums over it."""
    register_layers()
    params, x = make_params(2), normal(3, 8, 4)
    grad = jax.grad(lambda params, x: jnp.sum(layers(params, x) ** 2), argnums=(0, 1))
    loop = microbatch(grad, dim, 2, argnum=1, schedule="zero-bubble-h2", reduce=("sum", "concat"))
    check(loop, grad(params, x), params, x)


@pytest.mark.parametrize("size", [1, 8])
def test_microbatches_of_one_row_and_of_all(size):
    register_layers()
    program = check_loop(GRAD, GRAD, make_params(2), make_batch(), argnum=1, size=size)
    assert {call.microbatch for call in program.calls} - {None} == set(range(8 // size))


def test_shardings_of_the_slices():
    """One spec for all arrays, or a tree of them, over the axes of each stage."""
    register_layers()
    params, batch = make_params(2), make_batch()
    for shardings in (P("batch"), (P("batch", "model"), None)):
        loop = microbatch(GRAD, 0, 4, 1, schedule="1f1b", arg_shardings=shardings)
        check(loop, by_hand(GRAD, params, batch, argnum=1, size=4), params, batch)


def test_a_constraint_in_each_layer():
    """Logical axes of a registered layer are axes of its slice: the results are sharded so, and the same."""
    rules = [("rows", "batch"), ("features", "model")]
    register_layers(logical_axes=rules)

    def constrained(params, x):
        for i, (w, b) in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = with_sharding_constraint(jnp.tanh(x @ w + b), P("rows", "features"))
        return x

    params, (x, _) = make_params(2), make_batch()
    loop = microbatch(constrained, 0, 4, 1, reduce="concat")
    check(loop, layers(params, x), params, x)
    with multimesh(TWO):
        assert mm.jit(loop)(params, x).sharding.shard_shape((8, 4))[1] == 2


def test_an_input_that_is_sharded_over_every_stage():
    register_layers()
    params, batch = make_params(2), make_batch()
    everywhere = NamedSharding(multimesh(TWO).mesh, P(("stage", "batch")))
    check_loop(GRAD, GRAD, params, jax.device_put(batch, everywhere), argnum=1)


# No tasks, and tasks without gradients


@pytest.mark.parametrize("schedule", [*WHOLE_AND_CUT, None])
def test_no_tasks_at_all(schedule):
    """Nothing is registered: one program on one mesh, MultiMesh or not."""
    params, batch = make_params(2), make_batch()
    loop = mm.jit(microbatch(GRAD, 0, 2, 1, schedule=schedule))
    expected = by_hand(GRAD, params, batch, argnum=1)
    for context in (multimesh(TWO), contextlib.nullcontext()):
        with context:
            program = loop.program(params, batch)
            assert_same(loop(params, batch), expected)
        assert len(meshes_of(program)) == len(program.calls) == 1
        assert not program.transfers and not program.loops


@pytest.mark.parametrize("schedule", [*WHOLE_AND_CUT, None])
def test_tasks_without_gradients(schedule):
    """A loop that only runs forward: of losses, and of all that the layers put out."""
    register_layers()
    params, batch = make_params(2), make_batch()
    both = lambda params, batch: (loss_fn(params, batch), layers(params, batch[0]))
    loop = microbatch(both, 0, 2, 1, schedule=schedule, reduce=("sum", "concat"))
    program = check(loop, both(params, batch), params, batch)
    assert {call.phase for call in program.calls if call.microbatch is not None} == {"forward"}


@pytest.mark.parametrize("schedule", ["1f1b", "wavefront"])
def test_a_task_that_no_gradient_goes_through(schedule):
    """A target network on its own stage: it runs forward, and has no backward."""

    def build(in_stage):
        def loss(params, target, batch):
            x, y = batch
            goal = jax.lax.stop_gradient(in_stage(lambda w, y: jnp.sin(y @ w), 1)(target, y))
            return jnp.sum((in_stage(lambda w, x: jnp.tanh(x @ w), 0)(params, x) - goal) ** 2)

        return jax.value_and_grad(loss)

    args = normal(4, 4), normal(4, 4), make_batch()
    program = check_loop(build(in_stage), build(unsplit), *args, argnum=2, schedule=schedule)
    assert {call.name for call in program.calls if "backward" in call.phase} == {"stage0 backward"}
