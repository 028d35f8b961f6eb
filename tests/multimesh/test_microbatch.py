"""microbatch in programs written for multimesh.jax: plain functions over pytrees, layers registered by name.

Every loop is split over the meshes of its tasks, and its results, their dtypes included, are those of the
plain functions on the same slices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from multimesh_compat.jax import (
    MultiMesh,
    Task,
    TaskMesh,
    clear_tasks,
    microbatch,
    register_task,
    task,
    with_sharding_constraint,
)

RNG = np.random.default_rng(0)
START = RNG.bit_generator.state
TWO, FOUR = (2, 2, 2), (4, 2, 1)  # stage, batch, model
MESHES = {
    TWO: [(0, 1, 2, 3), (4, 5, 6, 7)],
    FOUR: [(0, 1), (2, 3), (4, 5), (6, 7)],
}
SCHEDULES = ["gpipe", "1f1b", "wavefront", "zero-bubble-h2"]
WHOLE_AND_CUT = ["1f1b", "zero-bubble-h2"]  # what they do to a backward


@pytest.fixture(autouse=True)
def begin_anew():
    """No test finds another's registered tasks, and its numbers do not depend on which ran before."""
    clear_tasks()
    RNG.bit_generator.state = START
    yield
    clear_tasks()


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def multimesh(sizes):
    return MultiMesh(axis_sizes=sizes, axis_names=("stage", "batch", "model"))


def in_stage(fun, stage, **options):
    """A task on one slice of the MultiMesh."""
    return task(fun, task=Task(f"stage{stage}", mesh_slice={"stage": stage}, **options))


def unsplit(fun, stage, **options):
    """What `in_stage` is compared with."""
    return fun


def by_hand(fun, *args, argnum=0, dim=0, size=2):
    """The sum of what `fun` returns for slices of one argument, in plain JAX."""
    outs = []
    for start in range(0, jax.tree.leaves(args[argnum])[0].shape[dim], size):
        rows = slice(start, start + size)
        piece = jax.tree.map(lambda x: x[(*[slice(None)] * (dim % x.ndim), rows)], args[argnum])  # noqa: B023
        outs.append(jax.jit(fun)(*args[:argnum], piece, *args[argnum + 1 :]))
    return jax.tree.map(lambda *leaves: functools.reduce(operator.add, leaves), *outs)


