"""Low-rank additions: the same results at first, where their layers live, and alone in what is trained."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.modules import LM, LMConfig, LoRALinear, MoELM, MoELMConfig, lora

SIZES = dict(vocab=32, layers=3, width=16, heads=4, kv_heads=2, mlp=32)
TOKENS = np.arange(64).reshape(4, 16) % 32


def make(scan: bool = False):
    model = LM(LMConfig(**SIZES, scan=scan), rngs=nnx.Rngs(0))
    draw = np.random.default_rng(0)
    return nnx.merge(
        *(
            jax.tree.map(lambda x: x + 0.1 * draw.normal(size=x.shape), s) if n else s
            for n, s in enumerate(nnx.split(model))
        )
    )


def mesh():
    return mm.MultiMesh(axis_sizes=(2, 2), axis_names=("stage", "model"))


def placed(scan: bool):
    model = make(scan)
    sharding = mm.pipeline_sharding(model, 2, rules=mm.logical_rules("tensor"))
    return mm.jit(nnx.clone, out_shardings=sharding)(model)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_the_same_at_first_and_where_the_layers_live(scan):
    """Also where the kernels are a DividedArray: one layer and two."""
    expected = make(scan)(TOKENS)
    with mesh():
        model = lora(placed(scan), 2)
    layers = [m for _, m in nnx.iter_modules(model) if isinstance(m, LoRALinear)]
    assert len(layers) == 7 * (1 if scan else 3) and not isinstance(model.head, LoRALinear)
    for layer in layers:
        kernel, a, b = (v.get_raw_value() for v in (layer.kernel, layer.lora_a, layer.lora_b))
        assert isinstance(a, mm.DividedArray) == isinstance(kernel, mm.DividedArray) == scan
        assert a.sharding.device_set == kernel.sharding.device_set
        if not scan:
            inputs, outputs = (*kernel.sharding.spec, None, None)[:2]
            assert (a.sharding.spec, b.sharding.spec) == (P(inputs, None), P(None, outputs))
    with mesh():
        logits = mm.fetch(mm.jit(lambda model, tokens: model(tokens))(model, TOKENS))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_trained_over_stages_as_on_one_device(scan):
    def train(model, jit, loop):
        optimizer = jit(lambda model: nnx.Optimizer(model, optax.sgd(0.5, momentum=0.9), wrt=nnx.LoRAParam))(
            model
        )

        @jit
        def step(model, optimizer, tokens):
            own = nnx.DiffState(0, nnx.LoRAParam)
            loss, grads = loop(nnx.value_and_grad(lambda m, t: m.loss(t), argnums=own))(model, tokens)
            optimizer.update(model, grads)
            return loss

        return [float(step(model, optimizer, TOKENS)) for _ in range(3)], optimizer

    whole = lora(make(scan), 2)
    kept = jax.tree.map(np.asarray, nnx.state(whole, nnx.Not(nnx.LoRAParam)))
    expected, optimizer = train(whole, nnx.jit, lambda fun: fun)
    assert expected[-1] < expected[0]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(whole, nnx.Not(nnx.LoRAParam)), kept)
    additions = len(jax.tree.leaves(nnx.state(whole, nnx.LoRAParam)))
    assert len(jax.tree.leaves(nnx.state(optimizer))) == additions + 1  # a moment of each, and a count
    with mesh():
        loop = lambda fun: mm.microbatch(fun, dim=0, size=2, argnum=1, reduce="mean")
        found, _ = train(lora(placed(scan), 2), mm.jit, loop)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_chosen_layers_and_abstract_models():
    model = lora(nnx.eval_shape(make), 3, mm.path(..., {"query", "value"}), alpha=1.0)
    chosen = [path for path, m in nnx.iter_modules(model) if isinstance(m, LoRALinear)]
    assert {path[-1] for path in chosen} == {"query", "value"} and len(chosen) == 6
    a = model.blocks[0].attention.query.lora_a
    assert a.get_raw_value() == jax.ShapeDtypeStruct((16, 3), jnp.float32)
    assert a.get_metadata("out_sharding") == ("embed", None)
    first, again = (lora(make(), 2, seed=1), lora(make(), 2, seed=1))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(first), nnx.state(again))
    values = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(first, nnx.LoRAParam))]
    assert len({x.tobytes() for x in map(np.asarray, values) if x.any()}) == 21  # each layer its own


def test_experts_keep_their_router():
    model = lora(MoELM(MoELMConfig(**SIZES, experts=2), rngs=nnx.Rngs(0)), 2)
    names = {path[-1] for path, m in nnx.iter_modules(model) if isinstance(m, LoRALinear)}
    assert names == {"query", "key", "value", "out"}


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="rank=0"):
        lora(make(), 0)
    with pytest.raises(ValueError, match="the linear layers are called down, gate, head, key, out"):
        lora(make(), 2, mm.path(..., "dense"))
    with pytest.raises(ValueError, match=r"blocks.0.attention.key has an addition already"):
        lora(lora(make(), 2), 2)


def test_a_layer_in_several_places_stays_one():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.others = nnx.List([self.first, nnx.Linear(4, 4, rngs=rngs)])
            self.data = nnx.data({"in": [self.first]})

    model = lora(Twice(nnx.Rngs(0)), 2)
    assert type(model.first).__name__ == type(model.others[1]).__name__ == "LoRALinear"
    assert model.first is model.others[0] is model.data["in"][0] is not model.others[1]


def test_a_layer_with_a_call_of_its_own_is_refused():
    class Scaled(nnx.Linear):
        def __call__(self, x):
            return 10 * super().__call__(x)

    model = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0)), Scaled(4, 4, rngs=nnx.Rngs(1))])
    with pytest.raises(TypeError, match="lora: 1 is a Scaled, whose __call__ an addition would replace"):
        lora(model, 2)
    assert [type(layer) for layer in model] == [nnx.Linear, Scaled]
    lora(model, 2, mm.path(0))
    assert type(model[1]) is Scaled and type(model[0]).__name__ == "LoRALinear"


def test_a_model_without_linear_layers():
    with pytest.raises(ValueError, match="no such layer; the model has no linear layers"):
        lora(nnx.List([nnx.Conv(2, 2, (3,), rngs=nnx.Rngs(0))]), 2)
