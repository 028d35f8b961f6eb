"""What the `transformers` package makes of small models whose weights anybody can draw again.

`python -m tests.modules.llama`, where torch and transformers are installed, writes `llama.npz`, with which
`test_llama.py` compares an `LM` of the same weights.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from mmnnx.modules.lm import LMConfig
from mmnnx.modules.rotary import RotaryScaling

FILE = Path(__file__).parent / "llama.npz"
SMALL = dict(vocab=96, layers=3, width=48, heads=6, kv_heads=2, mlp=80)

FLAVOURS = {
    "Llama": SMALL | dict(rotary_base=500_000.0, norm_eps=1e-5),
    "Llama, tied, frequencies scaled": SMALL
    | dict(tied=True, rotary_base=500_000.0, norm_eps=1e-5)
    | dict(rotary_scaling=RotaryScaling(factor=4.0, original_max_position_embeddings=32)),
    "Qwen2": SMALL | dict(bias=True, rotary_base=1_000_000.0),
    "Qwen3": SMALL | dict(qk_norm=True, head_dim=16, rotary_base=1_000_000.0),
}
PROMPT, NEW = 7, 12  # tokens, for generation
PROBES = 4
EVERY = 7  # of the logits, those of each seventh token are kept


def tokens(length: int = 60) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SMALL["vocab"], (2, length))


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weight that `transformers` calls so; scales of norms are near one."""
    drawn = 0.2 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    return drawn + 1 if name.endswith("norm.weight") else drawn


def probed(name: str, gradient: np.ndarray) -> np.ndarray:
    """A few numbers that tell a gradient from others: its products with random arrays."""
    rng = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    return np.array([np.vdot(rng.standard_normal(gradient.shape), gradient) for _ in range(PROBES)])


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


def reference(name: str, config: LMConfig):
    """The model of `transformers` with these sizes and the weights above, norms and biases too."""
    import torch
    import transformers

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
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.copy_(torch.tensor(weight(path, tuple(parameter.shape))))
    return model.eval()


def answers(name: str) -> dict[str, np.ndarray]:
    """Logits, loss, gradients and greedy tokens of a model of `transformers`."""
    import torch

    model, batch = reference(name, LMConfig(**FLAVOURS[name])), torch.tensor(tokens())
    result = model(batch, labels=batch)
    result.loss.backward()
    found = {"logits": result.logits.detach().numpy()[:, ::EVERY], "loss": result.loss.detach().numpy()}
    for path, parameter in model.named_parameters():
        found[f"gradient {path}"] = probed(path, parameter.grad.numpy())
    how = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        found["generated"] = model.generate(torch.tensor(tokens(PROMPT)), **how).numpy()[:, PROMPT:]
    return found


if __name__ == "__main__":
    np.savez_compressed(
        FILE, **{f"{n}/{what}": value for n in FLAVOURS for what, value in answers(n).items()}
    )
