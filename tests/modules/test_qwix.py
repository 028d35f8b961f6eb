"""Language models whose weights Qwix, of another project, has quantised."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx

import mmnnx as mm
from mmnnx.modules import LM, LMConfig, hf
from tests.mpmd.parity import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")  # it calls Flax in older ways

TOKENS = np.random.default_rng(0).integers(0, 64, (8, 9))
CONFIG = LMConfig(vocab=64, width=32, layers=2, heads=2, kv_heads=1, mlp=48)
PROVIDER = qwix.LoraProvider(module_path=".*(attention|mlp).*", rank=2, alpha=4.0, weight_qtype="int8")


def make():
    return LM(CONFIG, rngs=nnx.Rngs(0))


def adapted(model):
    tokens = jnp.zeros((1, 4), jnp.int32)
    return qwix.apply_lora_to_model(model, PROVIDER, tokens, methods=("loss",), rngs=nnx.Rngs(1))


def make_optimizer(model):
    return nnx.Optimizer(model, optax.sgd(0.5, momentum=0.9), wrt=nnx.LoRAParam)


def step_of(jit):
    @jit
    def step(model, optimizer, tokens):
        grad_fn = nnx.value_and_grad(lambda m, t: m.loss(t), argnums=nnx.DiffState(0, nnx.LoRAParam))
        loss, grads = mm.microbatch(grad_fn, dim=0, size=2, argnum=1, reduce="mean")(model, tokens)
        optimizer.update(model, grads)
        return loss, grads

    return step


@pytest.fixture(scope="module")
def mesh():
    return mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "model"), devices=jax.devices()[:4])


def placed(model):
    return mm.pipeline_sharding(model, stages=2, rules=mm.logical_rules("tensor"))


def test_low_rank_additions_over_eight_bits(mesh):
    """They learn what they learn whole, and the weights stay of eight bits, where they are."""
    whole = nnx.jit(adapted)(make())
    whole_state, whole_step = make_optimizer(whole), step_of(nnx.jit)
    with mesh:
        model = mm.jit(make, out_shardings=placed(nnx.eval_shape(make)))()
        model = mm.jit(adapted)(model)
        state, step = mm.jit(make_optimizer)(model), step_of(mm.jit)
        assert_same(model, whole)
        for _ in range(3):
            assert_same(step(model, state, TOKENS), whole_step(whole, whole_state, TOKENS), 1e-4)
        assert_same(model, whole, 1e-4)
        assert_same(state, whole_state, 1e-4)
        program = step.program(model, state, TOKENS)
    codes = model.blocks[1].mlp.up.kernel.array.qvalue
    assert codes.dtype == jnp.int8 and {d.id for d in codes.sharding.device_set} == {2, 3}
    kernels = {(CONFIG.width, CONFIG.mlp), (CONFIG.mlp, CONFIG.width)}
    kept = [v.aval.dtype for v, _ in program.values if v.aval.shape in kernels]
    assert kept == [jnp.int8] * 3 * CONFIG.layers


def test_published_checkpoints_have_no_names_for_them(tmp_path):
    model = nnx.eval_shape(adapted, nnx.eval_shape(make))
    with pytest.raises(ValueError, match=r"no name for blocks\.0\.attention\.key\.kernel\.array\.qvalue, .*"):
        hf.save(model, tmp_path / "quantised")
    assert not (tmp_path / "quantised").exists()
