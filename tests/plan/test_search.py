"""Estimates without a compiler, and searches that rank by them."""

from __future__ import annotations

import dataclasses

import pytest
from flax import nnx

from mmnnx.cli import main
from mmnnx.modules.build import build
from mmnnx.plan import search as searches
from mmnnx.plan.chips import CHIPS
from mmnnx.plan.estimate import estimate
from mmnnx.plan.language_models import TrainingJob, is_of_experts
from mmnnx.plan.search import search
from tests.slow import few

TINY = TrainingJob("tiny", "v5e:2x4", stages=1, batch=32, sequence=128)
LARGE = TrainingJob("llama3-70b", "v5p:4x4x8", stages=16, tensor=8, batch=32, remat=True)


@pytest.fixture
def eight_devices(monkeypatch):
    """A machine of so many, without its compiler."""
    monkeypatch.setattr(TrainingJob, "devices", lambda self: [None] * 8)


def test_an_estimate_is_near_what_the_compilers_plan_says():
    """Of llama3-70b on 128 v5p, which benchmarks/results/plan-llama3-70b.md has: 4.17 s, 16.3 GB.

    The estimate's device has the most weights, and the most saved activations: here no device has both.
    """
    found = estimate(LARGE)
    assert found.seconds == pytest.approx(4.17, rel=0.15)
    assert 1 <= found.memory / 16.3e9 < 1.3
    assert found.fits


@pytest.mark.slow
def test_what_more_of_each_brings():
    """More tensor parallelism computes less and sends more; more stages wait more; data keeps all weights."""
    base = estimate(dataclasses.replace(LARGE, stages=16, tensor=4, data=2))
    tensor = estimate(LARGE)
    assert tensor.memory < base.memory and tensor.sending > base.sending / 2
    few = estimate(dataclasses.replace(LARGE, stages=4, tensor=8, data=4, batch=128))
    many = estimate(dataclasses.replace(LARGE, stages=16, tensor=8, data=1, batch=128))
    assert many.memory < few.memory
    assert many.idle / many.seconds > few.idle / few.seconds
    without = estimate(dataclasses.replace(LARGE, remat=False))
    assert without.memory > 2 * tensor.memory and without.computing < tensor.computing
    context = estimate(dataclasses.replace(LARGE, tensor=4, context=2))
    assert context.memory < base.memory and context.sending < base.sending * 1.5
    fsdp = estimate(dataclasses.replace(LARGE, tensor=4, data=2, fsdp=True))
    assert fsdp.memory < base.memory and fsdp.sending == base.sending


def test_what_goes_from_host_to_host_of_gpus_takes_longer():
    """Of 2 x 8 GPUs: two stages, each on a host, or sums over all."""
    job = dataclasses.replace(LARGE, target="h100:2x8", stages=2, tensor=8)
    within, of_all = (
        estimate(dataclasses.replace(job, **sizes)) for sizes in ({}, dict(stages=1, tensor=16))
    )
    assert of_all.sending > 10 * within.sending
    two = dataclasses.replace(job, data=2, tensor=4)
    assert estimate(two).once < estimate(dataclasses.replace(two, stages=1, data=4)).once / 4


def test_schedules_by_their_simulation():
    jobs = {name: dataclasses.replace(LARGE, schedule=name) for name in ("gpipe", "1f1b", "zbv")}
    found = {name: estimate(job) for name, job in jobs.items()}
    assert found["zbv"].idle < found["1f1b"].idle == pytest.approx(found["gpipe"].idle, rel=0.01)
    assert found["gpipe"].memory > found["1f1b"].memory


def test_experts_are_counted_by_what_is_computed():
    dense, sparse = (estimate(dataclasses.replace(TINY, model=name)) for name in ("tiny", "tiny-moe"))
    assert sparse.computing > dense.computing and sparse.memory > dense.memory


@few(1)
@pytest.mark.parametrize("data", [1, 2])
def test_gradients_of_experts_are_summed_over_the_devices_that_have_the_same(data):
    """Each of four devices has two of mixtral's eight experts, and all have the other weights."""
    job = TrainingJob("mixtral-8x7b", "v5p:2x2x2", stages=1, data=data, expert=4, layers=4)
    state = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: build(job.config)), nnx.Param))
    experts = sum(4 * v.size for _, v in state if is_of_experts(v, job.config))
    others = sum(4 * v.size for _, v in state) - experts
    chip = CHIPS["v5p"]
    written = 8 * (others + experts / 4) / chip.bandwidth / chip.of_bandwidth  # weights, gradients, moments
    summed = others * (1 - 1 / (4 * data)) + experts / 4 * (1 - 1 / data)
    assert estimate(job).once == pytest.approx(written + 2 * summed / chip.link)


