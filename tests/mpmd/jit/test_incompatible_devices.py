"""A placed model outside of mm.jit: JAX's error gets one sentence more, on what to do."""

import numpy as np
import optax
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.modules import LM, EncoderDecoder, EncoderDecoderConfig, LMConfig, ViT, ViTConfig
from tests.mpmd.modes import Pair
from tests.mpmd.parity import born, pipeline, place
from tests.slow import few

X = np.ones((2, 4), np.float32)


def placed():
    mesh, tasks = pipeline(2)
    with mesh:
        return mesh, tasks, born(Pair, place(tasks, ["first"], [...]))


def loss(model, x):
    return (model(x) ** 2).sum()


def microbatched(model, x):
    return mm.microbatch(loss, dim=0, size=1, argnum=1)(model, x)


def notes(call):
    """Those of ours on the error that a call raises."""
    with pytest.raises(Exception, match="incompatible devices|DeviceAssignmentMismatch") as error:
        call()
    return [note for note in error.value.__notes__ if "mm.jit" in note]


CALLS = {
    "eagerly": lambda model: model(X),
    "nnx.grad": lambda model: nnx.grad(loss)(model, X),
    "nnx.jit": lambda model: nnx.jit(loss)(model, X),
    "nnx.jit in tree mode": lambda model: nnx.jit(loss, graph=False)(model, X),
    "nnx.jit of mm.jit": lambda model: nnx.jit(mm.jit(loss))(model, X),
    "nnx.grad of mm.jit": lambda model: nnx.grad(mm.jit(loss))(model, X),
    "nnx.grad of nnx.remat of mm.jit": lambda model: nnx.grad(nnx.remat(mm.jit(loss)))(model, X),
    "mm.microbatch": lambda model: microbatched(model, X),
    "mm.microbatch in nnx.jit": lambda model: nnx.jit(microbatched)(model, X),
    "mm.task": lambda model: mm.task(loss, "whole")(model, X),
    "nnx.Optimizer": lambda model: nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param).update(
        model, nnx.state(Pair(), nnx.Param)
    ),
}


@few(3)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_inside_of_a_multimesh(call):
    """Whatever raises it, with the tasks whose devices they are where there are some."""
    mesh, _, model = placed()

    def nested():
        with mesh, mesh:
            call(model)

    (note,) = notes(nested)
    if call is CALLS["nnx.jit"]:
        assert "[0] are those of task 'stage0'" in note and "[1] are those of task 'stage1'" in note
        assert "mm.jit(nnx.grad(f))" in note


@pytest.mark.parametrize("name", ["nnx.grad of mm.jit", "mm.microbatch", "mm.task"])
def test_where_none_is_current(name):
    """What mmnnx runs says it by itself."""
    assert len(notes(lambda: CALLS[name](placed()[2]))) == 1


SMALL = EncoderDecoderConfig(vocab=16, encoder_layers=1, decoder_layers=1, width=8, heads=2, mlp=8)
TOKENS = np.ones((2, 4), np.int32)
MODELS = {
    "LM": (
        lambda: LM(LMConfig(vocab=16, layers=2, width=8, heads=2, kv_heads=1, mlp=16), rngs=nnx.Rngs(0)),
        lambda model: model.loss(TOKENS),
    ),
    "EncoderDecoder": (
        lambda: EncoderDecoder(SMALL, rngs=nnx.Rngs(0)),
        lambda model: model(TOKENS, TOKENS),
    ),
    "ViT": (
        lambda: ViT(ViTConfig(image=4, patch=2, layers=2, width=8, heads=2, mlp=8), rngs=nnx.Rngs(0)),
        lambda model: model(np.ones((1, 4, 4, 3), np.float32)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_mmnnx(kind):
    make, call = MODELS[kind]
    mesh, _ = pipeline(2)
    model = nnx.eval_shape(make)
    blocks = ["blocks"] if hasattr(model, "blocks") else ["encoder.blocks", "decoder.blocks"]
    placement = mm.pipeline_sharding(model, 2, blocks)
    model = mm.jit(make, out_shardings=placement, mesh=mesh)()
    assert len(notes(lambda: call(model))) == 1


def test_other_errors_are_as_they_were():
    with pytest.raises(ValueError) as error, placed()[0]:
        raise ValueError("something else")
    assert not hasattr(error.value, "__notes__")
