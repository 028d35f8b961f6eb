"""Every schedule, run: the answer is that of one device, the order that of its table, nothing is done twice.

What each is for decides how stages lie on the meshes: in a line, one on each; going round them; in a V.
"""

from __future__ import annotations

import dataclasses
import functools
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
from tests.mpmd.parity import OneDevice, assert_parity, on_one_device, pipeline

LOOPING = ["interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble"]
VEES = ["zbv", "dualpipe-v"]
ANYWHERE = ["gpipe", "1f1b", "eager-1f1b", "wavefront", "zero-bubble-h1", "zero-bubble-h2"]
NAMES = [*ANYWHERE, *LOOPING, *VEES]


def test_no_schedule_is_left_out():
    assert sorted(schedule_names()) == sorted(NAMES)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of four stages.

    Attributes:
      make: makes it.
      loss: of the model and a batch.
      batch: makes a batch of so many rows.
      stages: the paths that each stage owns; the first is of a submodule that can be put in a task.
      lacks: phases that stages do not have if their backwards are cut: the first stage may have no input
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


def laid_out(name: str) -> tuple[int, ...]:
    """On which mesh each of four stages lies: where the schedule wants them."""
    return (0, 1, 0, 1) if name in LOOPING else (0, 1, 1, 0) if name in VEES else (0, 1, 2, 3)


def on_meshes(meshes: Sequence[int], *per_stage: int) -> tuple[mm.MultiMesh, list[mm.Task]]:
    """A MultiMesh, and a task for each stage, of which several may be on one mesh."""
    mesh, _ = pipeline(max(meshes) + 1, *per_stage)
    return mesh, [mm.Task(f"stage{n}", mesh_slice={"stage": m}) for n, m in enumerate(meshes)]


def check(case: Case, name: str, meshes: Sequence[int], num_microbatches: int, *per_stage: int, **options):
    """Trains alike; runs the table of the schedule, and no product more than gpipe does."""
    mesh, tasks = on_meshes(meshes, *per_stage)
    placement = placed(case, tasks, per_stage)
    scoped = in_tasks(case.make, {own[0]: task for own, task in zip(case.stages, tasks)})
    program = assert_parity(
        scoped,
        case.loss,
        case.batch(2 * num_microbatches),
        placement,
        mesh=mesh,
        microbatch=2,
        schedule=name,
        expected=expected(case, num_microbatches),
        **options,
    )
    stages = Stages.chain(meshes)
    assert_followed(program, get_schedule(name).table(stages, num_microbatches, **options), case.lacks)
    once = sum(count_products(c.fragment.jaxpr.jaxpr) for c in program.calls)
    assert once == num_microbatches * products_of_a_microbatch(case)


@functools.cache
def expected(case: Case, num_microbatches: int) -> OneDevice:
    batch = case.batch(2 * num_microbatches)
    return on_one_device(case.make, case.loss, batch, microbatch=2, steps=2, whole_batch=case.whole_batch)


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
    program: mm.Program, table: Sequence[Sequence[Action]], lacks: Set[tuple[int, str]]
) -> None:
    """Every row is run in its order. Where a stage's backwards are cut, whole ones are two parts."""
    cut = {a.stage for row in table for a in row if a.phase == "backward-weight"}
    asked = [[part for a in row for part in (halves(a) if a.stage in cut else [a])] for row in table]
    ran = program.table()
    there = {a for row in ran for a in row}
    missing = {(a.stage, a.phase) for row in asked for a in row if a not in there}
    assert missing == {part for part in lacks if cut}
    assert there <= {a for row in asked for a in row}
    for row in asked:
        wanted = [a for a in row if a in there]
        (found,) = [mine for actions in ran if (mine := [a for a in actions if a in wanted])]
        assert found == wanted


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
    """How many matrix products and convolutions a jaxpr holds."""
    inner = sum(count_products(sub) for e in jaxpr.eqns for sub in jaxprs_in_params(e.params))
    return inner + sum(e.primitive.name in ("dot_general", "conv_general_dilated") for e in jaxpr.eqns)


@pytest.mark.parametrize("num_microbatches", [2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_transformer(name, num_microbatches):
    """Its embedding is also its head: the first stage's weights are used in the last. 2 are fewer microbatches
    than stages; 5 do not go round evenly.
    """
    if name == "dualpipe-v":
        num_microbatches += 2  # it needs two for each mesh
    check(TRANSFORMER, name, laid_out(name), num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_loss_of_two_stages(name, num_microbatches):
    if name == "dualpipe-v":
        num_microbatches += 3
    check(TWO_STAGE_LOSS, name, laid_out(name), num_microbatches)


@pytest.mark.parametrize("name", NAMES)
def test_state_that_changes_with_every_microbatch(name):
    """BatchNorm's statistics and Dropout's counters are carried from one microbatch to the next, in order."""
    check(CONVNET, name, laid_out(name), 4)