def assert_same(got, expected, rtol=1e-5):
    """The same tree, shapes and dtypes, and values up to `rtol` of the largest entry of each leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, g), e in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected)):
        where, e = jax.tree_util.keystr(path), jnp.asarray(e)
        assert (g.dtype, g.shape) == (e.dtype, e.shape), where
        g, e = np.asarray(g, np.float64), np.asarray(e, np.float64)
        np.testing.assert_allclose(g, e, rtol=0, atol=rtol * max(1, np.abs(e).max()), err_msg=where)


def meshes_of(program):
    """Device numbers of every mesh on which a program runs something."""
    return sorted({tuple(d.id for d in call.mesh.devices.flat) for call in program.calls})


def check(fun, expected, *args, sizes=TWO, meshes=None, rtol=1e-5, **jit_options):
    """Runs `fun(*args)` twice under mm.jit on a MultiMesh; returns what it ran."""
    with multimesh(sizes):
        jitted = mm.jit(fun, **jit_options)
        program = jitted.program(*args)
        for _ in range(2):
            assert_same(jitted(*args), expected, rtol)
    assert meshes_of(program) == (MESHES[sizes] if meshes is None else meshes)
    return program


def check_loop(fun, plain, *args, argnum, dim=0, size=2, schedule="1f1b", **options):
    """`check` of a loop over `fun`, against `plain` by hand; returns what it ran."""
    loop = microbatch(fun, dim, size, argnum, schedule=schedule)
    program = check(loop, by_hand(plain, *args, argnum=argnum, dim=dim, size=size), *args, **options)
    assert [each.schedule for each in program.loops] == [schedule]
    return program


def register_layers(**options):
    """Scopes layer0, layer1, ... are tasks of the stages of these numbers."""
    register_task(
        r"layer\d+",
        callback=lambda name, backprop: Task(mesh_slice={"stage": int(name[5:])}, **options),
    )


def layers(params, x):
    for i, (w, b) in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ w + b)
    return x


def loss_fn(params, batch):
    x, y = batch
    return jnp.sum((layers(params, x) - y) ** 2)


GRAD = jax.value_and_grad(loss_fn)


def make_params(count):
    return [(normal(4, 4), normal(4)) for _ in range(count)]


def make_batch(rows=8):
    return normal(rows, 4), normal(rows, 4)


# Schedules, over layers registered by name


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
    for name in ("schedule", "num_stages", "interleave", "unrolling", "arg_shardings", "custom_schedule"):
        assert arguments[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert arguments[name].default is None


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


# Work around the loop


def adam(params, moments, grads):
    """One step of Adam on clipped gradients, by hand."""
    first, second, count = moments
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, second, grads)
    move = lambda p, m, v: p - 0.1 * m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.99**count)) + 0.1)
    return jax.tree.map(move, params, first, second), (first, second, count)


def normalised(batch):
    x, y = batch
    return (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-3), y


def train_step(grad_fn):
    """Normalises a batch, takes gradients, and updates parameters and moments."""

    def step(params, moments, batch):
        loss, grads = grad_fn(params, normalised(batch))
        return (*adam(params, moments, grads), loss)

    return step


def fresh_state(count):
    params = jax.tree.map(jnp.asarray, make_params(count))
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)
    return params, (zeros(), zeros(), jnp.int32(0))


PLAIN_STEP = jax.jit(train_step(lambda params, batch: by_hand(GRAD, params, batch, argnum=1)))


@pytest.mark.parametrize("sizes", [TWO, FOUR], ids=["2x2x2", "4x2x1"])
def test_work_before_and_after_the_loop(sizes):
    """Each stage normalises what it reads, and updates its own parameters and moments; they stay with it."""
    register_layers()
    state, batch = fresh_state(sizes[0]), make_batch()
    expected = state
    with multimesh(sizes):
        step = mm.jit(train_step(microbatch(GRAD, 0, 2, argnum=1, schedule="1f1b")))
        program = step.program(*state, batch)
        for _ in range(3):
            *state, loss = step(*state, batch)
            *expected, expected_loss = PLAIN_STEP(*expected, batch)
            assert_same((state, loss), (expected, expected_loss))
    assert meshes_of(program) == MESHES[sizes]
    phases = [call.phase for call in program.calls if call.microbatch is None]
    assert phases and set(phases) == {"none"}
    params, (first, second, _) = state
    for tree in (params, first, second):
        for layer, ids in zip(tree, MESHES[sizes]):
            assert all({d.id for d in leaf.sharding.device_set} == set(ids) for leaf in layer)


def test_tasks_before_and_after_the_loop():
    """Both are tasks of their own, one of them on another stage than what it feeds."""
    register_layers()
    update = lambda layer, grad: jax.tree.map(lambda p, g: p - 0.1 * g, layer, grad)

    def build(in_stage):
        def step(params, batch, grad_fn):
            _, grads = grad_fn(params, in_stage(normalised, 1)(batch))
            return [in_stage(update, i)(p, g) for i, (p, g) in enumerate(zip(params, grads))]

        return step

    params, batch = make_params(2), make_batch()
    loop = microbatch(GRAD, 0, 2, argnum=1, schedule="1f1b")
    expected = build(unsplit)(params, batch, lambda *args: by_hand(GRAD, *args, argnum=1))
    program = check(lambda *args: build(in_stage)(*args, loop), expected, params, batch)
    assert program.calls[0].mesh.devices.flat[0].id == 4  # where the batch is normalised


def test_two_loops_in_one_function():
    """A step and then a validation with the new parameters, in larger microbatches."""
    register_layers()

    def step(train, validate):
        def run(params, batch):
            loss, grads = train(params, batch)
            params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
            return params, loss, validate(params, batch)

        return run

    params, batch = make_params(2), make_batch()
    loops = microbatch(GRAD, 0, 2, 1, schedule="1f1b"), microbatch(loss_fn, 0, 4, 1, schedule="gpipe")
    program = check(step(*loops), step(GRAD, loss_fn)(params, batch), params, batch)
    assert [(loop.schedule, loop.length) for loop in program.loops] == [("1f1b", 4), ("gpipe", 2)]


def test_steps_in_a_scan():
    """Several train steps in one call: a scan whose body is a loop."""
    register_layers()

    def steps(grad_fn):
        def step(params, batch):
            loss, grads = grad_fn(params, batch)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

        return lambda params, batches: jax.lax.scan(step, params, batches)

    params, batches = make_params(2), (normal(3, 8, 4), normal(3, 8, 4))
    program = check(
        steps(microbatch(GRAD, 0, 2, 1, schedule="1f1b")), steps(GRAD)(params, batches), params, batches
    )
    assert [loop.schedule for loop in program.loops] == ["1f1b"] * 3


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


# Rematerialised tasks


def deep(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def task_loss(wrap, around=lambda loss: loss):
    """Loss and gradients of two tasks, each of which `wrap` makes."""

    def loss(params, x):
        for i, w in enumerate(params):
            x = wrap(i)(w, x)
        return jnp.sum(x**2)

    return jax.value_and_grad(around(loss))


REMATERIALISED = {
    "nowhere": task_loss(lambda i: in_stage(deep, i)),
    "around the task": task_loss(lambda i: jax.checkpoint(in_stage(deep, i))),
    "in the task": task_loss(lambda i: in_stage(jax.checkpoint(deep), i)),
    "around the loss": task_loss(lambda i: in_stage(deep, i), jax.checkpoint),
    "by the Task": task_loss(lambda i: in_stage(deep, i, remat=True)),
}


@pytest.mark.parametrize("schedule", WHOLE_AND_CUT)
@pytest.mark.parametrize("where", REMATERIALISED)
def test_rematerialised_tasks(where, schedule):
    """The same gradients; the backward of each stage computes again what it keeps otherwise."""
    params, x = [normal(4, 4) for _ in range(2)], normal(8, 4)
    plain = task_loss(lambda i: deep)
    program = check_loop(REMATERIALISED[where], plain, params, x, argnum=1, schedule=schedule)
    for stage, ids in enumerate(MESHES[TWO]):
        backward = [f for f in program.fragments if f.name.startswith(f"stage{stage} backward")]
        assert {d.id for f in backward for d in f.mesh.devices.flat} == set(ids)
        assert any("tanh" in str(f.jaxpr) for f in backward) == (where != "nowhere")


def test_rematerialised_registered_layers():
    register_layers(remat=True)
    program = check_loop(GRAD, GRAD, make_params(2), make_batch(), argnum=1)
    backward = [str(f.jaxpr) for f in program.fragments if f.phase == "backward"]
    assert len(backward) == 2 and all("tanh" in text for text in backward)


# Donation


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h2"])
@pytest.mark.parametrize("placed", [False, True], ids=["on one device", "on their stages"])
def test_donated_state_is_gone_and_its_successor_right(placed, schedule):
    """Every array of parameters and moments, in each of three steps."""
    register_layers()
    mesh, state, batch = multimesh(TWO), fresh_state(2), make_batch()
    expected = jax.tree.map(jnp.copy, state)
    if placed:
        put = lambda tree: [
            jax.device_put(layer, NamedSharding(mesh.slice(stage=i), P())) for i, layer in enumerate(tree)
        ]
        params, (first, second, count) = state
        state = put(params), (put(first), put(second), count)
    with mesh:
        grad_fn = microbatch(GRAD, 0, 2, argnum=1, schedule=schedule)
        step = mm.jit(train_step(grad_fn), donate_argnums=(0, 1))
        assert meshes_of(step.program(*state, batch)) == MESHES[TWO]
        for _ in range(3):
            donated = jax.tree.leaves(state)
            *state, loss = step(*state, batch)
            *expected, expected_loss = PLAIN_STEP(*expected, batch)
            assert all(leaf.is_deleted() for leaf in donated)
            assert_same((state, loss), (expected, expected_loss))


def test_what_is_not_donated_stays():
    register_layers()
    state, batch = fresh_state(2), make_batch()
    with multimesh(TWO):
        mm.jit(train_step(microbatch(GRAD, 0, 2, argnum=1)), donate_argnums=0)(*state, batch)
    params, moments = state
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert not any(
        leaf.is_deleted() for leaf in jax.tree.leaves((moments, batch)) if hasattr(leaf, "is_deleted")
    )


def test_a_donated_batch():
    register_layers()
    params, batch = make_params(2), make_batch()
    expected = GRAD(params, batch)
    with multimesh(TWO):
        step = mm.jit(microbatch(GRAD, 0, 2, argnum=1, schedule="1f1b"), donate_argnums=1)
        for _ in range(2):
            once = jax.tree.map(jnp.array, batch)
            assert_same(step(params, once), expected)
            assert all(leaf.is_deleted() for leaf in once)


def test_donated_twice():
    """The message says which, and that it is gone."""
    register_layers()
    state, batch = fresh_state(2), make_batch()
    with multimesh(TWO):
        step = mm.jit(train_step(microbatch(GRAD, 0, 2, argnum=1)), donate_argnums=0)
        step(*state, batch)
        with pytest.raises(ValueError, match=r"0\.0\.0 was donated"):
            step(*state, batch)


# Dtypes


@pytest.mark.parametrize("schedule", WHOLE_AND_CUT)
def test_tokens_masks_and_two_precisions(schedule):
    """int32 tokens, a bool mask and uint8 pixels in; bfloat16 inside; float32 logits, loss and counts out."""
    vocabulary, width = 16, 8
    params = {
        "embedding": normal(vocabulary, width).astype(jnp.bfloat16),
        "hidden": normal(width, width).astype(jnp.bfloat16),
        "head": normal(width, vocabulary),
    }
    batch = {
        "tokens": RNG.integers(0, vocabulary, size=(8, 5)).astype(np.int32),
        "mask": RNG.random((8, 5)) > 0.3,
        "pixels": RNG.integers(0, 256, size=(8, 5, width)).astype(np.uint8),
    }

    def embed(table, tokens, pixels):
        return table[tokens] + pixels.astype(jnp.bfloat16) / 255

    def head(hidden, head, x, tokens, mask):
        assert x.dtype == jnp.bfloat16
        logits = jax.nn.gelu(x @ hidden).astype(jnp.float32) @ head
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
        hits = (jnp.argmax(logits, axis=-1) == tokens) & mask
        return jnp.where(mask, losses, 0).sum(), mask.sum(dtype=jnp.uint32), hits

    def build(in_stage):
        def loss(params, batch):
            x = in_stage(embed, 0)(params["embedding"], batch["tokens"], batch["pixels"])
            total, count, hits = in_stage(head, 1)(
                params["hidden"], params["head"], x, batch["tokens"], batch["mask"]
            )
            return total, {
                "count": count,
                "hits": hits.sum(),
                "any": hits.any(),
                "pixel": batch["pixels"].max(),
            }

        return jax.value_and_grad(loss, has_aux=True)

    program = check_loop(
        build(in_stage), build(unsplit), params, batch, argnum=1, schedule=schedule, rtol=3e-2
    )
    sent = {(t.dtype.name, t.shape) for t in program.transfers if t.microbatch is not None}
    assert ("bfloat16", (2, 5, width)) in sent and not any(name == "float32" for name, _ in sent)


@pytest.mark.parametrize("schedule", WHOLE_AND_CUT)
def test_gradients_of_bfloat16_summed_in_float32(schedule):
    """The loop adds up whatever its function returns, in the dtype that it returns."""
    register_layers()
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_params(2))

    def grad(params, batch):
        batch = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), batch)
        loss, grads = GRAD(params, batch)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (loss, grads))

    batch = make_batch(16)
    check_loop(grad, grad, params, batch, argnum=1, schedule=schedule, rtol=3e-2)
    out = jax.eval_shape(microbatch(grad, 0, 2, argnum=1), params, batch)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(out)} == {"float32"}


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "bfloat16"])
def test_tasks_of_one_dtype(dtype):
    """Nothing on the way makes it another: neither tasks, nor transfers, nor what becomes of the results."""
    x = jnp.asarray(RNG.integers(0, 5, size=(8, 3))).astype(dtype)
    one, three = jnp.asarray(1, dtype), jnp.asarray(3, dtype)

    def build(in_stage):
        def fun(x):
            y = in_stage(lambda x: x * three, 1)(in_stage(lambda x: x + one, 0)(x))
            return y, y, y

        return fun

    plain = build(unsplit)
    expected = by_hand(plain, x)[0], plain(x)[1], plain(x[6:])[2]
    loop = microbatch(build(in_stage), 0, 2, reduce=("sum", "concat", "last"))
    program = check(loop, expected, x, rtol=0)
    assert {leaf.dtype for leaf in expected} == {jnp.dtype(dtype)}
    assert {t.dtype.name for t in program.transfers} == {dtype}


def test_half_precision_throughout():
    register_layers()
    half = lambda tree: jax.tree.map(lambda leaf: leaf.astype(np.float16), tree)
    check_loop(GRAD, GRAD, half(make_params(2)), half(make_batch()), argnum=1, rtol=1e-2)


def test_integers_counted_in_the_layers():
    """What a loop puts out next to its loss: counts, a maximum and a histogram, each from its stage."""
    register_layers()

    def loss(params, batch):
        (x, y), seen = batch, []
        for i, (w, b) in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w + b)
                bins = jnp.zeros(4, jnp.int32).at[jnp.argmax(x, axis=-1)].add(1)
                seen.append({"positive": (x > 0).sum(dtype=jnp.uint8), "bins": bins, "any": (x > 0.5).any()})
        return jnp.sum((x - y) ** 2), seen

    grad = jax.value_and_grad(loss, has_aux=True)
    for schedule in WHOLE_AND_CUT:
        check_loop(grad, grad, make_params(2), make_batch(), argnum=1, schedule=schedule)


# Python scalars


def scaled(x, w, scale, times, flip, bias, *, function):
    """Needs Python values: to count with, to branch on, and to look up."""
    assert (type(scale), type(times), type(flip), bias) == (float, int, bool, None)
    for _ in range(times):
        x = getattr(jnp, function)(x @ w) * scale
    return -x if flip else x


@pytest.mark.parametrize("schedule", WHOLE_AND_CUT)
def test_tasks_that_take_python_scalars(schedule):
    """By position, by name and through functools.partial: they stay what they are."""

    def build(in_stage):
        def loss(params, x):
            x = in_stage(functools.partial(scaled, function="tanh"), 0)(x, params[0], 0.5, 2, True, None)
            last = in_stage(functools.partial(scaled, function="sin", flip=False), 1)
            return jnp.sum(last(x, params[1], scale=2.0, times=1, bias=None) ** 2)

        return jax.value_and_grad(loss)

    params = [normal(4, 4), normal(4, 4)]
    check_loop(build(in_stage), build(unsplit), params, normal(8, 4), argnum=1, schedule=schedule)


def test_tasks_that_return_python_scalars():
    """Next to arrays, and handed from one task to the next. The loop sums them: they are arrays then."""

    def build(in_stage):
        def fun(w, x):
            hidden, scale, count, flag, none = in_stage(lambda w, x: (x @ w, 1.5, 3, True, None), 0)(w, x)
            out = in_stage(lambda w, x, scale: (jnp.sum(x @ w) * scale, count), 1)(w, hidden, scale)
            return *out, scale, flag, none

        return fun

    w, x = normal(4, 4), normal(8, 4)
    check(microbatch(build(in_stage), 0, 2, 1), by_hand(build(unsplit), w, x, argnum=1), w, x)
    with multimesh(TWO):
        _, count, scale, flag, none = mm.jit(microbatch(build(in_stage), 0, 2, 1))(w, x)
    assert (int(count), float(scale), bool(flag), none) == (12, 6.0, True, None)


@pytest.mark.parametrize("how", ["traced", "constant", "keywords"])
def test_loops_that_take_python_scalars(how):
    """As arguments of the jitted function, in the loop's call, and by name."""
    register_layers()
    loss = lambda params, batch, scale, count, flag: (
        loss_fn(params, batch) * scale * count + jnp.where(flag, 1.0, 0.0)
    )
    grad = jax.value_and_grad(loss)
    loop = microbatch(grad, 0, 2, argnum=1, schedule="1f1b")
    params, batch = make_params(2), make_batch()
    expected = by_hand(grad, params, batch, 0.5, 3, True, argnum=1)
    if how == "traced":
        check(loop, expected, params, batch, 0.5, 3, True)
    elif how == "constant":
        check(lambda params, batch: loop(params, batch, 0.5, 3, True), expected, params, batch)
    else:
        check(lambda *args: loop(*args, flag=True, scale=0.5, count=3), expected, params, batch)


