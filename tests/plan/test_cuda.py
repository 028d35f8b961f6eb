"""Plans for GPUs that are not here, by their own compiler: `make test-cuda` installs it, and runs these."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.cli import main
from mmnnx.modules.build import build
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


def test_what_needs_a_gpu_to_be_compiled_is_not_kept(tmp_path):
    """cuDNN makes its graphs on one: forwards and backwards with its attention are compiled there."""
    sizes = dict(stages=2, layers=2, batch=2, sequence=256)
    for attention in ("xla", "cudnn"):
        plan = TrainingJob("llama3.2-1b", "h100:1x2", attention=attention, **sizes).plan()
        expected = contextlib.nullcontext() if attention == "xla" else pytest.warns(match="which call cuDNN")
        with expected:
            plan.save(tmp_path / "step.executables")
        _, found = pickle.loads((tmp_path / "step.executables").read_bytes())
        kept = [f for f in plan.fragments if f.alike == f.name and (attention == "xla" or f.phase == "none")]
        assert len(found) == len(kept) > 0
        assert {kind for kind, _ in found.values()} == {"NVIDIA H100 80GB HBM3"}


def test_what_cudnn_refuses():
    job = TrainingJob("llama3.2-1b", "h100:1x4", stages=2, data=2, layers=2, batch=2, attention="cudnn")
    model, tokens = nnx.eval_shape(lambda: build(job.config)), jax.ShapeDtypeStruct((2, 64), jnp.int32)
    with job.mesh():
        placement = mm.pipeline_sharding(model, stages=2, rules=mm.logical_rules(sequence="data"))
        call = mm.jit(lambda model, x: model(x), in_shardings=(placement, P(None, "data")))
        with pytest.raises(RuntimeError, match="refuses stage0: ValueError: Sharding on sequence dim is"):
            mm.plan(call, model, tokens)


def test_hosts():
    devices = mm.target("h100:4x8")
    assert len(devices) == 32 and isinstance(devices[0], jax.Device)


def test_the_command(capsys):
    job = "--target h100:1x8 --model tiny-moe --stages 4 --tensor 2 --batch 8 --sequence 128 --remat"
    assert main(["plan", *job.split()]) == 0
    assert "train_step on 8 x NVIDIA H100 80GB HBM3: it fits" in capsys.readouterr().out


PYTHON = """
import mmnnx as mm
devices = mm.target("h100:1x2")
import jax
print(len(devices), jax.devices()[0].platform)
"""


@pytest.mark.parametrize(
    "command, said",
    [
        (
            [
                "-m",
                "mmnnx",
                "plan",
                *["--target", "h100:1x2", "--model", "tiny", "--stages", "2", "--batch", "2"],
            ],
            "it fits",
        ),
        (["-c", PYTHON], "2 cpu"),
    ],
)
def test_without_a_word_on_platforms(command, said):
    """On a machine without a GPU JAX's plugin would not start, if it is not told that there is none."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run([sys.executable, *command], env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
