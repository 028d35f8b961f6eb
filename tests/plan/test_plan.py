"""What a plan says and draws."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.plan import planning
from mmnnx.plan.chips import CHIPS
from mmnnx.plan.collectives import Collective
from mmnnx.plan.fragments import FragmentCost
from mmnnx.plan.operations import Operation
from tests.plan.conftest import plan_here, small


@pytest.fixture(scope="module")
def on_tpu():
    """The same as on `plan`'s CPU devices, as if they were TPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "chip_of", lambda device: CHIPS["v5e"])
        yield plan_here(small(batch=8))


@pytest.mark.slow
def test_what_it_prints(plan, on_tpu):
    assert str(plan).startswith("train_step on 2 x cpu: no figures of such devices are known")
    assert plan.fits is None and plan.seconds is None
    text = str(on_tpu)
    assert text.startswith("train_step on 2 x cpu: it fits\nstep ")
    for word in ("stage0", "stage1 forward and stage1 backward", "optimizer", "bound by"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 140


@pytest.mark.slow
def test_times(on_tpu):
    chip = CHIPS["v5e"]
    assert 0 < on_tpu.fastest < on_tpu.seconds
    assert on_tpu.timeline.unit == "s"
    slowest = max(f.runs * f.seconds(chip) for f in on_tpu.fragments)
    assert on_tpu.seconds > slowest
    assert 0 < on_tpu.utilization < 1
    work = small(batch=8)
    assert on_tpu.flops == pytest.approx(work.model_flops(), rel=0.35)  # it counts scores that a mask hides


def test_a_roofline_of_each_operation():
    chip = CHIPS["v5e"]
    second, bandwidth = chip.flops["bfloat16"], int(chip.bandwidth)
    products = (
        Operation({"bfloat16": second}, bandwidth // 10),  # bound by computing
        Operation({"bfloat16": second / 20}, bandwidth // 10, runs=2),  # by moving
        Operation({}, bandwidth // 100),
    )
    cost = FragmentCost(
        name="f",
        mesh="m",
        phase="forward",
        runs=1,
        argument_bytes=0,
        output_bytes=0,
        alias_bytes=0,
        temporary_bytes=0,
        operations=products,
        collectives=(Collective("all-gather", ("model",), 4, int(120e9), 1),),
        values=(),
        uncounted_loops=(),
        iterations_on_values=0,
        alike="f",
    )
    compute, memory, links = cost.parts(chip)
    assert compute == pytest.approx(1 / 0.8) and memory == pytest.approx(0.21 / 0.9)
    assert links == pytest.approx(1.0, 1e-3)
    assert cost.seconds(chip) == compute + memory + links
    assert cost.fastest(chip) == pytest.approx(1.1) and cost.bound(chip) == "compute"
    waits = dataclasses.replace(cost, iterations_on_values=10)
    assert waits.seconds(chip) == cost.seconds(chip)  # a TPU asks nobody whether a loop goes on
    assert waits.seconds(CHIPS["h200"]) - cost.seconds(CHIPS["h200"]) == pytest.approx(250e-6)
    # A copy beside them has the bandwidth while they compute, and delays what it does not get done by then.
    for copied, later in ((bandwidth // 2, 0), (2 * bandwidth, (0.31 + 2) / 0.9 - 1 / 0.8 - 0.21 / 0.9)):
        more = dataclasses.replace(cost, operations=(*products, Operation({}, copied, beside=True)))
        assert more.seconds(chip) == pytest.approx(cost.seconds(chip) + later)


@pytest.mark.slow
def test_files(on_tpu, tmp_path):
    for suffix in ("json", "html", "svg", "png"):
        on_tpu.save(tmp_path / f"plan.{suffix}")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["fits"] and data["devices"] == 2
    assert {m["meshes"][0] for m in data["memory"]} == {"stage0", "stage1"}
    assert "stage1 forward and stage1 backward" in (tmp_path / "plan.html").read_text()
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="must end in .json, .html, .executables, .svg"):
        on_tpu.save(tmp_path / "plan.txt")


def test_too_little_memory_is_an_answer(plan, monkeypatch):
    chip = dataclasses.replace(CHIPS["v5e"], memory=plan.memory[0].total - 1000)
    found = dataclasses.replace(plan, chip=chip)
    assert found.fits is False
    text = str(found)
    assert "it does not fit" in text
    assert "stage0: 1,000 B too much while " in text or "stage0: 1.0 KB too much while " in text
    assert "What helps: fewer rows" in text


def test_what_cannot_be_planned(monkeypatch):
    with pytest.raises(TypeError, match="mm.plan takes a function that mm.jit made, not <function"):
        mm.plan(lambda x: x, 1.0)
    with pytest.raises(ValueError, match="all of double is on one TaskMesh, and runs as one XLA program"):

        @mm.jit
        def double(x):
            return 2 * x

        mm.plan(double, jnp.ones(3))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="a step is planned in one process"):
        mm.plan(double, jnp.ones(3))


def test_nothing_runs_and_arguments_keep_their_values():
    job = small()
    with job.mesh(jax.devices()[:2]):
        model, optimizer = job.make()
        before = jax.tree.map(lambda x: x.copy(), nnx.state(model))
        mm.plan(job.train_step(model), model, optimizer, jnp.ones((4, 17), jnp.int32))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, nnx.state(model))
    assert all(jax.tree.leaves(same))


def test_of_many_notes_the_first_are_shown(plan):
    said = str(dataclasses.replace(plan, notes=tuple(f"number {n}" for n in range(20))))
    assert "note: number 7" in said and "number 8" not in said and "and 12 more" in said