def test_a_static_string():
    """Training and evaluation by one function: each is traced by itself."""
    register_layers()
    params, batch = make_params(2), make_batch()

    def run(params, batch, mode):
        return microbatch(GRAD if mode == "train" else loss_fn, 0, 2, argnum=1)(params, batch)

    with multimesh(TWO):
        jitted = mm.jit(run, static_argnums=2)
        assert_same(jitted(params, batch, "train"), GRAD(params, batch))
        assert_same(jitted(params, batch, "evaluate"), loss_fn(params, batch))
        assert meshes_of(jitted.program(params, batch, "evaluate")) == MESHES[TWO]


# Tasks in every form


def dense(w, x):
    return jnp.tanh(x @ w)


def of_weights(build, count, *, sizes=TWO, schedules=("zero-bubble-h2",), meshes=None):
    """Checks gradients of a sum of squares of `build(in_stage)(weights, x)`; returns what it ran last."""

    def grad(in_stage):
        run = build(in_stage)
        return jax.value_and_grad(lambda weights, x: jnp.sum(run(weights, x) ** 2))

    weights, x = [normal(4, 4) for _ in range(count)], normal(8, 4)
    for schedule in schedules:
        program = check_loop(
            grad(in_stage),
            grad(unsplit),
            weights,
            x,
            argnum=1,
            schedule=schedule,
            sizes=sizes,
            meshes=meshes,
        )
    return program


