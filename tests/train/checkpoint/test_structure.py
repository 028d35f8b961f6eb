"""State that is not the checkpoint's: what is told, what is taken all the same, and stacks of layers."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.modules import LM, LMConfig
from mmnnx.modules.stack import Stack
from mmnnx.train.checkpoint import CheckpointError, Checkpoints, StructureError
from tests.train.states import assert_equal, values


class Model(nnx.Module):
    def __init__(self, seed=0, *, layers=3, width=4, dtype=jnp.float32, head="head", extra=False):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List(nnx.Linear(width, width, rngs=rngs, param_dtype=dtype) for _ in range(layers))
        setattr(self, head, nnx.Linear(width, 2, rngs=rngs))
        if extra:
            self.adapter = nnx.LoRA(width, 1, width, rngs=rngs)


def adam(model):
    return nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@pytest.fixture
def saved(tmp_path):
    model = Model()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model, "optimizer": adam(model)})
    return Checkpoints(tmp_path), model


def refused(checkpoints, nodes, **options) -> str:
    """The message; nothing is read, and nothing changes."""
    before = values(nodes)
    with pytest.raises(StructureError) as error:
        checkpoints.restore(nodes, **options)
    assert_equal(before, values(nodes))
    return str(error.value)


def test_the_model_alone(saved):
    """For evaluation, or to train it on with another optimizer."""
    checkpoints, model = saved
    other = Model(1)
    checkpoints.restore({"model": other})
    assert_equal(values({"model": model}), values({"model": other}))


def test_everything_that_differs_in_one_message(saved):
    checkpoints, _ = saved
    told = refused(checkpoints, {"model": Model(layers=4, head="haed", extra=True)})
    assert "not in the checkpoint: model.layers.3 (2 arrays)" in told
    assert "not in the checkpoint: model.haed (2 arrays); did you mean model.head?" in told
    assert "not in the checkpoint: model.adapter (2 arrays)" in told
    assert "only in the checkpoint: model.head (2 arrays)" in told
    assert f"that in {checkpoints.folder / '1'}" in told and "partial=True" in told
    told = refused(checkpoints, {"model": Model(layers=2)})
    assert "only in the checkpoint: model.layers.2 (2 arrays)" in told and "not in the" not in told
    told = refused(checkpoints, {"model": Model(width=8)})
    assert (
        "other shape: model.layers.*.kernel is float32[8,8], in the checkpoint float32[4,4], 3 times" in told
    )
    assert "other shape: model.head.kernel is float32[8,2], in the checkpoint float32[4,2]" in told
    told = refused(checkpoints, {"model": Model(dtype=jnp.bfloat16)})
    assert "other dtype: model.layers.*.bias is bfloat16, in the checkpoint float32, 3 times" in told
    told = refused(checkpoints, {"net": Model(), "model": Model()})
    assert "there is no 'net' in it; it holds 'model', 'optimizer'" in told


def test_another_optimizer(saved):
    checkpoints, model = saved
    lion = nnx.Optimizer(model, optax.lion(1e-3), wrt=nnx.Param)
    told = refused(checkpoints, {"model": model, "optimizer": lion})
    assert "this is not the optimizer that was saved" in told
    assert "only in the checkpoint: optimizer.opt_state.0.nu (8 arrays)" in told
    with pytest.raises(StructureError) as error:
        checkpoints.restore({"optimizer": nnx.Optimizer(model, optax.sgd(1.0, momentum=0.9), wrt=nnx.Param)})
    assert ("optimizer", "opt_state", "0", "trace", "head", "bias") in error.value.differences.missing


def test_partial(saved):
    """What fits by path, shape and dtype is taken; the rest stays, and is returned."""
    checkpoints, model = saved
    other = Model(1, layers=4, extra=True)
    before = values({"model": other})
    left = checkpoints.restore({"model": other}, partial=True).left
    after, expected = values({"model": other}), values({"model": model})
    new = {"model/layers/3/kernel", "model/layers/3/bias", "model/adapter/lora_a", "model/adapter/lora_b"}
    assert {"/".join(path) for path in left.missing} == new and not (left.extra or left.shapes or left.dtypes)
    assert_equal({k: v for k, v in after.items() if k not in new}, expected)
    assert_equal({k: after[k] for k in new}, {k: before[k] for k in new})
    wide = Model(1, width=8)
    left = checkpoints.restore({"model": wide}, partial=True).left
    assert left.shapes["model", "layers", "0", "bias"] == ("float32[8]", "float32[4]")
    np.testing.assert_array_equal(wide.head.bias[...], model.head.bias[...])


@pytest.mark.parametrize(
    "rename",
    [
        {"model/head": "net/out", "model": "net"},  # the longest prefix counts
        {"model.head": "net.out", "model": "net"},
        lambda name: name.replace("model/", "net/").replace("/head/", "/out/"),
        lambda name: name.replace("/", ".").replace("model.", "net.").replace(".head.", ".out."),
    ],
)
def test_rename(saved, rename):
    checkpoints, model = saved
    other = Model(1, head="out")
    checkpoints.restore({"net": other}, rename=rename)
    np.testing.assert_array_equal(other.out.kernel[...], model.head.kernel[...])
    np.testing.assert_array_equal(other.layers[2].kernel[...], model.layers[2].kernel[...])


def test_renames_that_make_no_sense(saved):
    checkpoints, _ = saved
    with pytest.raises(CheckpointError, match=r"does not hold: model\.tail"):
        checkpoints.restore({"model": Model()}, rename={"model/tail": "model/head"})
    with pytest.raises(
        CheckpointError, match=r"both model\.layers\.\d\.bias and .* the name model\.layer\.bias"
    ):
        checkpoints.restore({"model": Model()}, rename=lambda name: re.sub(r"layers/\d", "layer", name))
    checkpoints.restore({"model": Model()}, rename={})
    for rename in ([("model", "net")], {1: "net"}, {"model": 2}):
        with pytest.raises(TypeError, match=r"rename= is .*, or a function from path to path, not"):
            checkpoints.restore({"model": Model()}, rename=rename)
    with pytest.raises(
        TypeError, match=r"gives model\..* the name None: return a path, the same one to keep it"
    ):
        checkpoints.restore({"model": Model()}, rename=lambda name: None)


# Layers stacked for scan

FORMS = {"list": 0, "one": 1, "three": 3}


class Stacking(nnx.Module):
    """Six layers, in a list or in segments of a stack."""

    def __init__(self, seed: int, segments: int, layers: int = 6):
        rngs = nnx.Rngs(seed)
        make = lambda rngs: nnx.Linear(2, 3, rngs=rngs)
        if segments:
            self.blocks = Stack(make, layers, segments=segments, rngs=rngs)
        else:
            self.blocks = nnx.List(make(rngs) for _ in range(layers))


def stacking(form, seed=0):
    model = Stacking(seed, FORMS[form])
    return {"model": model, "optimizer": adam(model)}


@pytest.mark.slow
def test_stacked_and_unstacked_layers(tmp_path):
    """Parameters and moments, each form into each, to the last bit; segments of other lengths too."""
    nodes = {form: stacking(form) for form in FORMS}
    model = nodes["list"]["model"]
    grads = nnx.grad(lambda model: sum((block.kernel[...] ** 2).sum() for block in model.blocks))(model)
    nodes["list"]["optimizer"].update(model, grads)
    for form in FORMS:
        with Checkpoints(tmp_path / form) as checkpoints:
            if form != "list":
                Checkpoints(tmp_path / "list").restore(nodes[form])
            checkpoints.save(1, nodes[form])
    held = {form: values(nodes[form]) for form in FORMS}
    for slot in ("model", "optimizer/opt_state/0/mu", "optimizer/opt_state/0/nu"):
        kernel = held["three"][f"{slot}/blocks/segments/1/layers/kernel"]
        assert kernel.shape == (2, 2, 3) and kernel.all()
        for row in range(2):
            np.testing.assert_array_equal(kernel[row], held["list"][f"{slot}/blocks/{2 + row}/kernel"])
    for form in FORMS:
        for to in FORMS:
            other = stacking(to, seed=1)
            assert not Checkpoints(tmp_path / form).restore(other).left
            assert_equal(held[to], values(other))


def test_layers_that_are_too_few_or_too_many(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": Stacking(0, 3)})
    five = Stacking(1, 0, layers=5)
    told = refused(Checkpoints(tmp_path), {"model": five})
    assert (
        "only in the checkpoint: model.blocks.segments.2.layers.kernel float32[2,2,3], layers 1 of it" in told
    )
    told = refused(Checkpoints(tmp_path), {"model": Stacking(1, 2, layers=8)})
    assert "other shape: model.blocks.segments.1.layers.kernel is float32[4,2,3]" in told
    left = Checkpoints(tmp_path).restore({"model": five}, partial=True).left
    assert set(left.extra) == {("model", "blocks", "segments", "2", "layers", n) for n in ("kernel", "bias")}
    last = Stacking(0, 3).blocks.segments[2].layers
    np.testing.assert_array_equal(five.blocks[4].kernel[...], last.kernel[0])


def test_segments_that_are_as_long_and_begin_elsewhere(tmp_path):
    def make(seed, segments):
        return Stack(lambda rngs: nnx.Linear(2, 2, rngs=rngs), 6, segments=segments, rngs=nnx.Rngs(seed))

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"stack": make(0, (1, 2, 3))})
    other = make(1, (3, 2, 1))  # the middle ones are as long as each other
    Checkpoints(tmp_path).restore({"stack": other})
    assert_equal(values({"stack": make(0, (3, 2, 1))}), values({"stack": other}))


def test_layers_of_ones_own_vmap(tmp_path):
    """Rows of `layers/kernel`, against `layers/3/kernel`; keys and counters of dropout with them."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    class Stacked(nnx.Module):
        def __init__(self, seed):
            self.layers = nnx.vmap(Layer)(nnx.Rngs(seed).split(4))

    class Listed(nnx.Module):
        def __init__(self, seed):
            self.layers = nnx.List(Layer(nnx.Rngs(seed + i)) for i in range(4))

    for first, second in ((Stacked, Listed), (Listed, Stacked)):
        node, other, back = first(0), second(10), first(20)
        with Checkpoints(tmp_path / first.__name__) as checkpoints:
            checkpoints.save(1, {"m": node})
            checkpoints.restore({"m": other})
            checkpoints.save(2, {"m": other})
            checkpoints.restore({"m": back})
        assert_equal(values({"m": node}), values({"m": back}))
        stacked, listed = (node, other) if first is Stacked else (other, node)
        np.testing.assert_array_equal(stacked.layers.linear.kernel[2], listed.layers[2].linear.kernel[...])
        np.testing.assert_array_equal(
            jax.random.key_data(stacked.layers.dropout.rngs.key.get_raw_value()[3]),
            jax.random.key_data(listed.layers[3].dropout.rngs.key.get_raw_value()),
        )


def test_a_stack_on_stages_of_two_devices_out_of_a_list_on_one(tmp_path):
    """A language model: each device reads its part of the rows of its own stage."""
    config = LMConfig(vocab=16, layers=6, width=8, heads=2, kv_heads=2, mlp=16)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: LM(config, rngs=nnx.Rngs(0))))
    draw = np.random.default_rng(0)
    drawn = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), state)
    listed = nnx.merge(graphdef, drawn)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": listed})
    model = nnx.eval_shape(lambda: LM(dataclasses.replace(config, scan=3), rngs=nnx.Rngs(0)))
    mesh = mm.MultiMesh(axis_sizes=(3, 2), axis_names=("stage", "model"))
    sharding = mm.pipeline_sharding(model, stages=3, rules=mm.logical_rules("tensor"))
    with mesh:
        Checkpoints(tmp_path).restore({"model": model}, sharding=sharding)
    up = model.blocks.segments[1].layers.mlp.up.kernel.get_raw_value()
    assert up.sharding.device_set == set(jax.devices()[2:4])
    assert {shard.data.shape for shard in up.addressable_shards} == {(2, 8, 8)}
    np.testing.assert_array_equal(up[1], listed.blocks[3].mlp.up.kernel[...])
