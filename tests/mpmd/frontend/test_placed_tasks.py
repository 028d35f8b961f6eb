"""A task that a TaskSharding names: its name and options hold for what follows its state."""

from __future__ import annotations

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
from tests.mpmd.parity import assert_same, born, pipeline, place

STAGES = [("layers", (0, 1))], [("layers", (2, 3))]


def program_of(mesh: mm.MultiMesh, model: nnx.Module, batch=None, **loop) -> mm.Program:
    grad_fn = mm.microbatch(nnx.value_and_grad(models.squared_error), 0, 2, argnum=1, **loop)
    step = mm.jit(lambda model, batch: grad_fn(model, batch), mesh=mesh)
    return step.program(model, models.vectors() if batch is None else batch)


def tasks_on(*slices: int, **options) -> list[mm.Task]:
    return [mm.Task(f"part{n}", mesh_slice={"stage": i}, **options) for n, i in enumerate(slices)]


def test_it_names_what_runs():
    mesh, _ = pipeline(2)
    with mesh:
        model = born(make(models.MLP), place(tasks_on(0, 1), *STAGES))
    program = program_of(mesh, model, schedule="gpipe")
    assert {f.name.split()[0] for f in program.fragments} == {"part0", "part1"}
    assert list(program.names.values()) == ["part0", "part1"]


def test_one_of_the_same_name_takes_its_place():
    """As when a cell of a notebook is run again with another option."""
    mesh, _ = pipeline(2)
    kept = []
    for remat in (None, True, None):
        with mesh:
            model = born(make(models.MLP), place(tasks_on(0, 1, remat=remat), *STAGES))
        kept.append(sum(program_of(mesh, model, schedule="gpipe").simulate().residual_bytes.values()))
    assert kept[0] == kept[2] > kept[1]


def test_tasks_on_one_mesh_that_disagree():
    """What follows the state of a mesh could be of either; without a backward it makes no difference."""
    mesh, _ = pipeline(2)
    first, second, third = tasks_on(0, 0, 1)
    second = mm.Task("part1", mesh_slice={"stage": 0}, remat=True)
    with mesh:
        placement = place([first, second, third], [("layers", 0)], [("layers", 1)], [("layers", (2, 3))])
        model = born(make(models.MLP), placement)
        mm.jit(lambda model, x: model(x))(model, models.vectors()["x"])
        with pytest.raises(ValueError, match=r"task 'part0' and task 'part1' .* \[0\].*remat.*mm\.task"):
            program_of(mesh, model)


def test_tasks_without_a_multimesh_are_forgotten():
    """They are registered for the process, as by mm.register_task."""
    devices = [jax.sharding.Mesh(jax.devices()[i : i + 1], ("x",)) for i in range(2)]
    tasks = [mm.Task(f"part{i}", mesh=mesh) for i, mesh in enumerate(devices)]
    model = born(make(models.MLP), place(tasks, *STAGES))
    loss = mm.jit(models.squared_error)
    assert list(loss.program(model, models.vectors()).names.values()) == ["part0", "part1"]
    mm.clear_tasks()
    assert list(loss.program(model, models.vectors()).names.values()) == ["mesh0", "mesh1"]


def test_a_profile_of_other_arguments():
    mesh, _ = pipeline(2)
    with mesh:
        model = born(make(models.MLP), place(tasks_on(0, 1), *STAGES))
    program = program_of(mesh, model, models.vectors(rows=8))
    with pytest.raises(ValueError, match=r"argument 1\.x is float32\[4,\d+\], not float32\[8,\d+\]"):
        program.profile(model, models.vectors(rows=4))


def test_costs_of_what_is_not_there():
    mesh, _ = pipeline(2)
    with mesh:
        model = born(make(models.MLP), place(tasks_on(0, 1), *STAGES))
    program = program_of(mesh, model, schedule="gpipe")
    with pytest.raises(ValueError, match="there is no 'part0 forwards'; there are .*'part0 forward'"):
        program.simulate({"part0 forwards": 1.0})
    with pytest.raises(ValueError, match="no time for 'part1 backward', nor for its phase 'backward'"):
        program.simulate(mm.Costs({"forward": 1.0, "none": 0.0, "part0 backward": 2.0}))
    with pytest.raises(ValueError, match="cost of 'forward' is a time of 0 or more, not -1"):
        program.simulate({"forward": -1})


def test_tasks_on_one_mesh_that_call_its_axes_by_other_names():
    """A constraint by the names of one holds, whichever was met first."""
    names = "data", "model"
    tasks = [mm.Task(name, mm.TaskMesh(devices=[0, 1], axis_names=(name,))) for name in names]
    other = mm.Task("other", mm.TaskMesh(devices=[2, 3], axis_names=("model",)))

    def f(model, x):
        y = model.layers[1](model.layers[0](x))
        y = jax.lax.with_sharding_constraint(y, NamedSharding(tasks[1].to_mesh(), P(None, "model")))
        return y, model.layers[2](y)

    rules = {mm.path("layers", n): (task, P()) for n, task in enumerate((*tasks, other))}
    model = mm.jit(make(models.MLP, layers=3), out_shardings=mm.TaskSharding(rules))()
    x = models.vectors()["x"]
    y, z = mm.jit(f)(model, x)
    assert y.sharding.shard_shape(y.shape) == (y.shape[0], y.shape[1] // 2)
    assert_same((y, z), nnx.jit(f)(make(models.MLP, layers=3)(), x))


def test_a_task_of_all_devices_beside_one_of_some():
    """Its scope makes it a place of its own: its parameters and work are on all of them."""
    mesh, tasks = pipeline(2, 2)
    whole = mm.task(lambda w, x: jnp.tanh(x @ w), "whole", mesh=mesh)
    part = mm.task(lambda w, x: jnp.sin(x @ w), task=tasks[0])
    with mesh:
        f = mm.jit(lambda v, w, x: part(w, whole(v, x)))
        v, w, x = (np.random.default_rng(n).normal(size=(4, 4)).astype(np.float32) for n in range(3))
        assert_same(f(v, w, x), np.sin(np.tanh(x @ v) @ w), 1e-5)
        (homes, *_), _ = f.input_shardings(v, w, x)
        assert homes.device_set == set(mesh.mesh.devices.flat)
        assert [fragment.mesh.size for fragment in f.program(v, w, x).fragments] == [4, 2]


def test_a_task_of_all_devices_before():
    """State that another program had on all devices makes no stage of them: counters stay with the stages."""
    devices = jax.devices()[:4]
    whole = mm.Task("whole", mesh=jax.sharding.Mesh(np.reshape(devices, (2, 2)), ("data", "model")))
    mm.jit(make(models.MLP), out_shardings=mm.TaskSharding({...: whole}))()
    mesh, tasks = pipeline(2, 2)
    with mesh:
        model = born(make(models.MLP), place(tasks, *STAGES))
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
        step = mm.jit(lambda m, o: o.update(m, nnx.grad(lambda m: (m.layers[0].kernel[...] ** 2).sum())(m)))
        found = {fragment.mesh for fragment in step.program(model, optimizer).fragments}
    assert len(found) == 2 and all(m.size == 2 for m in found)