def test_a_task_in_a_task():
    """The innermost is where work is done: stage 0, then 1, then 0 again."""

    def build(in_stage):
        outer = lambda w, x: jnp.sin(in_stage(dense, 1)(w[1], x @ w[0]) @ w[2])
        return in_stage(outer, 0)

    # A mesh that is visited twice is two stages: for schedules of any graph.
    program = of_weights(build, 3, schedules=["gpipe", "1f1b", "wavefront"])
    forward = dict.fromkeys(
        (c.stage, c.mesh.devices.flat[0].id) for c in program.calls if c.phase == "forward"
    )
    assert sorted(forward) == [(0, 0), (1, 4), (2, 0)]


def test_a_task_in_one_of_the_same_mesh():
    def build(in_stage):
        outer = lambda w, x: jnp.sin(in_stage(dense, 0)(w[1], x @ w[0]) @ w[2])
        return lambda w, x: in_stage(dense, 1)(w[3], in_stage(outer, 0)(w, x))

    assert len(of_weights(build, 4).table()) == 2


def test_the_same_task_twice_in_a_row():
    """One stage, of both."""

    def build(in_stage):
        first, last = in_stage(dense, 0), in_stage(dense, 1)
        return lambda w, x: last(w[2], first(w[1], first(w[0], x)))

    program = of_weights(build, 3)
    assert {call.stage for call in program.calls} == {None, 0, 1}