def test_fsdp_gathers_weights_once_and_each_device_gets_its_part_of_the_gradients():
    """llama3-8b, two blocks a stage: 425 ms by `TrainingJob.plan`, and 441 without FSDP."""
    job = TrainingJob("llama3-8b", "v5p:2x2x2", stages=2, data=4, batch=16, layers=4)
    whole, parts = estimate(job), estimate(dataclasses.replace(job, fsdp=True))
    assert parts.sending == whole.sending and parts.memory < whole.memory - 8e9  # 32.8 and 24.1 GB there
    assert whole.seconds - parts.seconds == pytest.approx(0.0163, rel=0.15)


def test_all_divisions_are_ranked(eight_devices):
    found = search(TINY, compile_best=0)
    assert found.best is None
    seconds = [e.seconds for e in found.estimates]
    assert seconds == sorted(seconds)
    jobs = [e.job for e in found.estimates]
    assert {j.stages * j.tensor * j.data for j in jobs} == {8}
    assert {j.stages for j in jobs} == {1, 2, 4} and {j.tensor for j in jobs} == {1, 2}
    assert {j.remat for j in jobs} == {False, True} and {"zbv", "1f1b"} <= {j.schedule for j in jobs}


def test_what_is_given_stays(eight_devices):
    found = search(dataclasses.replace(TINY, stages=2, schedule="gpipe"), ("stages", "schedule"), 0)
    assert {(e.job.stages, e.job.schedule) for e in found.estimates} == {(2, "gpipe")}
    assert len({e.job.tensor for e in found.estimates}) == 2


def test_what_sequences_and_experts_are_divided_over_stays(eight_devices):
    found = search(dataclasses.replace(TINY, model="tiny-moe", context=2, expert=2), compile_best=0)
    assert {e.job.stages * e.job.tensor * e.job.data for e in found.estimates} == {2}
    with pytest.raises(ValueError, match="8 devices, which 3 along context x 1 along expert do not divide"):
        search(dataclasses.replace(TINY, context=3, sequence=96))


def test_what_does_not_fit_is_counted(eight_devices):
    huge = TrainingJob("llama3-70b", "v5e:2x4", stages=1, batch=32, sequence=4096)
    found = search(huge, compile_best=3)
    assert not found.estimates and not found.compiled
    assert found.refused["more memory than a device has"] > 100
    assert all(e.memory <= CHIPS["v5e"].memory for e in found.estimates)


def test_a_job_that_cannot_be_compiled_is_named(eight_devices, monkeypatch):
    def refuse(self):
        raise ValueError("no such thing")

    monkeypatch.setattr(TrainingJob, "plan", refuse)
    found = search(TINY, compile_best=2)
    assert [c.error for c in found.compiled] == ["no such thing"] * 4 and found.best is None  # twice as many
    lines = searches._why(found)
    assert lines[0].startswith("not possible, ") and lines[-1] == "None that was compiled fits."


def test_a_file_of_another_kind_is_refused_before_anything_is_compiled(monkeypatch, capsys):
    monkeypatch.setattr(TrainingJob, "plan", lambda self: pytest.fail("it was compiled"))
    options = "--target v5e:2x4 --model tiny --stages 4 --tensor 2 --batch 8 --save plan.txt"
    assert main(["plan", *options.split()]) == 2
    assert "plan.txt: the file name of a plan must end in .json, .html" in capsys.readouterr().err


def test_nothing_fits_and_nothing_is_written(eight_devices, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = "--search --target v5e:2x4 --model llama3-70b --stages 1 --json it.json --save it.html"
    assert main(["plan", *options.split()]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "No plan fits.",
        "it.json is not written: there is no plan",
        "it.html is not written: there is no plan",
    ]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_told_before_anything_is_compiled(monkeypatch, capsys):
    monkeypatch.setattr(TrainingJob, "plan", lambda self: pytest.fail("it was compiled"))
    assert main(["plan", *["--target", "v5e:2x4", "--model", "tiny", "--save", "nowhere/plan.html"]]) == 2
    assert "nowhere/plan.html: there is no folder nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_compiles_the_best(capsys):
    options = "--search --target v5e:2x4 --model tiny --batch 16 --sequence 64 --compile-best 2"
    assert main(["plan", *options.split(), "--tensor", "2", "--layers", "2"]) == 0
    printed = capsys.readouterr().out
    assert "plans; left out:" in printed and "Best: " in printed
    assert "train_step on 8 x TPU v5 lite: it fits" in printed
