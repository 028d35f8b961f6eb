"""The language model against the reference: the same weights in the `transformers` package, the same logits.

This runs where torch and transformers are installed, which mmnnx does not depend on; elsewhere pytest reports
the file as skipped. `pip install torch transformers` to run it.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmnnx.modules.generate import generate
from mmnnx.modules.lm import LM, LMConfig
from mmnnx.modules.rotary import RotaryScaling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = dict(vocab=96, layers=3, width=48, heads=6, kv_heads=2, mlp=80)

FLAVOURS = {
    "Llama": SMALL | dict(rotary_base=500_000.0, norm_eps=1e-5),
    "Llama, tied, frequencies scaled": SMALL
    | dict(tied=True, rotary_base=500_000.0, norm_eps=1e-5)
    | dict(rotary_scaling=RotaryScaling(factor=4.0, original_max_position_embeddings=32)),
    "Qwen2": SMALL | dict(bias=True, rotary_base=1_000_000.0),
    "Qwen3": SMALL | dict(qk_norm=True, head_dim=16, rotary_base=1_000_000.0),
}


def reference(name: str, config: LMConfig):
    """The model of `transformers` with these sizes and random weights, norms and biases too."""
    family = name.split(",")[0]
    rope = dict(rope_type="default", rope_theta=config.rotary_base)
    if config.rotary_scaling is not None:
        rope |= dict(rope_type="llama3", **vars(config.rotary_scaling))
    sizes = dict(
        vocab_size=config.vocab,
        hidden_size=config.width,
        intermediate_size=config.mlp,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=512,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tied,
        attn_implementation="eager",
    )
    if config.head_dim is not None:
        sizes["head_dim"] = config.head_dim
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model.eval()


NAMES = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}


def our_path(name: str) -> tuple:
    """Where a weight of `transformers` is in an `LM`; linear layers hold theirs transposed."""
    *module, kind = name.removeprefix("model.").split(".")
    if module[0] == "layers":
        ours = ["blocks", int(module[1]), *NAMES[".".join(module[2:])].split(".")]
    else:
        ours = [{"embed_tokens": "embed", "lm_head": "head", "norm": "norm"}[module[0]]]
    if ours[-1].endswith("norm"):
        kind = "scale"
    elif kind == "weight":
        kind = "embedding" if ours == ["embed"] else "kernel"
    return (*ours, kind)


def ours(theirs, config: LMConfig) -> LM:
    """An `LM` with the weights of a model of `transformers`, every one of them used once."""
    model = LM(config, rngs=nnx.Rngs(1))
    variables = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for name, weight in theirs.named_parameters():
        variable, value = variables.pop(our_path(name)), weight.detach().numpy()
        value = value.T if our_path(name)[-1] == "kernel" else value
        assert variable.shape == value.shape
        variable.set_value(jnp.asarray(value))
    assert not variables
    return model


@pytest.fixture(params=FLAVOURS)
def pair(request):
    config = LMConfig(**FLAVOURS[request.param])
    theirs = reference(request.param, config)
    return theirs, ours(theirs, config)


def tokens(length: int = 60) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 96, (2, length))


def test_logits(pair):
    theirs, model = pair
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens())).logits.numpy()
    assert expected.std() > 0.5
    np.testing.assert_allclose(model(jnp.asarray(tokens())), expected, rtol=1e-3, atol=2e-4)


def test_loss_and_gradients(pair):
    theirs, model = pair
    batch = torch.tensor(tokens())
    expected = theirs(batch, labels=batch).loss
    expected.backward()
    loss, grads = nnx.jit(nnx.value_and_grad(lambda model, x: model.loss(x)))(model, jnp.asarray(tokens()))
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    found = dict(nnx.to_flat_state(grads))
    for name, weight in theirs.named_parameters():
        want = weight.grad.numpy()
        want = want.T if our_path(name)[-1] == "kernel" else want
        got = found[our_path(name)][...]
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5 + 1e-4 * np.abs(want).max(), err_msg=name)


def test_greedy_generation(pair):
    theirs, model = pair
    prompt = tokens(7)
    with torch.no_grad():
        settings = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
        expected = theirs.generate(torch.tensor(prompt), **settings).numpy()[:, 7:]
    np.testing.assert_array_equal(generate(model, prompt, 12), expected)