def test_the_same_task_twice_with_another_between():
    """With the same weights, too: their gradient is the sum of both."""

    def build(in_stage):
        first, last = in_stage(dense, 0), in_stage(dense, 1)
        return lambda w, x: last(w[1], first(w[0], last(w[1], first(w[0], x))))

    program = of_weights(build, 2, schedules=["gpipe", "interleaved-1f1b", "wavefront"])
    assert {call.stage for call in program.calls} == {None, 0, 1, 2, 3}


def test_tasks_against_the_order_of_the_stages():
    build = lambda in_stage: lambda w, x: in_stage(dense, 0)(w[1], in_stage(dense, 1)(w[0], x))
    program = of_weights(build, 2)
    first = next(call for call in program.calls if call.phase == "forward")
    assert first.mesh.devices.flat[0].id == 4


def test_two_tasks_that_join_in_a_third():
    def build(in_stage):
        def run(w, x):
            one, other = in_stage(dense, 0)(w[0], x), in_stage(dense, 1)(w[1], -x)
            return in_stage(lambda w, one, other: one @ w * other, 2)(w[2], one, other)

        return run

    of_weights(build, 3, sizes=FOUR, schedules=["gpipe", "1f1b", "wavefront"], meshes=MESHES[FOUR][:3])


@pytest.mark.parametrize("schedule", WHOLE_AND_CUT)
def test_tasks_of_trees_that_return_dicts(schedule):
    """Parameters and results are pytrees, with a Python int among the results."""

    def encode(params, x):
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        return {"hidden": hidden, "more": {"norm": jnp.sum(params["w"] ** 2), "rows": x.shape[0]}}

    def decode(params, encoded):
        out = encoded["hidden"] @ params["w"] + params["b"]
        return {"out": out, "penalty": encoded["more"]["norm"] / encoded["more"]["rows"]}

    def build(in_stage):
        def loss(params, x):
            got = in_stage(decode, 1)(params["decode"], in_stage(encode, 0)(params["encode"], x))
            return jnp.sum(got["out"] ** 2) + got["penalty"]

        return jax.value_and_grad(loss)

    params = {name: {"w": normal(4, 4), "b": normal(4)} for name in ("encode", "decode")}
    check_loop(build(in_stage), build(unsplit), params, normal(8, 4), argnum=1, schedule=schedule)


