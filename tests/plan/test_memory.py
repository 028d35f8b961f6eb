"""The bytes of a plan are those of the arrays that are there when its program runs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.modules import PRESETS
from mmnnx.mpmd.runtime import prepare
from mmnnx.mpmd.runtime.profile import measurer
from tests import models
from tests.models import make
from tests.mpmd.parity import born, pipeline
from tests.plan.conftest import devices_of, plan_here, small, tokens
from tests.slow import all_but

JOBS = {
    "lm": small(),
    "four stages": small(stages=4, layers=4, batch=8),
    "remat": small(remat=True),
    "scanned": small(scan=True),
    "experts": small(model="tiny-moe"),
    "tensor": small(tensor=2),
    "context and expert": small(model="tiny-moe", context=2, expert=2),
    "fsdp": small(data=2, fsdp=True),
    "gpipe": small(schedule="gpipe"),
}
QUICK = ("lm",)
planned = functools.cache(lambda name: plan_here(JOBS[name]))


@pytest.mark.parametrize("name", all_but(QUICK, JOBS))
def test_planned_bytes_are_measured_bytes(name, monkeypatch):
    """The plan's largest bytes of arrays on each mesh, all devices together, are those of the run.

    Of the run as it is: a profile by itself keeps fragments apart that run as one.
    """
    monkeypatch.setattr(prepare, "_measured", lambda bound, bindings, compiled, options: measurer(compiled))
    job = JOBS[name]
    plan = planned(name)
    with job.mesh(devices_of(job)):
        model, optimizer = job.make()
        step = job.train_step(model)
        step(model, optimizer, tokens(job))  # then state is where it lives
        profile = step.program(model, optimizer, tokens(job)).profile(model, optimizer, tokens(job))
    assert len(plan.memory) == job.stages
    for memory in plan.memory:
        (mesh,) = memory.meshes
        assert memory.arrays * memory.devices == pytest.approx(profile.peak_bytes[mesh], rel=0.005)


@pytest.mark.slow
def test_what_the_bytes_are():
    """Adam keeps two of each weight; a gradient is one more; remat saves less; tensor parallelism halves."""
    plans = {name: planned(name) for name in ("lm", "remat", "tensor")}
    for plan in plans.values():
        for memory in plan.memory:
            weights = memory.peak_of["weights"]
            assert memory.peak_of["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
            assert memory.peak_of["gradients"] == pytest.approx(weights, rel=0.01)
            assert memory.total >= memory.arrays
            assert memory.total == sum(memory.at_peak.values())
    first = {name: plan.memory[0].peak_of for name, plan in plans.items()}
    assert first["remat"]["saved activations"] < first["lm"]["saved activations"] / 4
    assert first["tensor"]["weights"] == pytest.approx(first["lm"]["weights"] / 2, rel=0.02)


@pytest.mark.slow
def test_in_flight_microbatches_are_saved_activations():
    """1F1B keeps as many on a stage as there are stages from it on; GPipe keeps all."""
    one, all_of_them = (plan_here(small(batch=8, schedule=name)) for name in ("1f1b", "gpipe"))
    saved = lambda plan: plan.memory[0].peak_of["saved activations"]
    assert saved(all_of_them) == 8 / 2 * saved(one)


def test_what_is_not_donated_is_there_twice():
    job = small()
    with job.mesh(jax.devices()[:2]):
        model, optimizer = nnx.eval_shape(job.make)
        kept = mm.jit(job.train_step(model).__wrapped__, in_shardings=step_shardings(job, model))
        plan = mm.plan(kept, model, optimizer, tokens(job))
    for memory, less in zip(plan.memory, planned("lm").memory):
        state = memory.peak_of["weights"] + memory.peak_of["optimizer state"]
        once = less.peak_of["weights"] + less.peak_of["optimizer state"]
        assert state == pytest.approx(2 * once, rel=0.01)


def test_gradients_that_are_returned_are_gradients():
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(
            make(models.MLP), mm.TaskSharding({mm.path("layers", range(2)): tasks[0], ...: tasks[1]})
        )
        loss = nnx.value_and_grad(models.squared_error)
        step = mm.jit(lambda m, batch: mm.microbatch(loss, dim=0, size=2, argnum=1)(m, batch))
        plan = mm.plan(step, model, models.vectors())
    for n, memory in enumerate(plan.memory):
        own = jax.tree.leaves(nnx.state(model.layers[2 * n : 2 * n + 2]))
        assert memory.peak_of["gradients"] == pytest.approx(sum(x.nbytes for x in own), abs=16)  # the loss


def step_shardings(job, model):
    sharding = mm.pipeline_sharding(model, job.stages, rules=job.rules())
    return sharding, sharding, None


def test_results_in_place_are_counted_by_the_executables():
    plan = planned("lm")
    updates = [f for f in plan.fragments if f.phase == "none" and f.alias_bytes]
    assert len(updates) == 2
    for f in updates:
        assert f.alias_bytes > 0.9 * f.output_bytes
    assert dataclasses.asdict(updates[0])["alike"] in {f.name for f in plan.fragments}


@pytest.mark.slow
def test_copies_of_weights_in_another_type_are_weights(monkeypatch):
    """bfloat16 copies for all microbatches are half as large again; gradients stay as large as weights."""
    plain = plan_here(small())
    monkeypatch.setitem(PRESETS, "tiny", PRESETS["tiny"] | dict(dtype=jnp.bfloat16))
    cast = plan_here(small())
    for before, after in zip(plain.memory, cast.memory):
        assert after.peak_of["weights"] == pytest.approx(1.5 * before.peak_of["weights"], rel=0.15)
        assert after.peak_of["gradients"] == pytest.approx(before.peak_of["gradients"], rel=0.01)
