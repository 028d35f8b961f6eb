"""Every schedule, run: the answer is that of one device, the order that of its table, nothing is done twice.

What each is for decides how stages lie on the meshes: in a line, one on each; going round them; in a V.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.schedule import Action, Stages, get_schedule, schedule_names
from tests import models
from tests.models import in_tasks, make
from tests.mpmd.parity import MOMENTUM, assert_parity, born, on_meshes, pipeline, place
from tests.slow import all_but, few, grid

LOOPING = ["interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble"]
VEES = ["zbv", "dualpipe-v"]
ANYWHERE = ["sequential", "gpipe", "1f1b", "eager-1f1b", "wavefront", "zero-bubble-h1", "zero-bubble-h2"]
NAMES = [*ANYWHERE, *LOOPING, *VEES]


def test_no_schedule_is_left_out():
    assert sorted(schedule_names()) == sorted(NAMES)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model that is a chain of stages.

    Attributes:
      make: makes it.
      loss: of the model and a batch.
      batch: makes a batch of so many rows.
      stages: the paths that each stage owns; the first is of a submodule that can be put in a task.
      lacks: phases that stages may not have if their backwards are cut: the first stage has no input
        gradients, and one without weights has no weight gradients.
      whole_batch: whether the loss of the whole batch is the mean of those of microbatches.
    """

    make: Callable[[], nnx.Module]
    loss: Callable
    batch: Callable[[int], Any]
    stages: tuple[tuple[tuple[Any, ...], ...], ...]
    lacks: frozenset[tuple[int, str]] = frozenset()
    whole_batch: bool = True


def layers(count: int) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    return tuple((("layers", n),) for n in range(count))


def two_stage_loss(model: nnx.Module, batch: models.Batch) -> jax.Array:
    """Reads what the last stage makes, and what the second does."""
    hidden = jnp.tanh(model.layers[1](jnp.tanh(model.layers[0](batch["x"]))))
    x = hidden
    for layer in model.layers[2:-1]:
        x = jnp.tanh(layer(x))
    error = model.layers[-1](x) - batch["y"]
    return jnp.mean(jnp.sum(error**2, axis=-1)) + 0.1 * jnp.mean(jnp.sum(hidden**4, axis=-1))


TRANSFORMER = Case(
    make(models.Transformer, layers=2, width=8, vocab=16, tied=True),
    models.cross_entropy,
    lambda rows: models.tokens(rows, length=4, vocab=16),
    ((("embed",),), (("blocks", 0),), (("blocks", 1),), (("norm",),)),
    frozenset({(0, "backward-input")}),
)
TWO_STAGE_LOSS = Case(
    make(models.MLP, width=8), two_stage_loss, models.vectors, layers(4), frozenset({(0, "backward-input")})
)
CONVNET = Case(
    make(models.ConvNet),
    models.cross_entropy,
    models.images,
    (
        (("convs", 0), ("norms", 0)),
        (("dropouts", 0),),
        (("convs", 1), ("norms", 1)),
        (("head",), ("dropouts", 1)),
    ),
    frozenset({(1, "backward-weight")}),
    whole_batch=False,
)


PER_CALL = {"transformer": TRANSFORMER, "two losses": TWO_STAGE_LOSS, "convnet": CONVNET}


@functools.cache
def mlp(num_layers: int) -> Case:
    """A chain of as many stages as layers."""
    return Case(
        make(models.MLP, num_layers, 8),
        models.squared_error,
        models.vectors,
        layers(num_layers),
        frozenset({(0, "backward-input")}),
    )


def laid_out(name: str) -> tuple[int, ...]:
    """On which mesh each of four stages lies: where the schedule wants them."""
    return (0, 1, 0, 1) if name in LOOPING else (0, 1, 1, 0) if name in VEES else (0, 1, 2, 3)