def test_closures_over_arrays():
    """Over numpy and jax arrays, over arguments of the loop's function, and over a task's result."""
    constants = jnp.asarray(normal(4, 4)), normal(4, 4)

    def build(in_stage):
        def run(w, x):
            hidden = in_stage(lambda x: jnp.tanh(x @ w[0] @ constants[0]), 0)(x)
            return in_stage(lambda: hidden @ w[1] @ constants[1] + constants[0][0], 1)()

        return run

    of_weights(build, 2)


def test_closures_over_what_was_computed_before_the_loop():
    """And over a traced argument of the jitted function, neither of which the loop is given."""

    def build(in_stage):
        def step(weights, scale, x, loop):
            shift = jnp.sin(scale)

            def loss(weights, x):
                hidden = in_stage(lambda x: jnp.tanh(x @ weights[0]) + shift, 0)(x)
                return jnp.sum(in_stage(lambda: hidden @ weights[1] * scale, 1)() ** 2)

            return loop(jax.value_and_grad(loss))(weights, x)

        return step

    args = [normal(4, 4), normal(4, 4)], jnp.float32(0.5), normal(8, 4)
    expected = build(unsplit)(*args, lambda grad: functools.partial(by_hand, grad, argnum=1))
    loop = lambda grad: microbatch(grad, 0, 2, argnum=1, schedule="1f1b")
    check(lambda *args: build(in_stage)(*args, loop), expected, *args)


