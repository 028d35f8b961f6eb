"""A second call with the same shapes traces and compiles nothing: what `JAX_LOG_COMPILES=1` would say of the
main job, after its first step, validation and sample, and after a restore."""

import contextlib
import logging
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
from mmnnx.mpmd.jit import stages
from mmnnx.train import TrainConfig
from mmnnx.train.checkpoint import Checkpoints
from mmnnx.train.evaluate import make_validate
from mmnnx.train.sample import sample
from mmnnx.train.step import create, make_train_step, place
from tests.slow import grid

CONFIG = TrainConfig(
    **dict(stages=2, tensor=2, microbatches=2, batch=4, sequence=8),
    **dict(layers=2, width=16, heads=2, kv_heads=2, mlp=32),
)

PROMPT = np.frombuffer(b"abcd", np.uint8)


@pytest.fixture
def compiled(caplog) -> Callable[[Callable[[], Any]], list[str]]:
    """``compiled(f)``: calls f and returns what JAX logs of tracing, lowering and compiling."""

    def run(f):
        caplog.clear()
        with caplog.at_level(logging.WARNING), jax.log_compiles():
            jax.block_until_ready(f())
        return [record.getMessage() for record in caplog.records]

    return run


@pytest.mark.slow
def test_the_main_job_compiles_once(compiled, tmp_path):
    devices = np.array(jax.devices()[: CONFIG.stages * CONFIG.tensor])
    mesh, placement = place(CONFIG, devices)
    tokens = np.random.default_rng(0).integers(0, 256, (CONFIG.batch, CONFIG.sequence + 1), np.int32)
    weights = np.full((CONFIG.batch, CONFIG.sequence), 1 / tokens[:, 1:].size, np.float32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}
    with mesh, Checkpoints(tmp_path / "checkpoints") as checkpoints:
        model, optimizer = create(CONFIG, placement)
        train_step, validate = make_train_step(CONFIG), make_validate([batch])
        calls = {
            "train": lambda: train_step(model, optimizer, batch),
            "validate": lambda: validate(model),
            "sample": lambda: sample(model, PROMPT, 6, CONFIG.sequence, seed=0),
        }
        for name, call in calls.items():
            assert any("Compiling" in message for message in compiled(call)), name
        for name, call in calls.items():
            assert compiled(call) == [], name

        checkpoints.save(1, {"model": model, "optimizer": optimizer})
        checkpoints.restore({"model": model, "optimizer": optimizer})
        for name, call in calls.items():
            assert compiled(call) == [], f"{name} after a restore"


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.last = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


WHOLE = mm.MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "model"), devices=jax.devices()[:8])
TASKS = {
    "slices": [dict(mesh_slice={"stage": i}) for i in range(2)],
    "own meshes": [dict(mesh=mm.TaskMesh(devices=[2 * i, 2 * i + 1], axis_names=("x",))) for i in range(2)],
}


@pytest.mark.parametrize("kind, donated", grid([*TASKS], [(0, 1, 2), ()], step=2))
def test_counters_made_outside_cost_no_second_program(compiled, kind, donated):
    """`nnx.Optimizer` and metrics are often made outside of mm.jit: their counters are unplaced
    before the first step; after it, on every mesh, or without a MultiMesh on one."""
    tasks = [mm.Task(name, **where) for name, where in zip(("first", "last"), TASKS[kind])]
    rules = {mm.path(task.name): (task, P()) for task in tasks}

    def step(model, optimizer, metrics, x, y):
        metrics.reset()

        def loss_fn(model):
            return jnp.mean((model(x) - y) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        metrics.update(values=loss)
        return loss

    def run(transform, place):
        model = place(TwoLayers(nnx.Rngs(0)))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        metrics = nnx.metrics.Average()
        step_fn = transform(step, donate_argnums=donated)
        logs, losses = [], []
        for n in range(3):
            x = np.full((2, 4), n, np.float32)
            logs.append(compiled(lambda x=x: losses.append(step_fn(model, optimizer, metrics, x, x + 1))))
        return logs, [*losses, *jax.tree.leaves(nnx.state((model, optimizer, metrics)))]

    _, expected = run(nnx.jit, lambda model: model)
    with WHOLE if kind == "slices" else contextlib.nullcontext():
        logs, found = run(mm.jit, mm.jit(lambda m: m, out_shardings=mm.TaskSharding(rules)))
    assert any("Compiling" in message for message in logs[0])
    assert logs[1:] == [[], []]
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_functions_that_name_the_tasks_of_one_mesh_differently_are_split_once(monkeypatch):
    """Each says anew what the tasks are; neither is split again for that."""
    mesh = mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "data"), devices=jax.devices()[:4])

    class Two(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in (0, 1))

    def maker(axes):
        tasks = [mm.Task(name, mesh_slice={"stage": n}, logical_axes=axes) for n, name in enumerate("ab")]
        placement = mm.TaskSharding({mm.path("a"): tasks[0], mm.path(...): tasks[1]})

        def make(scale):  # of a Module: there is no fast path
            return jax.tree.map(lambda x: x * scale, Two())

        return mm.jit(make, out_shardings=placement)

    taken, split = [], stages.split
    monkeypatch.setattr(stages, "split", lambda *args: taken.append(1) or split(*args))
    with mesh:
        makers = [maker({"batch": "data"}), maker({})]
        for _ in range(3):
            for make in makers:
                make(2.0)
    assert len(taken) == 2


def test_state_of_others_on_the_same_mesh_changes_nothing(monkeypatch):
    """Where a mesh has state of several tasks, as in interleaved schedules, whose it is makes a difference
    to the functions with that state alone."""
    mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])
    one, other = (mm.Task(name, mesh_slice={"stage": 0}) for name in ("one", "other"))
    traced, taken, split = [], [], stages.split
    monkeypatch.setattr(stages, "split", lambda *args: taken.append(args[0].fun_name) or split(*args))

    def place(rules):
        return mm.jit(lambda: TwoLayers(nnx.Rngs(0)), out_shardings=mm.TaskSharding(rules))()

    @mm.jit
    def forward(model, x):
        traced.append(1)
        return model(x)

    with mesh:
        model, x = place({mm.path("first"): one, mm.path("last"): other}), jnp.ones((2, 4))
        forward(model, x)
        for n in range(2):
            make = lambda: nnx.Dict({f"probe{n}": nnx.Linear(4, 4, rngs=nnx.Rngs(0))})  # noqa: B023
            mm.jit(make, out_shardings=mm.TaskSharding({...: other}))()
            forward(model, x)
        assert len(traced) == taken.count("forward") == 1
        place({mm.path("first"): other, mm.path("last"): one})
        forward(model, x)
        assert len(traced) == 1 and taken.count("forward") == 2