def check(
    case: Case,
    name: str,
    meshes: Sequence[int],
    num_microbatches: int,
    *per_stage: int,
    per_call: int = 1,
    **options,
):
    """Trains alike; runs the table of the schedule, and no product more than gpipe does."""
    mesh, make_model, placement = split(case, meshes, per_stage)
    program = assert_parity(
        make_model,
        case.loss,
        case.batch(2 * num_microbatches),
        placement,
        mesh=mesh,
        microbatch=2,
        schedule=name,
        steps=2,
        whole_batch=case.whole_batch,
        optimizer=MOMENTUM,
        per_call=per_call,
        **options,
    )
    table = get_schedule(name).table(Stages.chain(meshes), num_microbatches // per_call, **options)
    assert_followed(program, table, case.lacks, per_call)
    once = sum(count_products(c.fragment.jaxpr.jaxpr) for c in program.calls)
    assert once == num_microbatches * products_of_a_microbatch(case)


@functools.cache
def split(case: Case, meshes: Sequence[int], per_stage: Sequence[int]) -> tuple[Any, ...]:
    """The mesh, what makes the model, and where it goes: the same for all that ask for the same."""
    mesh, tasks = on_meshes(meshes, *per_stage)
    return mesh, in_their_tasks(case, tasks), placed(case, tasks, per_stage)


def in_their_tasks(case: Case, tasks: Sequence[mm.Task]) -> Callable[[], nnx.Module]:
    return in_tasks(case.make, {own[0]: task for own, task in zip(case.stages, tasks)})


def placed(case: Case, tasks: Sequence[mm.Task], per_stage: Sequence[int] = ()) -> mm.TaskSharding:
    """Each stage's state on its mesh; where that is of several devices, kernels are divided."""
    rules = {}
    for task, own in zip(tasks, case.stages):
        for path in own:
            if per_stage:
                rules[mm.path(*path, "kernel")] = (task, P(None, "model"))
            rules[mm.path(*path)] = (task, P())
    return mm.TaskSharding(rules)


def assert_followed(
    program: mm.Program, table: Sequence[Sequence[Action]], lacks: Set[tuple[int, str]], per_call: int = 1
) -> None:
    """Every row is run in its order. Where a stage's backwards are cut, whole ones are two parts.

    A call is of so many microbatches, and the table counts calls.
    """
    cut = {a.stage for row in table for a in row if a.phase == "backward-weight"}
    calls = [[part for a in row for part in (halves(a) if a.stage in cut else [a])] for row in table]
    asked = [[a for call in row for a in microbatches_of(call, per_call)] for row in calls]
    ran = program.table()
    there = {a for row in ran for a in row}
    missing = {(a.stage, a.phase) for row in asked for a in row if a not in there}
    assert missing <= (lacks if cut else set())
    assert there <= {a for row in asked for a in row}
    for row in asked:
        wanted = [a for a in row if a in there]
        (found,) = [mine for actions in ran if (mine := [a for a in actions if a in wanted])]
        assert found == wanted


def microbatches_of(call: Action, per_call: int) -> list[Action]:
    first = per_call * call.microbatch
    return [call._replace(microbatch=m) for m in range(first, first + per_call)]


def halves(action: Action) -> list[Action]:
    phases = ("backward-input", "backward-weight") if action.phase == "backward" else (action.phase,)
    return [action._replace(phase=phase) for phase in phases]


@functools.cache
def products_of_a_microbatch(case: Case) -> int:
    """How many products the loss and its gradients take on one device."""
    graphdef, state = nnx.split(nnx.eval_shape(case.make))
    grad_fn = nnx.value_and_grad(case.loss)
    run = lambda state, batch: grad_fn(nnx.merge(graphdef, state), batch)
    return count_products(jax.make_jaxpr(run)(state, case.batch(2)).jaxpr)


def count_products(jaxpr: Any) -> int:
    """How many matrix products and convolutions a jaxpr computes; scans repeat theirs."""
    times = lambda e: e.params.get("length", 1)
    inner = sum(times(e) * count_products(sub) for e in jaxpr.eqns for sub in jaxprs_in_params(e.params))
    return inner + sum(e.primitive.name in ("dot_general", "conv_general_dilated") for e in jaxpr.eqns)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, num_microbatches",
    [(name, 5) for name in NAMES] + [(name, 2) for name in ("gpipe", "1f1b", "zbv")],
)
def test_transformer(name, num_microbatches):
    """Its embedding is also its head: weights of the first stage are used in the last.

    2 are fewer microbatches than stages, and 5 do not go round evenly.
    """
    check(TRANSFORMER, name, laid_out(name), num_microbatches)