class Dense:
    """A layer that holds its weights and takes arguments of every kind."""

    def __init__(self, w):
        self.w = w

    def __call__(self, x, *more, scale=1.0, **kwargs):
        return jnp.tanh(x @ self.w) * scale + sum(more) + kwargs.get("shift", 0)


@pytest.mark.parametrize(
    "layer",
    [
        lambda in_stage, stage, w: in_stage(Dense(w), stage),
        lambda in_stage, stage, w: in_stage(Dense, stage)(w),
    ],
    ids=["object", "class"],
)
def test_a_callable_object_and_its_class(layer):
    """Made in the loop, of weights that are traced; called by position and by name."""

    def build(in_stage):
        def run(w, x):
            hidden = layer(in_stage, 0, w[0])(x, 1, 2.0, shift=0.5)
            return layer(in_stage, 1, w[1])(x=hidden, scale=2)

        return run

    of_weights(build, 2)


def test_a_function_in_the_arguments():
    """jax.tree_util.Partial: a function whose arrays are parameters."""

    def build(in_stage):
        def run(w, x):
            return in_stage(dense, 1)(w[1], in_stage(dense, 0)(w[0], x))

        return jax.value_and_grad(lambda fun, x: jnp.sum(fun(x) ** 2)), run

    weights, x = [normal(4, 4), normal(4, 4)], normal(8, 4)
    (grad, split), (_, plain) = build(in_stage), build(unsplit)
    got = by_hand(grad, jax.tree_util.Partial(plain, weights), x, argnum=1)
    fun = jax.tree_util.Partial(split, weights)
    expected = got[0], jax.tree.unflatten(jax.tree.structure(fun), jax.tree.leaves(got[1]))
    check(microbatch(grad, 0, 2, 1, schedule="1f1b"), expected, fun, x)


def jitted(w, x):
    return jax.jit(dense)(w, x)


def scanned(w, x):
    return jax.lax.scan(lambda x, _: (dense(w, x), None), x, length=3)[0]


def branching(w, x):
    return jax.lax.cond(jnp.sum(x) > 0, dense, lambda w, x: x @ w, w, x)


def mapped(w, x):
    return jax.vmap(dense, in_axes=(None, 0))(w, x)


def differentiating(w, x):
    return jax.grad(lambda x: jnp.sum(dense(w, x)))(x)


@jax.custom_vjp
def with_its_own_gradient(w, x):
    return dense(w, x)


with_its_own_gradient.defvjp(
    lambda w, x: (dense(w, x), (w, x)),
    lambda kept, g: tuple(2 * leaf for leaf in jax.vjp(dense, *kept)[1](g)),
)


@pytest.mark.parametrize(
    "fun", [jitted, scanned, branching, mapped, with_its_own_gradient], ids=lambda f: f.__name__
)
def test_transformations_in_a_task(fun):
    """Jitted, a scan, a branch, mapped over rows, with a gradient rule: on both stages, cut and whole."""
    build = lambda in_stage: lambda w, x: in_stage(fun, 1)(w[1], in_stage(fun, 0)(w[0], x))
    of_weights(build, 2, schedules=WHOLE_AND_CUT)


def test_a_gradient_in_a_task():
    """A task that differentiates by itself, within what is differentiated."""
    build = lambda in_stage: lambda w, x: in_stage(dense, 1)(w[1], in_stage(differentiating, 0)(w[0], x))
    of_weights(build, 2)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_transformations_around_loss_and_loop(around):
    """Of the function that the loop runs, and of the loop itself: its schedule holds."""
    register_layers()
    params, batch = make_params(2), make_batch()
    for fun in (
        microbatch(around(GRAD), 0, 2, 1, schedule="1f1b"),
        around(microbatch(GRAD, 0, 2, 1, schedule="1f1b")),
    ):
        program = check(fun, by_hand(GRAD, params, batch, argnum=1), params, batch)
        assert [loop.schedule for loop in program.loops] == ["1f1b"]


def test_tangents():
    """Forward mode in the loop, alone and over the gradient."""
    register_layers()
    params, batch = make_params(2), make_batch()

    def tangent(params, batch):
        return jax.jvp(lambda params: loss_fn(params, batch), (params,), (params,))

    def curvature(params, batch):
        return jax.jvp(lambda params: jax.grad(loss_fn)(params, batch), (params,), (params,))

    for fun in (tangent, curvature):
        check_loop(fun, fun, params, batch, argnum=1)


