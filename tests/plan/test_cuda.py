"""Plans for GPUs that are not here, by their own compiler: `make test-cuda` installs it, and runs these."""

from __future__ import annotations

import jax
import pytest

import mmnnx as mm
from mmnnx.cli import main
from mmnnx.plan.chips import CHIPS
from mmnnx.plan.language_models import TrainingJob
from mmnnx.plan.targets import TPUS

pytestmark = pytest.mark.cuda

JOB = TrainingJob("tiny", "h100:1x8", stages=4, tensor=2, batch=8, sequence=128)


@pytest.fixture(scope="module")
def plan():
    return JOB.plan()


def test_it_fits_and_takes_its_time(plan):
    assert plan.device_kind == "NVIDIA H100 80GB HBM3" and plan.devices == 8 and plan.chip is CHIPS["h100"]
    assert plan.fits and 0 < plan.fastest < plan.seconds < 1
    for memory in plan.memory:
        weights = memory.peak_of["weights"]
        assert memory.peak_of["optimizer state"] == pytest.approx(2 * weights, rel=0.01)


def test_fragments_have_their_operations_though_the_compiler_counts_none(plan):
    """The stages in the middle are alike: their backwards are twice their forwards."""
    flops = {f.name: sum(f.flops.values()) for f in plan.fragments}
    assert flops["stage1 backward"] == pytest.approx(2 * flops["stage1 forward"])
    assert all(f.moved_bytes > 0 for f in plan.fragments if f.runs > 1)


def test_the_optimizer_overwrites_its_state(plan):
    updates = [f for f in plan.fragments if f.phase == "none" and f.alias_bytes]
    assert len(updates) == 4
    for f in updates:
        assert f.alias_bytes == pytest.approx(f.output_bytes, rel=0.05)


def test_alike_stages_are_compiled_once(plan):
    alike = {f.name: f.alike for f in plan.fragments}
    assert alike["stage1 forward"] == alike["stage2 forward"]


def test_tensor_parallelism_sums_over_its_axis(plan):
    (forward,) = (f for f in plan.fragments if f.name == "stage1 forward")
    assert {(c.kind, c.axes, c.devices) for c in forward.collectives} == {("all-reduce", ("model",), 2)}


def test_what_does_not_fit_is_an_answer():
    """The compiler of GPUs refuses nothing: the sum is compared with the memory."""
    plan = TrainingJob("tiny", "a100-40:1x2", stages=2, batch=2, sequence=65_536).plan()
    assert plan.fits is False
    assert "too much while" in str(plan) and "remat" in str(plan)


def test_every_gpu_of_the_table_compiles():
    for name in CHIPS.keys() - set(TPUS):
        plan = TrainingJob("tiny", f"{name}:1x2", stages=2, layers=2, batch=2, sequence=32).plan()
        assert plan.fits and plan.chip is CHIPS[name]


def test_hosts():
    devices = mm.target("h100:4x8")
    assert len(devices) == 32 and isinstance(devices[0], jax.Device)


def test_the_command(capsys):
    job = "--target h100:1x8 --model tiny-moe --stages 4 --tensor 2 --batch 8 --sequence 128 --remat"
    assert main(["plan", *job.split()]) == 0
    assert "train_step on 8 x NVIDIA H100 80GB HBM3: it fits" in capsys.readouterr().out