@pytest.mark.parametrize(
    "name, num_microbatches",
    all_but(
        [("zbv", 6)],
        [(name, 6) for name in NAMES] + [(name, 1) for name in ("gpipe", "1f1b", "zbv")],
    ),
)
def test_loss_of_two_stages(name, num_microbatches):
    if name == "dualpipe-v":
        num_microbatches = max(num_microbatches, 4)
    check(TWO_STAGE_LOSS, name, laid_out(name), num_microbatches)


@pytest.mark.parametrize("name", all_but(["zbv"], NAMES))
def test_state_that_changes_with_every_microbatch(name):
    """BatchNorm's statistics and Dropout's counters are carried from one microbatch to the next, in order."""
    check(CONVNET, name, laid_out(name), 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_eight_devices(name):
    """Two devices in each of four stages on as many meshes, or of eight stages two to a mesh; kernels are
    divided between them.
    """
    down = (0, 1, 2, 3)
    meshes = (*down, *down) if name in LOOPING else (*down, *reversed(down)) if name in VEES else down
    check(mlp(len(meshes)), name, meshes, 8 if name in VEES else 3, 2)


@pytest.mark.parametrize(
    "case, name",
    all_but([("two losses", "zbv")], itertools.product(PER_CALL, NAMES)),
)
def test_several_microbatches_in_a_call(case, name):
    """The table is that of half as many microbatches, of two each."""
    check(PER_CALL[case], name, laid_out(name), 8, per_call=2)


@pytest.mark.parametrize("name", all_but(["1f1b"], ["1f1b", "interleaved-1f1b", "zero-bubble-h2"]))
def test_all_microbatches_in_one_call(name):
    check(TWO_STAGE_LOSS, name, laid_out(name), 3, per_call=3)


@pytest.mark.parametrize("name", all_but(["1f1b"], ["1f1b", "zero-bubble-h1"]))
def test_several_microbatches_in_a_call_on_several_devices(name):
    check(mlp(4), name, (0, 1, 2, 3), 4, 2, per_call=2)


@few(1)
@pytest.mark.parametrize(
    "name, options",
    [
        ("interleaved-1f1b", {"interleave": 3, "unrolling": 1}),
        ("interleaved-1f1b", {"unrolling": 3}),
        ("looped-bfs", {"interleave": 3}),
        ("interleaved-zero-bubble", {"interleave": 3, "unrolling": 3}),
    ],
)
def test_three_rounds(name, options):
    check(mlp(6), name, (0, 1) * 3, 4, **options)


@pytest.mark.parametrize(
    "name, meshes",
    grid(["1f1b", "wavefront", "zero-bubble-h1"], [(0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 2, 0)], step=3),
)
def test_a_schedule_of_lines_on_stages_that_share_meshes(name, meshes):
    check(TWO_STAGE_LOSS, name, meshes, 3)


# A graph that is no chain


TWO_ENCODERS = (("left",), ("right",), ("decoder",))
SIDE_BY_SIDE = ((), (), (0, 1))


class ScopedTwoEncoders(models.TwoEncoders):
    """Its decoder, and the join before it, are in a task."""

    def __init__(self, task: mm.Task, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.task = task

    def __call__(self, x):
        left, right = x, x
        for layer in self.left:
            left = jnp.tanh(layer(left))
        for layer in self.right:
            right = jax.nn.gelu(layer(right))
        join = lambda decoder, *parts: decoder(jnp.concatenate(parts, axis=-1))
        return mm.task(join, task=self.task)(self.decoder, left, right)


def both_losses(model: nnx.Module, batch: models.Batch) -> jax.Array:
    """Of the decoder, and of one of the encoders beside it."""
    left = batch["x"]
    for layer in model.left:
        left = jnp.tanh(layer(left))
    return models.squared_error(model, batch) + 0.1 * jnp.mean(jnp.sum(left**4, axis=-1))


def check_two_encoders(name: str, num_microbatches: int, loss: Callable, scoped: bool) -> mm.Program:
    mesh, tasks = pipeline(3)
    return assert_parity(
        make(ScopedTwoEncoders, tasks[2]) if scoped else make(models.TwoEncoders),
        loss,
        models.vectors(rows=2 * num_microbatches),
        place(tasks, *TWO_ENCODERS),
        mesh=mesh,
        microbatch=2,
        schedule=name,
        optimizer=MOMENTUM,
        steps=2,
    )


@pytest.mark.parametrize(
    "name, num_microbatches",
    all_but(
        [("zero-bubble-h1", 2)],
        [(name, 5) for name in ANYWHERE] + [(name, 2) for name in ("gpipe", "1f1b", "zero-bubble-h1")],
    ),
)
def test_two_encoders_into_one_decoder(name, num_microbatches):
    program = check_two_encoders(name, num_microbatches, models.squared_error, scoped=True)
    table = get_schedule(name).table(Stages((0, 1, 2), SIDE_BY_SIDE), num_microbatches)
    assert_followed(program, table, {(0, "backward-input"), (1, "backward-input")})


@pytest.mark.parametrize("name", all_but(["zero-bubble-h2"], ["1f1b", "zero-bubble-h2"]))
def test_losses_of_decoder_and_encoder(name):
    check_two_encoders(name, 3, both_losses, scoped=False)


def test_encoders_side_by_side_do_not_wait_for_each_other():
    """Though nothing says where their results are joined: the join belongs to the decoder. With unit costs
    the pipeline is two deep.
    """
    program = check_two_encoders("1f1b", 5, models.squared_error, scoped=False)
    one_device = len({d for mesh in program.names for d in mesh.devices.flat}) == 1  # as on a GPU
    assert program.simulate().makespan == 3 * (3 * 5 if one_device else 5 + 2 - 1)
    ways = {(t.source, t.target) for t in program.transfers if t.microbatch is not None}
    there = {("stage0", "stage2"), ("stage1", "stage2")}
    assert ways == there | {(b, a) for a, b in there}


# Refusals, before anything runs


def refusal(
    name: str, mesh: mm.MultiMesh, make_model: Callable[[], nnx.Module], placement: mm.TaskSharding
) -> str:
    """What is said of a schedule that is not for a model, when its program is made."""
    with mesh:
        model = born(make_model, placement)
        grad_fn = nnx.value_and_grad(models.squared_error)
        step = mm.jit(mm.microbatch(grad_fn, dim=0, size=2, argnum=1, schedule=name))
        with pytest.raises(ValueError) as error:
            step.program(model, models.vectors())
    return str(error.value)


@pytest.mark.parametrize("name", LOOPING + VEES)
def test_a_graph_is_refused_by_schedules_of_chains(name):
    mesh, tasks = pipeline(3)
    said = refusal(name, mesh, make(ScopedTwoEncoders, tasks[2]), place(tasks, *TWO_ENCODERS))
    assert (
        f"schedule '{name}' is for a chain, in which each stage reads the one before it; here stage 1" in said
    )
    assert "('stage1') reads no other" in said and "take '1f1b'" in said


@pytest.mark.parametrize(
    "name, meshes",
    [
        *((name, (0, 1, 1, 0)) for name in LOOPING),
        *((name, (0, 1, 0, 1)) for name in VEES),
        *((name, (0, 1, 2, 3)) for name in VEES),
    ],
)
def test_stages_that_lie_otherwise_are_refused(name, meshes):
    said = refusal(name, *split(mlp(4), meshes, ()))
    assert f"schedule '{name}' needs" in said
    placed = (f"{mesh} ('stage{stage}')" for stage, mesh in enumerate(meshes))
    assert f"here they are on meshes {', '.join(placed)}" in said


@pytest.mark.parametrize("name", VEES)
def test_a_v_whose_middle_is_one_stage_is_refused(name):
    """Two neighbours on one mesh are one stage, unless they are of different tasks: that is said."""
    mesh, (first, *middle, last) = on_meshes((0, 1, 1, 0))
    said = refusal(name, mesh, make(models.MLP, width=8), placed(mlp(4), (first, *middle[:1] * 2, last)))
    assert (
        "here they are on meshes 0 ('stage0'), 1 ('stage1'), 0 ('stage3'). Two stages in a row on one mesh"
        in said
    )
    assert "a Task of its own name in the TaskSharding, or a mm.task in the model" in said


def test_too_few_microbatches_are_refused():
    said = refusal("dualpipe-v", *split(mlp(6), (0, 1, 2, 2, 1, 0), ()))
    assert "needs two microbatches for each mesh, at least 6 here; there are 4" in said