def test_tasks_on_meshes_of_their_own():
    """TaskMeshes of three devices, of two in another order and of one, and no MultiMesh."""
    meshes = [
        TaskMesh(devices=[0, 1, 2], axis_names=("x",)),
        TaskMesh(devices=[7, 5], axis_sizes=(1, 2), axis_names=("x", "y")),
        TaskMesh(devices=[4]),
    ]

    def build(wrap):
        def loss(weights, x):
            for w, mesh in zip(weights, meshes):
                x = wrap(mesh)(w, x)
            return jnp.sum(x**2)

        return jax.value_and_grad(loss)

    weights, x = [normal(4, 4) for _ in range(3)], normal(8, 4)
    split = build(lambda mesh: task(dense, mesh=mesh))
    step = mm.jit(microbatch(split, 0, 2, argnum=1, schedule="1f1b"))
    assert_same(step(weights, x), by_hand(build(lambda mesh: dense), weights, x, argnum=1))
    assert meshes_of(step.program(weights, x)) == [(0, 1, 2), (4,), (7, 5)]


def test_random_numbers_from_a_key():
    """Keys that are constant over the loop, and keys that are sliced with the batch."""
    register_layers()

    def loss(params, batch, key):
        x, y, keys = batch
        for i, (w, b) in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w + b) * jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
                x = x + jax.vmap(lambda key: jax.random.uniform(key, (4,)))(keys)
        return jnp.sum((x - y) ** 2)

    grad = jax.value_and_grad(loss)
    batch = (*make_batch(), jax.random.split(jax.random.key(1), 8))
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        check_loop(grad, grad, make_params(2), batch, key, argnum=1)


def test_a_loop_in_a_gradient_is_unrolled_and_says_so():
    register_layers()
    loop = microbatch(loss_fn, 0, 2, 1, schedule="1f1b")
    params, batch = make_params(2), make_batch()
    with (
        multimesh(TWO),
        pytest.warns(UserWarning, match="mm.microbatch is inside a grad.* its schedule has no"),
    ):
        got = mm.jit(jax.value_and_grad(loop))(params, batch)
    assert_same(got, jax.value_and_grad(microbatch(loss_fn, 0, 2, 1))(params, batch))


def test_custom_rows_that_name_the_tasks_of_callbacks():
    def stage(name, backprop):
        return Task(f"{name}_{'bwd' if backprop else 'fwd'}", mesh_slice={"stage": int(name[5:])})

    register_task(r"layer\d+", callback=stage)
    rows = [["layer0_fwd"] * 4 + ["layer0_bwd"] * 4, ["layer1_fwd", "layer1_bwd"] * 4]
    params, batch = make_params(2), make_batch()
    loop = microbatch(GRAD, 0, 2, argnum=1, schedule="custom", custom_schedule=rows)
    check(loop, by_hand(GRAD, params, batch, argnum=1), params, batch)


@pytest.mark.parametrize(
    "reduce, x, expected",
    [
        ("mean", np.array([True, True, True, False]), 0.75),
        ("max", np.array([False, True]), True),
        ("mean", np.full(8, 200, np.uint8), 200),
        ("mean", np.ones(1024, jnp.bfloat16), 1),
        ("sum", np.ones(1024, jnp.bfloat16), 1024),
    ],
)
def test_reductions_of_narrow_dtypes(reduce, x, expected):
    for jit in (lambda f: f, jax.jit, mm.jit):
        assert float(jit(microbatch(lambda x: x[0], 0, 1, reduce=reduce))(x)) == expected


def test_sums_keep_the_dtype_of_what_they_sum():
    for dtype in (jnp.bfloat16, jnp.float32, jnp.int8):
        assert microbatch(lambda x: x[0], 0, 1)(jnp.ones(4, dtype)).dtype == dtype
    with pytest.raises(TypeError, match="reduce='max' has no meaning for complex64"):
        microbatch(lambda x: x[0], 0, 1, reduce="max")(jnp.ones(2, jnp.complex64))


@pytest.mark.parametrize("reduce", ["sum", "last"])
def test_gradients_of_integers(reduce):
    register_layers()
    grad = jax.grad(lambda p, n, b: loss_fn(p, b) * n, argnums=(0, 1), allow_int=True)
    with multimesh(TWO):
        loop = mm.jit(microbatch(grad, 0, 2, 2, schedule="1f1b", reduce=reduce))
        got = loop(make_params(2), np.int32(3), make_batch())[1]
    assert got.dtype == jax.dtypes.float0 and got.shape == ()


def test_an_error_names_the_registered_scope():
    register_layers()
    with multimesh(TWO), pytest.raises(ValueError, match=r"index 2 is outside axis 'stage'.*layer2"):
        mm.jit(microbatch(GRAD, 0, 2, argnum=1))(make_params(3), make_batch())
