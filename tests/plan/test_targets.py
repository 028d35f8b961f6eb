"""Machines by name; what is wrong with a name, or missing, is said."""

from __future__ import annotations

import dataclasses
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.modules.build import build
from mmnnx.plan import targets
from mmnnx.plan.chips import CHIPS, chip_of
from mmnnx.plan.language_models import TrainingJob, rules_of


@pytest.mark.parametrize(
    "name, message",
    [
        ("v9:4x4", "there is no target 'v9:4x4': the chips are 'v4', 'v5e', 'v5p'"),
        ("v5p", "the topology of v5p is 3 numbers, as in 'v5p:4x4x4'"),
        ("v5p:4x4", "the topology of v5p is 3 numbers, as in 'v5p:4x4x4'"),
        ("v5e:4x4x4", "the topology of v5e is 2 numbers, as in 'v5e:4x4'"),
        ("v5e:0x4", "the topology of v5e is 2 numbers"),
        ("h100:8", "a GPU has hosts x GPUs of each, as in 'h100:4x8'"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ValueError, match=message):
        mm.target(name)


def test_what_is_no_name():
    with pytest.raises(TypeError, match='mm.target takes a name such as "v5e:2x4", not None'):
        mm.target(None)


@pytest.mark.parametrize("name, extra", [("v5e:2x4", "tpu"), ("h100:4x8", "cuda12")])
def test_a_compiler_that_is_missing(name, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install 'mmnnx\[{extra}\]'"):
        mm.target(name)


def test_figures_are_complete():
    for name, chip in CHIPS.items():
        assert chip.name == name and chip.source
        assert {"bfloat16", "float32"} <= chip.flops.keys()
        assert chip.seconds({"bfloat16": chip.flops["bfloat16"], "float8_e4m3fn": 0}) == pytest.approx(1)
        assert chip.seconds({"float16": 1e12}) == chip.seconds({"bfloat16": 1e12})


def test_figures_are_those_of_a_device():
    assert chip_of(mm.target("v5e:2x2")[0]) is CHIPS["v5e"] and chip_of(jax.devices()[0]) is None


@pytest.mark.parametrize("config, count", [("default", 8), ("megacore", 4)])
def test_the_cores_of_a_v4_may_be_one_device(config, count):
    """Four chips of 32 GiB and 275 TFLOP/s; of either kind of devices `device_kind` is the same."""
    devices = topologies.get_topology_desc("v4:2x2x1", "tpu", chip_config_name=config).devices
    assert len(devices) == count and {d.device_kind for d in devices} == {"TPU v4"}
    found = chip_of(devices[0])
    assert count * found.flops["bfloat16"] == 4 * 275e12 and count * found.bandwidth == 4 * 1228e9
    assert 30 <= count / 4 * found.memory / 2**30 < 32


def test_a_gpu_in_the_words_of_xla():
    for name in CHIPS.keys() - set(targets.TPUS):
        text = targets.gpu_description(CHIPS[name])
        assert f"memory_bandwidth: {int(CHIPS[name].bandwidth)}" in text
        assert text.count("{") == text.count("}")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(model="lama"), "there is no model 'lama': there are 'llama3-8b'"),
        (
            dict(batch=3, data=2),
            r"a batch of 3 .* not divisible into microbatches of 2 \(1 rows x 2 .*: 2 or 4 would be",
        ),
        (dict(stages=5), "tiny has 4 blocks, too few for 5 stages"),
        (dict(rows=0), "rows must be at least 1, not 0"),
        (dict(interleave=0), "interleave must be at least 1, not 0"),
        (dict(attention="cudnn", target="v6e:2x4"), "'cudnn' is for GPUs, and v6e is a TPU: leave it out"),
        (
            dict(attention="cudnn", target="h100:1x8", context=2),
            "takes whole sequences, which 2 along context",
        ),
        (dict(context=3), "a sequence of 4096 tokens is not divisible over 3 along context"),
        (dict(expert=2), "tiny has no experts to divide over 2 along expert"),
        (dict(model="tiny-moe", expert=3, batch=3), "has 4 experts, not divisible over 3 along expert"),
    ],
)
def test_jobs_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingJob(**{"model": "tiny", "target": "cpu"} | options)


def test_another_number_of_devices():
    job = TrainingJob("tiny", "cpu", stages=2, tensor=2)
    with pytest.raises(ValueError, match="cpu has 8 devices, and stages x data x tensor = 2 x 1 x 2 = 4"):
        job.mesh(jax.devices())


def test_the_axes_of_a_mesh():
    job = TrainingJob("tiny-moe", "cpu", stages=2, context=2, expert=2, batch=8)
    assert job.mesh(jax.devices()).axis_names == ("stage", "data", "context", "expert", "model")
    assert (job.microbatches, job.config.attention) == (4, "ring")
    said = "stages x data x context x expert x tensor = 2 x 1 x 4 x 2 x 1 = 16"
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(job, context=4).mesh(jax.devices())


@pytest.mark.parametrize(
    ("axes", "changes", "spec"),
    [
        (dict(model=4), {}, P(None, None, "model")),  # 3,584 hidden features each
        (dict(model=8), dict(experts=6, mlp=4096), P(None, None, "model")),  # 512, of too few experts
        (dict(model=4), dict(mlp=3584), P("model", None, None)),
        (dict(model=4), dict(capacity_factor=1.0), P("model", None, None)),
        (dict(model=4, expert=2), {}, P("expert", None, "model")),
        (dict(model=1), {}, P(None, None, None)),
    ],
)
def test_what_is_divided_of_experts(axes, changes, spec):
    job = TrainingJob("mixtral-8x7b", "cpu", stages=1, layers=1)
    config = dataclasses.replace(job.config, **changes)
    model = nnx.eval_shape(lambda: build(config))
    sizes, names = (1, *axes.values()), ("stage", *axes)
    devices = jax.devices()[: math.prod(sizes)]
    with mm.MultiMesh(axis_sizes=sizes, axis_names=names, devices=np.reshape(devices, sizes)):
        placement = mm.pipeline_sharding(model, stages=1, rules=rules_of(config, axes, fsdp=False))
        found = placement.lookup(("blocks", 0, "mlp", "gate"), model.blocks[0].mlp.gate)
    assert found.sharding.spec == spec


def test_devices_of_two_platforms_may_have_the_same_number():
    """They are two meshes, though each platform numbers its own from 0."""
    devices = np.array([jax.devices()[0], mm.target("v5e:2x2")[0]])
    assert devices[0].id == devices[1].id
    mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=devices)
    with mesh:
        tasks = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(2)]
        placed = tuple(NamedSharding(task.to_mesh(), P()) for task in tasks)
        program = mm.jit(lambda a, b: jnp.sin(a) + b, in_shardings=placed).program(
            *[jax.ShapeDtypeStruct((8,), jnp.float32)] * 2
        )
    assert len(program.names) == 2 and len(program.transfers) == 1
